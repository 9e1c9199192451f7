"""Videos for rewards that judge images: which frames are looked at, and how their values become one.

    {name: pick_score, frames: {policy: uniform, count: 8, reducer: mean}}

Published uses: HPSv2 in DanceGRPO `first`; PickScore in Flow-Factory `all` with `mean`; HPSv3 in GenRL `all` with
`mean`, or with `top_frac` of fraction 0.3; text reading in Adv-GRPO `every` of count 4 with `positive_mean`.

Letters: B videos, F frames of each, n frames of each that are looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from flowrl.config.options import check_options
from flowrl.rewards import FunctionReward, Reward, RewardInputs, RewardOutput, to_uint8
from flowrl.rewards.outputs import check_output, joined

Policy = Literal["first", "uniform", "every", "all"]
Reducer = Literal["mean", "min", "top_frac", "positive_mean"]


def check_frames(frames: Any, *, owner: str) -> None:
    """Refuses what `framewise` would not take, such as an entry's `frames: {policy: uniform, count: 4}`.

    Args:
        frames: a mapping of options of `framewise`.
        owner: who wants it, for the message: "reward 'clip_score'".

    Raises:
        ValueError: naming what was given and what is allowed.
    """
    if not isinstance(frames, Mapping):
        raise ValueError(
            f"{owner}: frames must be a mapping such as {{policy: uniform, count: 4, reducer: mean}}, got {frames!r}."
        )
    check_options(framewise, frames, owner=f"{owner}, frames")
    _check(**frames, owner=f"{owner}, frames")


def framewise(
    reward: Reward,
    *,
    policy: Policy = "all",
    count: int | None = None,
    reducer: Reducer = "mean",
    fraction: float | None = None,
    frames_per_call: int = 64,
) -> FunctionReward:
    """A reward of images that scores videos: it is given frames, and each video gets one value from theirs.

    Sub-scores are averaged over the frames that made the value, with the same weights: with `min` they are those of
    the worst frame. A video any of whose frames failed has failed: a value from the others would come from a different
    rule. It is counted under the frames' reason, or "frame_failed" where they give several.

    Args:
        reward: of kind pointwise or remote, one that reads no videos itself.
        policy: `first`; `uniform`, `count` frames spread evenly from the first to the last; `every`, the first and
            then every `count`-th; `all`.
        count: see `policy`; only for `uniform` and `every`, which need it.
        reducer: `mean`; `min`; `top_frac`, the mean of the best `max(1, floor(fraction n))` frames; `positive_mean`,
            the mean over the frames above 0, and 0 where there are none.
        fraction: of `top_frac`, which needs it; in (0, 1].
        frames_per_call: frames that the reward is given at a time, rounded to whole videos, at least one.

    Raises:
        ValueError: for a reward or options that cannot work; when called, if there are no videos.
    """
    owner = f"frames of reward {reward.name!r}"
    _check(policy=policy, count=count, reducer=reducer, fraction=fraction, frames_per_call=frames_per_call, owner=owner)
    if reward.kind not in ("pointwise", "remote"):
        raise ValueError(
            f"{owner}: it is {reward.kind}, so frames of one video cannot be judged apart from the others: take a "
            f"pointwise or remote reward."
        )
    if "videos" in reward.needs:
        raise ValueError(f"{owner}: it looks at whole videos itself: leave out frames.")
    score = partial(
        _score, reward=reward, policy=policy, count=count, reducer=reducer, fraction=fraction,
        frames_per_call=frames_per_call,
    )  # fmt: skip
    words = [policy, *([str(count)] if count else []), reducer, *([f"{fraction:g}"] if fraction else [])]
    return FunctionReward(
        name=reward.name,
        score=score,
        needs=(reward.needs - {"images"}) | {"videos"},
        version=f"{reward.version}:frames-{'-'.join(words)}",
        kind=reward.kind,
        differentiable=reward.differentiable,
        waits=reward.waits,
    )


def frame_places(frames: int, *, policy: Policy, count: int | None = None) -> list[int]:
    """The frames that are looked at, of `frames`; see `framewise`.

    `uniform`: `round(i (F - 1) / (n - 1))`, halves up, with n = min(count, F); the middle frame for a count of 1.
    """
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
    values: Float[Tensor, " b n"], *, reducer: Reducer, fraction: float | None = None
) -> Float64[Tensor, " b n"]:
    """What each frame's value counts in its video's: rows that sum to 1, or to 0 where `positive_mean` finds none.

    Among equal values the earlier frames count.
    """
    values = values.detach().double()
    number = values.shape[1]
    if reducer == "mean":
        return torch.full_like(values, 1 / number)
    if reducer == "positive_mean":
        positive = (values > 0).double()
        return positive / positive.sum(1, keepdim=True).clamp(min=1)
    best = 1
    if reducer == "top_frac":
        assert fraction is not None
        best = max(1, int(Fraction(repr(fraction)) * number))  # exact: 0.29 * 100 is below 29 in binary
    order = values.sort(dim=1, descending=reducer == "top_frac", stable=True).indices
    return torch.zeros_like(values).scatter(1, order[:, :best], 1 / best)


def luminance_clip(videos: Float[Tensor, " b f 3 h w"]) -> Float[Tensor, " b f 3 h w"]:
    """Videos without colour, as GenRL gives them to VideoAlign for motion quality: three equal channels.

    `floor(0.299 R + 0.587 G + 0.114 B)` of 8-bit levels, taken in whole numbers, so that grey keeps its level.
    """
    levels = torch.from_numpy(to_uint8(videos.flatten(0, 1))).to(torch.int64)
    grey = (levels @ torch.tensor([299, 587, 114])) // 1000
    grey = grey.unflatten(0, videos.shape[:2]).unsqueeze(2).expand(videos.shape)
    return (grey / 255.0).to(videos.device)


def _check(
    *,
    policy: Policy = "all",
    count: int | None = None,
    reducer: Reducer = "mean",
    fraction: float | None = None,
    frames_per_call: int = 64,
    owner: str,
) -> None:
    counted = policy in ("uniform", "every")
    if counted != (count is not None):
        raise ValueError(
            f"{owner}: count {'must be given' if counted else 'means nothing'} with policy {policy!r}, got {count!r}."
        )
    if (reducer == "top_frac") != (fraction is not None):
        needed = "must be given" if reducer == "top_frac" else "means nothing"
        raise ValueError(f"{owner}: fraction {needed} with reducer {reducer!r}, got {fraction!r}.")
    if count is not None and count < 1:
        raise ValueError(f"{owner}: count must be at least 1, got {count}.")
    if fraction is not None and not 0 < fraction <= 1:
        raise ValueError(f"{owner}: fraction must be above 0 and at most 1, got {fraction}.")
    if frames_per_call < 1:
        raise ValueError(f"{owner}: frames_per_call must be at least 1, got {frames_per_call}.")


def _score(
    inputs: RewardInputs,
    *,
    reward: Reward,
    policy: Policy,
    count: int | None,
    reducer: Reducer,
    fraction: float | None,
    frames_per_call: int,
) -> RewardOutput:
    if inputs.videos is None:
        raise ValueError(f"reward {reward.name!r} has frames: set, but images are made, not videos: leave it out.")
    places = frame_places(inputs.videos.shape[1], policy=policy, count=count)
    videos_per_call = max(1, frames_per_call // len(places))
    stills = replace(inputs, videos=None)
    pieces = []
    for start in range(0, len(inputs), videos_per_call):
        items = list(range(start, min(start + videos_per_call, len(inputs))))
        frames = inputs.videos[start : start + videos_per_call, places].flatten(0, 1)
        given = replace(stills[[item for item in items for _ in places]], images=frames)
        output = check_output(reward(given), len(given), reward.name)
        pieces.append(_reduced(output, len(items), reducer=reducer, fraction=fraction))
    return joined(pieces)


def _reduced(output: RewardOutput, videos: int, *, reducer: Reducer, fraction: float | None) -> RewardOutput:
    """One value a video from the values of its frames, which lie side by side."""
    values, valid = output.values.unflatten(0, (videos, -1)), output.valid.unflatten(0, (videos, -1)).all(1)
    weights = frame_weights(values, reducer=reducer, fraction=fraction)
    shared = torch.full_like(weights, 1 / weights.shape[1])  # for sub-scores, where no frame made the value
    part_weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, shared)
    failed = int((~valid).sum())
    reasons = list(output.errors)
    word = reasons[0] if len(reasons) == 1 else "frame_failed"
    return RewardOutput(
        values=torch.where(valid, _weighted(values, weights), torch.nan),
        valid=valid,
        parts={k: _weighted(v.unflatten(0, (videos, -1)), part_weights) for k, v in output.parts.items()},
        errors={word: failed} if failed else {},
    )


def _weighted(values: Float[Tensor, " b n"], weights: Float64[Tensor, " b n"]) -> Float[Tensor, " b"]:
    """`sum_j weight_j value_j` in float64; frames of weight 0 may hold NaN."""
    return (torch.where(weights > 0, values.double(), 0.0) * weights).sum(1).float()
