"""Size of the JPEG file as a reward: the toy tasks of DDPO (Black et al. 2023, arXiv 2305.13301, section 5.1).

The size depends on the resolution, so values of different resolutions must not be compared.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import PIL
import torch
from PIL import Image

from flowrl.rewards.base import FunctionReward, Model, Reward, RewardInputs, RewardOutput, output_of, to_uint8
from flowrl.runtime.shapes import UInt8

JPEG_QUALITY = 95
"""Pillow's `quality` in every published use; all other encoder options stay at their defaults."""

_FACTORS = {"ddpo": -1 / 1000, "flow_grpo": -1 / 500_000}


def jpeg_bytes(image: UInt8[np.ndarray, " h w 3"]) -> int:
    """Length in bytes of an image's JPEG encoding at quality 95."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="JPEG", quality=JPEG_QUALITY)
    return buffer.tell()


@dataclass(frozen=True, kw_only=True, slots=True)
class JpegCompressibility:
    """Rewards images whose JPEG is small. `flow_grpo`: `-(bytes / 1000) / 500`; `ddpo`: `-bytes / 1000`."""

    scale: Literal["ddpo", "flow_grpo"] = "flow_grpo"
    """The published scaling, by its source."""
    models: ClassVar[tuple[Model, ...]] = ()

    def build(self, device: torch.device) -> Reward:
        """Makes the reward; the encoder runs on the host."""
        return _jpeg_reward("jpeg_compressibility", _FACTORS[self.scale], self.scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class JpegIncompressibility:
    """Rewards images whose JPEG is large: `bytes / 1000`, on which published uses agree."""

    half: Literal["left", "right"] | None = None
    """The half of an image that is encoded, beside which the other has a reward of its own; null for all of it."""
    models: ClassVar[tuple[Model, ...]] = ()

    def build(self, device: torch.device) -> Reward:
        """Makes the reward; the encoder runs on the host."""
        return _jpeg_reward("jpeg_incompressibility", 1 / 1000, "ddpo", self.half)


def _jpeg_reward(name: str, factor: float, scale: str, half: str | None = None) -> Reward:

    def score(inputs: RewardInputs) -> RewardOutput:
        middle = inputs.images.shape[-1] // 2
        columns = slice(middle if half == "right" else None, middle if half == "left" else None)
        sizes = [jpeg_bytes(np.ascontiguousarray(image[:, columns])) for image in to_uint8(inputs.images)]
        return output_of([factor * size for size in sizes], inputs, {"kilobytes": [size / 1000 for size in sizes]})

    version = f"{name}:{scale}:{f'{half}:' if half else ''}quality-{JPEG_QUALITY}:pillow-{PIL.__version__}"
    return FunctionReward(name=name, score=score, needs=frozenset({"images"}), version=version)
