"""The toy pipeline with clips for images."""

from __future__ import annotations

import torch
from torch import Tensor
from toy_pipeline import Toy

FRAMES = 4


class VideoToy(Toy):
    """The toy, whose images are clips that brighten from frame to frame and fall back in the last one."""

    fps: float | None = 8.0

    def decode(self, latents: Tensor, *, gradient: bool = False) -> Tensor:
        image = super().decode(latents, gradient=gradient)
        levels = torch.tensor([0.2, 0.5, 0.8, 0.4])[:, None, None, None]
        return image[:, None] * levels
