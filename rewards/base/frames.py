"""Videos for rewards that judge images: which frames are looked at, and how their values become one.

    {name: pick_score, frames: {policy: uniform, count: 8, reducer: mean}}

Published uses: HPSv2 in DanceGRPO `first`; PickScore in Flow-Factory `all` with `mean`; HPSv3 in GenRL `all` with
`mean`, or with `top_frac` of fraction 0.3; text reading in Adv-GRPO `every` of count 4 with `positive_mean`.

Letters: B videos, F frames of each, n frames of each that are looked at.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor

from flowrl.config.rewards import FramePolicy, FrameReducer, Frames
from flowrl.rewards.base import FunctionReward, Reward, RewardInputs, RewardOutput, changed
from flowrl.rewards.base.outputs import check_output, join_outputs
from flowrl.runtime.placement import widened
from flowrl.runtime.shapes import Float


def framewise(reward: Reward, frames: Frames) -> FunctionReward:
    """A reward of images that scores videos: it scores their frames, and each video gets one value from its frames'.

    Sub-scores are averaged over the frames that made the value, with the same weights: with `min` they come from the
    worst frame. If any frame of a video failed, the video has failed: a value from the other frames would follow
    another rule. It is counted under the frames' reason, or "frame_failed" if they give several.

    Raises ValueError: the reward's kind is not pointwise or remote, or it reads videos itself; when called, no videos.
    """
    owner = f"frames of reward {reward.name!r}"
    if reward.kind not in ("pointwise", "remote"):
        raise ValueError(
            f"{owner}: it is {reward.kind}, so frames of one video cannot be judged apart from the others: take a "
            f"pointwise or remote reward."
        )
    if "videos" in reward.needs:
        raise ValueError(f"{owner}: it looks at whole videos itself: leave out frames.")
    count, fraction = frames.count, frames.fraction
    words = [frames.policy, *([str(count)] if count else []), frames.reducer, *([f"{fraction:g}"] if fraction else [])]

    def of_videos(output: RewardOutput, videos: int) -> RewardOutput:
        """One value per video from the values of its frames, which are next to each other."""
        values, valid = output.values.unflatten(0, (videos, -1)), output.valid.unflatten(0, (videos, -1)).all(1)
        weights = frame_weights(values, reducer=frames.reducer, fraction=fraction)
        shared = torch.full_like(weights, 1 / weights.shape[1])  # for sub-scores if no frame made the value
        part_weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, shared)
        failed, reasons = int((~valid).sum()), list(output.errors)
        word = reasons[0] if len(reasons) == 1 else "frame_failed"
        return RewardOutput(
            values=torch.where(valid, _weigh(values, weights), torch.nan),
            valid=valid,
            parts={k: _weigh(v.unflatten(0, (videos, -1)), part_weights) for k, v in output.parts.items()},
            errors={word: failed} if failed else {},
        )

    def score(inputs: RewardInputs) -> RewardOutput:
        if inputs.videos is None:
            raise ValueError(f"reward {reward.name!r} has frames: set, but images are made, not videos: leave it out.")
        places = frame_places(inputs.videos.shape[1], policy=frames.policy, count=frames.count)
        videos_per_call = max(1, frames.frames_per_call // len(places))
        stills = replace(inputs, videos=None, sounds=None)
        pieces = []
        for start in range(0, len(inputs), videos_per_call):
            items = list(range(start, min(start + videos_per_call, len(inputs))))
            images = inputs.videos[start : start + videos_per_call, places].flatten(0, 1)
            given = replace(stills[[item for item in items for _ in places]], images=images)
            output = check_output(reward(given), len(given), reward.name)
            pieces.append(of_videos(output, len(items)))
        return join_outputs(pieces)

    needs = (reward.needs - {"images"}) | {"videos"}
    return changed(reward, score, needs=needs, version=f"{reward.version}:frames-{'-'.join(words)}")


def frame_places(frames: int, *, policy: FramePolicy, count: int | None = None) -> list[int]:
    """The places of the frames that are looked at, of `frames` (`flowrl.config.rewards.Frames`). `uniform`: `round(i (F
    - 1) / (n - 1))`, halves up, n = min(count, F); the middle frame for a count of 1."""
    if policy == "first":
        return [0]
    if policy == "all":
        return list(range(frames))
    assert count is not None
    if policy == "every":
        return list(range(0, frames, count))
    number = min(count, frames)
    if number == 1:
        return [frames // 2]
    return [(2 * i * (frames - 1) + number - 1) // (2 * (number - 1)) for i in range(number)]


def frame_weights(
    values: Float[Tensor, " b n"], *, reducer: FrameReducer, fraction: float | None = None
) -> Float[Tensor, " b n"]:
    """Weights of frames in their video's value: rows that sum to 1, or to 0 if `positive_mean` finds none; of equal
    values the earlier count."""
    values = widened(values.detach())
    number = values.shape[1]
    if reducer == "mean":
        return torch.full_like(values, 1 / number)
    if reducer == "positive_mean":
        positive = (values > 0).to(values.dtype)
        return positive / positive.sum(1, keepdim=True).clamp(min=1)
    best = 1
    if reducer == "top_frac":
        assert fraction is not None
        best = max(1, int(Fraction(repr(fraction)) * number))  # exact: 0.29 * 100 is below 29 in binary
    order = values.sort(dim=1, descending=reducer == "top_frac", stable=True).indices
    return torch.zeros_like(values).scatter(1, order[:, :best], 1 / best)


def _weigh(values: Float[Tensor, " b n"], weights: Float[Tensor, " b n"]) -> Float[Tensor, " b"]:
    """`sum_j weight_j value_j` in the dtype of the weights; frames of weight 0 may hold NaN."""
    return (torch.where(weights > 0, values.to(weights.dtype), 0.0) * weights).sum(1).float()


def videos_of(inputs: RewardInputs, *, owner: str, at_least: int) -> Float[Tensor, " b f 3 h w"]:
    """The videos to score. Raises ValueError: if images were made, or the videos have fewer frames than `at_least`."""
    if inputs.videos is None:
        raise ValueError(f"{owner} scores videos, and images were made: take a pipeline that makes videos.")
    frames = inputs.videos.shape[1]
    if frames < at_least:
        raise ValueError(f"{owner} needs videos of at least {at_least} frames, got {frames}: make longer ones.")
    return inputs.videos
