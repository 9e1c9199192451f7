"""FLOPs of an iteration and of a run, from counted evaluations and the FLOPs of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from flowrl.pipelines.places import known_checkpoints
from flowrl.planning.counts import RunCounts
from flowrl.planning.network import Network
from flowrl.planning.published_models import Parts
from flowrl.planning.traces import Trace
from flowrl.runtime.files import read_json

FLOOR = 788.0
"""TFLOP/s of bfloat16 matrix products, as measured on an H200; nothing can be faster."""

_DECODE = {"VAE_4": 9.8e6, "VAE_16": 9.8e6, "VAE_32": 9.8e6, "VAE_WAN": 8.5e6}  # FLOPs per decoded pixel and frame
_DECODE_WAN_IMAGE = 10.9e6  # a video's frames share work in time


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """FLOPs by stage; `evaluation` and decoding are None if their number of images is unknown."""

    stages: Mapping[str, float]
    evaluation: float | None
    decoding: float | None

    @property
    def training(self) -> float:
        """FLOPs without evaluations."""
        return sum(self.stages.values()) + (self.decoding or 0.0)

    @property
    def total(self) -> float:
        """All known FLOPs."""
        return self.training + (self.evaluation or 0.0)


def cost_of(
    network: Network,
    run: RunCounts,
    *,
    eval_forward: float,
    decode: float | None,
    eval_decode: float | None,
    recomputed: float,
) -> Cost:
    """FLOPs of a whole run.

    Args:
        network: one evaluation.
        eval_forward: FLOPs of a network evaluation at the size of evaluation images.
        decode, eval_decode: FLOPs of decoding one image, in training and evaluations; None where not known.
        recomputed: forward passes that are repeated for a row of the backward pass.
    """
    total = run.total
    stages = {
        "rollout": network.forward * (total.rollout + total.completion),
        "update": network.forward * total.update + network.backward * total.backward,
        "recomputation": network.forward * total.backward * recomputed,
        "reference": network.forward * total.reference,
    }
    evaluation = None
    if not run.evaluations:
        evaluation = 0.0
    elif run.evaluation_rows is not None:
        images = (run.evaluation_images or 0) * (eval_decode or 0.0)
        evaluation = run.evaluations * (run.evaluation_rows * eval_forward + images)
        evaluation += (run.base_rows or 0) * eval_forward
    return Cost(
        stages={name: value for name, value in stages.items() if value},
        evaluation=evaluation,
        decoding=None if decode is None else decode * total.images,
    )


def decode_flops(model: str, parts: Parts | None, size: tuple[int, int, int | None]) -> float | None:
    """FLOPs of decoding one image or video of (height, width, frames), counted in a folder's `AutoencoderKL` or from a
    published decoder's known cost per pixel; None if unknown."""
    height, width, frames = size
    path = Path(model) / "vae" / "config.json"
    if path.is_file():
        config = read_json(path, finite=False)
        if config.get("_class_name") == "AutoencoderKL":
            from diffusers import AutoencoderKL

            with torch.device("meta"):
                vae = AutoencoderKL.from_config(dict(config))
                factor = 2 ** (len(vae.config.block_out_channels) - 1)
                latent = torch.empty(1, vae.config.latent_channels, height // factor, width // factor)
                with torch.no_grad(), Trace() as counter:
                    vae.decode(latent)
            return counter.total
    kinds = {count: kind for kind, count in known_checkpoints.tables()["part_parameters"].items()}
    kind = kinds.get((parts or {}).get("vae", 0))
    if kind not in _DECODE:
        return None
    each = _DECODE_WAN_IMAGE if kind == "VAE_WAN" and frames is None else _DECODE[kind]
    return each * height * width * (frames or 1)
