"""Two processes that share the tokens of an image against one that has them all: what a launched script calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny_flux import save_tiny_flux, save_tiny_kontext
from tiny_flux2 import save_tiny_flux2
from tiny_ltx_video import save_tiny_ltx_video
from tiny_qwen_image import save_tiny_qwen_image
from tiny_wan import OPTIONS, save_tiny_wan
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from video_family import image

from flowrl.pipelines import family
from flowrl.pipelines.lora import Policy
from flowrl.pipelines.weights.context_parallel import share_tokens
from flowrl.randomness import counter_normal

PROMPTS = ["a photo of a red circle", "two blue squares and a green star beside them"]
SMALL = {"max_sequence_length": 16}
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "wan": ("wan", save_tiny_wan, OPTIONS),
    "wan, first frame": ("wan", lambda folder: save_tiny_wan(folder, "ti2v-5b"), {**OPTIONS, "image_to_video": True}),
    "wan, image beside": ("wan", lambda folder: save_tiny_wan(folder, "i2v"), {**OPTIONS, "max_sequence_length": 12}),
    "flux": ("flux", save_tiny_flux, {**SMALL, "height": 32, "width": 32}),
    "kontext": ("kontext", save_tiny_kontext, {**SMALL, "height": 32, "width": 32}),
    "flux2": ("flux2", save_tiny_flux2, {"max_sequence_length": 32, "height": 32, "width": 32}),
    "qwen_image": ("qwen_image", save_tiny_qwen_image, {**SMALL, "height": 16, "width": 16}),
    "ltx_video": ("ltx_video", save_tiny_ltx_video, {**SMALL, "height": 64, "width": 64, "num_frames": 9}),
}
"""Name -> family, what writes a tiny pipeline of it, and what it is loaded with."""


def compared(name: str, folder: Path, mesh: DeviceMesh, **arithmetic: Any) -> dict[str, float]:
    """Largest differences of shared tokens, relative to the largest number: velocity and the LoRA's gradients."""
    own, write, options = CASES[name]
    place = folder / name
    if dist.get_rank() == 0:
        write(place)
    dist.barrier()
    found = [_evaluated(own, place, mesh if shared else None, **{**options, **arithmetic}) for shared in (False, True)]
    (whole, one), (split, parts) = found
    for part in parts:
        dist.all_reduce(part)
    # Both processes have all of it, and the same.
    other = split.clone()
    dist.broadcast(other, 0)
    assert torch.equal(split, other)
    largest = max(float(gradient.abs().max()) for gradient in one)
    worst = max(float((a - b).abs().max()) for a, b in zip(one, parts, strict=True))
    return {"velocity": float((whole - split).abs().max() / whole.abs().max()), "gradient": worst / largest}


def _evaluated(name: str, place: Path, mesh: DeviceMesh | None, **options: Any) -> tuple[Tensor, list[Tensor]]:
    pipeline: Any = family(name).load(str(place), **{"dtype": torch.float32, **options})
    policy = Policy(pipeline.denoiser, rank=2, alpha=4, targets=pipeline.lora_targets, seed=0)
    for number, parameter in enumerate(policy.parameters.values()):
        parameter.data += 0.3 * counter_normal(parameter.shape, "lora", number)
    if mesh is not None:
        share_tokens(pipeline, mesh)
    sources = [[image(0, 32, 32)] for _ in PROMPTS] if pipeline.num_sources[1] else None
    cond = pipeline.encode(PROMPTS, sources)
    x = counter_normal((len(PROMPTS), *pipeline.latent_shape), "x")
    direction = counter_normal(x.shape, "direction")
    evaluate = pipeline.guided(pipeline.network, cond, None, 1.0)
    velocity = evaluate(x, torch.tensor([0.5, 0.7]), torch.tensor([500.0, 700.0]))
    gradients = torch.autograd.grad((velocity * direction).sum(), list(policy.parameters.values()), allow_unused=True)
    pairs = zip(gradients, policy.parameters.values(), strict=True)
    return velocity.detach(), [torch.zeros_like(p) if g is None else g for g, p in pairs]
