"""What each form of `pipeline.quantize` costs and saves: bytes, error and time on the embedded model, bytes of others.

    .venv/bin/python tests/trials/quantised_bases.py

The error is that of a velocity, relative, over 16 prompts at four times each; the deviation is that of velocities with
gradient from those without. Times are medians of five calls of 8 rows, processor time of one thread, without gradient
and with a backward pass through a LoRA of rank 16. Of published checkpoints the bytes are counted on networks without
weights. Writes `docs/research/trials/quantised_bases.json`.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from origin import origin
from torch import nn

from flowrl.config.train import resolve_path
from flowrl.pipelines import family, family_name
from flowrl.pipelines.arithmetic.compiling import repeated_blocks
from flowrl.pipelines.families.sd3 import FAMILY
from flowrl.pipelines.lora import Policy
from flowrl.pipelines.weights.loading_choices import Loading
from flowrl.pipelines.weights.quantize import LIBRARIES, large_layers
from flowrl.runtime.randomness import counter_normal

OUT = Path(__file__).resolve().parents[2] / "docs" / "research" / "trials" / "quantised_bases.json"
BYTES = {"int8": 1.0, "fp8": 1.0, "nf4": 0.5 + 1 / 64 + 4 / (64 * 256), "int8_bnb": 1.0}  # of a weight
MODELS = (
    "stabilityai/stable-diffusion-3.5-medium", "black-forest-labs/FLUX.1-dev", "Qwen/Qwen-Image",
    "Wan-AI/Wan2.1-T2V-14B-Diffusers", "stabilityai/stable-diffusion-xl-base-1.0",
)  # fmt: skip
COLOURS, SHAPES = ("red", "green", "blue", "yellow"), ("circle", "square", "triangle", "star")
PROMPTS = [f"a photo of a {colour} {shape}" for colour in COLOURS for shape in SHAPES]


def counted(model: str) -> dict[str, float]:
    """GiB of a published denoiser in bfloat16 and in each form, and the share of its weights that are quantised."""
    network = family(family_name(None, model)).meta_denoiser(model)
    assert network is not None
    total = sum(weight.numel() for weight in network.parameters())
    parts = network.values() if isinstance(network, nn.ModuleDict) else [network]
    layers = [layer for part in parts for block in repeated_blocks(part) for _, _, layer in large_layers(block)]
    large, rows = (sum(values) for values in zip(*((x.weight.numel(), x.out_features) for x in layers), strict=True))
    sizes = {form: 2 * (total - large) + each * large + 4 * rows * (form != "nf4") for form, each in BYTES.items()}
    return {"share": round(large / total, 4), "bfloat16_gib": round(total * 2 / 2**30, 2)} | {
        f"{form}_gib": round(size / 2**30, 2) for form, size in sizes.items()
    }


def median_ms(call: Callable[[], Any]) -> float:
    """Processor time of five calls, after one that is not counted."""
    call()
    taken = []
    for _ in range(5):
        begun = time.process_time()
        call()
        taken.append(time.process_time() - begun)
    return round(1000 * statistics.median(taken), 1)


def measured(form: str, exact: list[torch.Tensor], dtype: torch.dtype) -> tuple[dict[str, float], list[torch.Tensor]]:
    """The embedded model in a form; `exact` are the velocities of the one as it was read, empty for that itself."""
    p = FAMILY.load(str(resolve_path("asset:tiny-sd3")), dtype=dtype, how=Loading(quantize=form))
    cond, times = p.encode(PROMPTS), (900.0, 700.0, 400.0, 100.0)
    x = counter_normal((len(PROMPTS), *p.latent_shape), "trial")
    with torch.no_grad():
        found = [p.network(x, torch.full((len(x),), t), cond) for t in times]
    row = {"mib": round(sum(t.nbytes for t in (*p.denoiser.parameters(), *p.denoiser.buffers())) / 2**20, 2)}
    if exact:
        row["error"] = round(float(torch.stack(found).sub(torch.stack(exact)).norm() / torch.stack(exact).norm()), 4)
    policy = Policy(p.denoiser, rank=16, alpha=32, targets=FAMILY.lora_targets, seed=1)
    weights, few, at, eight = list(policy.parameters.values()), x[:8], torch.full((8,), 500.0), p.encode(PROMPTS[:8])

    def trained() -> None:
        torch.autograd.grad(p.network(few, at, eight).square().mean(), weights, allow_unused=True)

    with torch.no_grad():
        plain = p.network(few, at, eight)
        row["forward_ms"] = median_ms(lambda: p.network(few, at, eight))
    row["deviation"] = float((p.network(few, at, eight).detach() - plain).abs().max())
    row["forward_backward_ms"] = median_ms(trained)
    return row, found


def main() -> None:
    """Measures, prints and writes."""
    torch.set_num_threads(1)
    result: dict[str, Any] = origin() | {"published": {model: counted(model) for model in MODELS}}
    for dtype in (torch.float32, torch.bfloat16):
        rows, exact = {}, list[torch.Tensor]()
        for form in ("none", *LIBRARIES):
            rows[form], found = measured(form, exact, dtype)
            exact = exact or found
        result[str(dtype).removeprefix("torch.")] = rows
    text = json.dumps(result, indent=1)
    print(text)
    OUT.write_text(text + "\n")


if __name__ == "__main__":
    main()
