"""Smoothness of a video's motion in closed form, and how much moves at all.

Letters: B videos of F frames, d_t the difference of frames t + 1 and t.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from flowrl.benchmarks.temporal import frame_change
from flowrl.config.sections import at_least
from flowrl.rewards.base import FunctionReward, Model, Reward, RewardInputs, RewardOutput, tensor_output
from flowrl.rewards.base.frames import videos_of
from flowrl.runtime.placement import widened
from flowrl.runtime.shapes import Float


@dataclass(frozen=True, kw_only=True, slots=True)
class TemporalSmoothness:
    """How evenly a video moves, in [0, 1], less if hardly anything moves.

        smoothness * min(1, frame_change / min_change)

    See `smoothness` and `frame_change`; both are parts. A frozen video is perfectly smooth, so that without the
    second factor it would be the best; with it, it gets 0. A video of fewer than 3 frames is refused.
    """

    judges: ClassVar[tuple[str, ...]] = ("videos",)
    cell: int = 8
    """Side in pixels of the cells whose means are compared; 1 compares pixels."""
    min_change: float = 0.005
    """Mean change of a pixel from frame to frame below which the value falls to 0; the default is little more than
    one level of 255. 0 for no bound: a frozen video then gets 1."""
    differentiable: ClassVar[bool] = True
    models: ClassVar[tuple[Model, ...]] = ()

    def __post_init__(self) -> None:
        at_least(1, self, "cell")
        check_min_change(self.min_change)

    def build(self, device: torch.device) -> Reward:
        """Makes the reward; it computes on the device of the videos."""

        def score(inputs: RewardInputs) -> RewardOutput:
            videos = videos_of(inputs, owner="reward 'temporal_smoothness'", at_least=3)
            # One video at a time: differences in float64 take several times the memory of the video.
            even = torch.stack([smoothness(video, cell=self.cell) for video in videos])
            change = torch.stack([frame_change(video) for video in videos])
            moving = (change / self.min_change).clamp(max=1) if self.min_change else torch.ones_like(change)
            return tensor_output((even * moving).float(), {"smoothness": even.float(), "frame_change": change.float()})

        return FunctionReward(
            name="temporal_smoothness",
            score=score,
            needs=frozenset({"videos"}),
            version=f"temporal_smoothness:cell-{self.cell}:min_change-{self.min_change:g}",
            differentiable=True,
        )


def check_min_change(min_change: float) -> None:
    """Refuses a bound on `frame_change` that is negative or above 1, the largest change there is."""
    if not 0 <= min_change <= 1:
        raise ValueError(
            f"min_change is a mean change of pixels in [0, 1], such as 0.005, or 0 for no bound, got {min_change}."
        )


def smoothness(video: Float[Tensor, " f 3 h w"], *, cell: int) -> Float[Tensor, ""]:
    """How little the change itself changes: a scalar in [0, 1].

        1 - sum |d_t+1 - d_t| / sum (|d_t+1| + |d_t|)

    over all cells, channels and t. It is 1 if every cell changes at a constant rate or not at all, 0 if every
    cell flickers between two levels, and 1 - sqrt(3) / 2 for independent Gaussian frames. Pixels themselves would call
    a sharp edge that moves evenly as rough as flicker, since each pixel jumps once; the mean of a cell of k pixels
    changes evenly while the edge crosses it.
    """
    pooled = avg_pool2d(widened(video), cell, ceil_mode=True, count_include_pad=False)
    first = pooled.diff(dim=0)
    second = first.diff(dim=0)
    size = first.abs()
    total = (size[1:] + size[:-1]).sum()
    roughness = second.abs().sum() / total.clamp(min=torch.finfo(total.dtype).tiny)
    return 1 - torch.where(total == 0, 0.0, roughness)  # 0 / 0 of a frozen video; NaN pixels stay NaN
