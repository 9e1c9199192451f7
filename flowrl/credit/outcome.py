"""Outcome credit: the advantage of the finished image at every step that led to it (Flow-GRPO)."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowrl.trajectory import Rows, Trajectory


def outcome_rows(
    trajectory: Trajectory,
    advantage_B: Float[Tensor, " b"],
    group_B: Int[Tensor, " b"],
    *,
    clip_range: tuple[float, float],
    keep_B: Bool[Tensor, " b"] | None = None,
) -> Rows:
    """Turn a rollout into rows, the same advantage at each of its stochastic steps (Liu et al., arXiv 2505.05470).

    Row `i * K + k` is stochastic step k of sample i. `source` and `produced` point into `states.flatten(0, 1)`.

    Args:
        trajectory: b samples with K stochastic steps.
        advantage_B: [b].
        group_B: [b] integers, the prompt group of each sample.
        clip_range: (low, high) distances of the ratio from 1.
        keep_B: [b] bool, samples that are trained; all if None.

    Returns:
        b * K rows on the device of the log-probabilities, weight 1.

    Raises:
        ValueError: a shape is not [b], the trajectory has no stochastic step, or a clip distance is negative.
    """
    b, count = len(trajectory), len(trajectory.steps)
    keep_B = torch.ones(b, dtype=torch.bool) if keep_B is None else keep_B
    shapes = {"advantage_B": advantage_B.shape, "group_B": group_B.shape, "keep_B": keep_B.shape}
    if any(shape != (b,) for shape in shapes.values()):
        raise ValueError(f"a trajectory of {b} samples needs one value a sample [{b}], got {shapes}")
    if count == 0:
        raise ValueError("the trajectory has no stochastic step, so nothing to train: name some in the rollout")
    if min(clip_range) < 0:
        raise ValueError(f"clip_range holds two distances from 1 (low, high), got {clip_range}")
    device, dtype = trajectory.log_prob.device, trajectory.log_prob.dtype
    sample = torch.arange(b, device=device).repeat_interleave(count)
    step = torch.tensor(trajectory.steps, device=device).repeat(b)
    position = {state: index for index, state in enumerate(trajectory.kept)}
    source = torch.tensor([position[s] for s in trajectory.steps], device=device).repeat(b)
    produced = torch.tensor([position[s + 1] for s in trajectory.steps], device=device).repeat(b)
    offset = sample * len(trajectory.kept)
    ones = torch.ones(b * count, device=device, dtype=dtype)
    return Rows(
        source=offset + source,
        produced=offset + produced,
        step=step,
        sample=sample,
        group=group_B.to(device)[sample],
        old_log_prob=trajectory.log_prob.flatten(),
        advantage=advantage_B.to(device=device, dtype=dtype)[sample],
        weight=ones,
        clip_low=ones * clip_range[0],
        clip_high=ones * clip_range[1],
        keep=keep_B.to(device)[sample],
    )
