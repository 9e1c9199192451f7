"""What a plan counts of a stock pipeline that no family is written for, beside the same counted of the real one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from generic_proof import SETTINGS
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from flowrl.pipelines import family
from flowrl.pipelines.generic.generic_family import FAMILY
from flowrl.pipelines.generic.generic_pipeline import GenericPipeline
from flowrl.pipelines.generic.stock_recording import WORD
from flowrl.planning.network import FewBlocks, without_gradient
from flowrl.planning.stock_route import StockRoute, stock_decoding, stock_route
from flowrl.runtime.randomness import counter_normal


def real(name: str, folder: Path) -> Any:
    """The pipeline with its weights, as it is loaded, without the test at load."""
    pipe = getattr(diffusers, name).from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            part.eval().requires_grad_(False)
    networks = {key: part for key, part in pipe.components.items() if key.startswith("transformer") and part}
    encoders = [key for key in pipe.components if key.startswith("text_encoder")]
    return GenericPipeline(
        str(folder), pipe, networks, encoders, FAMILY.chosen(SETTINGS[name]), dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip


def counted(call: Callable[[], Any]) -> int:
    """FLOPs by torch's own counter; attention as its two products."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


def route(name: str, folder: Path) -> StockRoute:
    """What a plan has of it."""
    found = stock_route(family("generic"), str(folder), SETTINGS[name])
    assert isinstance(found, StockRoute), found
    return found


def bytes_of(network: nn.Module) -> int:
    """Bytes of a network's weights."""
    return sum(parameter.numel() * parameter.element_size() for parameter in network.parameters())


def plan_proof(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """FLOPs of an evaluation and of decoding, rows of guidance, size and bytes: of the plan, and of a real run."""
    found, p = route(name, folder), real(name, folder)
    denoiser = FAMILY.meta_denoiser(str(folder))
    assert denoiser is not None
    decode, _ = stock_decoding(found.recorded, dtype="float32", videos=p.videos)
    height, width, frames = found.recorded.size
    parameters = sum(parameter.numel() for parameter in denoiser.parameters())
    planned = {
        "forward_flops": without_gradient(FewBlocks(least=denoiser), found.recorded.call)[0], "decode_flops": decode,
        "rows": [found.rows(1.0), found.rows(3.0)],
        "drawn": [3, height, width] if frames is None else [frames, 3, height, width],
        "bytes": {"denoiser": 4 * parameters, **{part: 4 * count for part, count in found.recorder.parts.items()}},
    }  # fmt: skip
    cond, negative = p.encode([WORD * FAMILY.text_tokens(str(folder), SETTINGS[name])]), p.encode([""])
    schedule = p.schedule(2, "diffusers")
    x = counter_normal(p.asked(2, 1.0).made.shape, "x")

    def evaluated(scale: float) -> Any:
        velocity = p.guided(p.network, cond, negative if p.passes(scale) == 2 else None, scale)
        return velocity(x, schedule.sigma[0], schedule.timestep[0])

    def rows(scale: float) -> int:
        met: list[int] = []
        p.passes(scale)  # asked here once, since it calls up to the network

        def seen(network: nn.Module, args: Any, named: Any) -> None:
            met.append(len(args[0] if args else named["hidden_states"]))

        hooks = [one.register_forward_pre_hook(seen, with_kwargs=True) for one in p.experts.values()]
        evaluated(scale)
        for hook in hooks:
            hook.remove()
        return sum(met)

    with torch.no_grad():
        forward = counted(lambda: evaluated(1.0))
        decoded = counted(lambda: p.decode(x))
        guided = [rows(1.0), rows(3.0)]
    p.measure()
    others = {key: bytes_of(part) for key, part in p.pipe.components.items()
              if isinstance(part, nn.Module) and key not in p.experts}  # fmt: skip
    return planned, {
        "forward_flops": forward, "decode_flops": decoded, "rows": guided,
        "drawn": list(p.image_shape),
        "bytes": {"denoiser": sum(map(bytes_of, p.experts.values())), **others},
    }  # fmt: skip
