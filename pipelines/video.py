"""What video families share: numbers of frames, clips through an autoencoder, grids of flow schedulers.

Latents are `[b, C, F, h, w]` and clips `[b, F, 3, H, W]` in [0, 1]; stock autoencoders take and give `[b, 3, F, H, W]`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.pipelines.common import decode_slices, encode_slices, with_shift
from flowrl.samplers.schedules import build_schedule
from flowrl.trajectory import Schedule


def check_frames(model: str, num_frames: int, factor: int, multiple: int = 1) -> int:
    """Latent frames of a clip: the first frame and then `factor` to one, `multiple` of them to a patch.

    Raises:
        ValueError: no whole number of latent frames or patches; names the nearest numbers of frames.
    """
    latent, rest = divmod(num_frames - 1, factor)
    if num_frames >= 1 and rest == 0 and (latent + 1) % multiple == 0:
        return latent + 1
    step, first = factor * multiple, factor * (multiple - 1) + 1
    below = max(first, first + (num_frames - first) // step * step)
    raise ValueError(
        f"pipeline.num_frames ({num_frames}) must be {first} plus a multiple of {step} for {model}: the nearest are "
        f"{below} and {below + step}"
    )


def decode_clips(latents: Tensor, size: int, decode: Callable[[Tensor], Tensor], *, gradient: bool) -> Tensor:
    """Clips in [0, 1] of latents, `size` at a time; `decode` is the autoencoder's, to `[b, 3, F, H, W]` in [-1, 1]."""
    return decode_slices(latents, size, lambda part: decode(part).transpose(1, 2), gradient=gradient)


def encode_clips(
    clips: Tensor, wanted: tuple[int, ...], size: int, encode: Callable[[Tensor], Tensor], device: torch.device
) -> Tensor:
    """Latents of clips in [0, 1], `size` at a time; `encode` is the autoencoder's, of `[b, 3, F, H, W]` in [-1, 1]."""
    return encode_slices(clips, wanted, size, lambda part: encode(part.transpose(1, 2)), device)


def in_float32(module: nn.Module) -> None:
    """Keeps a float32 module's arithmetic in float32 under autocast, as it is in the stock pipeline."""
    forward = module.forward

    def exact(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(args[0].device.type, enabled=False):
            return forward(*args, **kwargs)

    module.forward = exact


# ---- schedules -------------------------------------------------------------------------------------------------------


def check_flow_scheduler(model: str, config: Mapping[str, Any]) -> None:
    """Refuses the configuration of a scheduler that does not step along sigmas of a flow.

    Raises:
        ValueError: says what the scheduler is.
    """
    name = str(config.get("_class_name"))
    if not name.startswith("FlowMatch") and not config.get("use_flow_sigmas"):
        raise ValueError(
            f"the scheduler of {model} is {name} without use_flow_sigmas, and this family is a flow model: take the "
            "scheduler folder of the published checkpoint"
        )


def check_scheduler_folder(model: str) -> None:
    """`check_flow_scheduler` for a folder, before weights load; a hub id passes."""
    path = Path(model) / "scheduler" / "scheduler_config.json"
    if path.is_file():
        check_flow_scheduler(model, json.loads(path.read_text(encoding="utf-8")))


def flow_schedule(
    scheduler: Any,
    num_steps: int,
    grid: str,
    shift: float | None = None,
    *,
    sigmas: str = "diffusers",
    mu: float | None = None,
) -> Schedule:
    """Noise levels of a stock flow scheduler.

    Grid "diffusers" is what the stock pipeline visits. With FlowMatchEulerDiscreteScheduler that is the grid `sigmas`:
    "linspace" where the pipeline passes sigmas in. Multistep schedulers with flow sigmas (UniPC, DPM-Solver) are asked
    themselves, since their grid differs between versions of diffusers: now it starts at .999999, formerly, and in
    Flow-GRPO's published runs, at .99967, which is "unipc_flow". Their timesteps are whole numbers. "linspace" is
    evenly spaced and shifted once.

    Args:
        scheduler: stock scheduler.
        num_steps: T.
        grid: "diffusers", "linspace" or "unipc_flow".
        shift: replaces the scheduler's own.
        sigmas: which grid of FlowMatchEulerDiscreteScheduler the stock pipeline visits.
        mu: logarithm of the shift, for schedulers that shift by resolution.

    Raises:
        ValueError: unknown grid, or a setting that the grid cannot follow.
    """
    config = dict(scheduler.config)
    multistep = bool(config.get("use_flow_sigmas"))
    if not multistep:
        grid = sigmas if grid == "diffusers" else grid
        if config.get("use_dynamic_shifting") and grid != "unipc_flow":
            if shift is not None and not shift > 0:
                raise ValueError(f"shift must be positive, got {shift}: 1 leaves the grid unshifted")
            return build_schedule(config, num_steps, grid=grid, mu=mu if shift is None else math.log(shift))
        config = with_shift(config, shift)
        return build_schedule({**config, "flow_shift": config.get("shift", 1.0)}, num_steps, grid=grid)
    own = config["flow_shift"] if shift is None else shift
    if grid == "diffusers" and num_steps > 0:
        stock = type(scheduler).from_config(config, flow_shift=own)
        stock.set_timesteps(num_steps)
        return Schedule(sigma=stock.sigmas.float().cpu(), timestep=stock.timesteps.float().cpu())
    plain = {"shift": own, "flow_shift": own, "num_train_timesteps": config["num_train_timesteps"]}
    return build_schedule(plain, num_steps, grid="unipc_flow" if grid == "diffusers" else grid)
