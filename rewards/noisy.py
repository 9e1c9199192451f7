"""A reward with noise on it: how much of what a method learns survives a judge that errs?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from flowrl.randomness import counter_integers, counter_normal
from flowrl.rewards import FunctionReward, Reward, RewardInputs, RewardOutput
from flowrl.rewards.nested import build_nested, check_nested

_MILLION = 1_000_000


def check(
    *,
    reward: str,
    options: Mapping[str, Any] | None = None,
    std: float = 0.1,
    outliers: float = 0.0,
    outlier_scale: float = 20.0,
    bias: float = 0.0,
    seed: int = 0,
) -> None:
    """Refuses option values that are wrong, without loading weights."""
    owner = "reward 'noisy'"
    if not (math.isfinite(std) and std >= 0):
        raise ValueError(f"{owner}: std must be 0 or more, got {std}.")
    if not 0 <= outliers <= 1:
        raise ValueError(f"{owner}: outliers is a share in [0, 1], got {outliers}.")
    if not (math.isfinite(outlier_scale) and outlier_scale >= 1):
        raise ValueError(f"{owner}: outlier_scale must be 1 or more, got {outlier_scale}.")
    if not math.isfinite(bias):
        raise ValueError(f"{owner}: bias must be a finite number, got {bias}.")
    check_nested(reward, options, owner=owner)


def noisy(
    *,
    device: torch.device,
    reward: str,
    options: Mapping[str, Any] | None = None,
    std: float = 0.1,
    outliers: float = 0.0,
    outlier_scale: float = 20.0,
    bias: float = 0.0,
    seed: int = 0,
) -> Reward:
    """`r + bias + s z`, z standard normal and s the `std`, of outliers more; new for every (seed, iteration, group, i).

    Asked about the same sample of the same iteration again, it gives the same value. Items that failed stay failed.
    The part `clean` is r.

    Args:
        device: where the inner reward runs.
        reward: a built-in reward of kind pointwise or remote.
        options: its options.
        std: standard deviation of the noise.
        outliers: share of scores whose noise is `outlier_scale` times as wide, as of a judge that now and then fails.
        outlier_scale: how much wider.
        bias: what is added to every value.
        seed: of the noise.

    Raises:
        ValueError: for a reward or options that cannot work.
    """
    check(
        reward=reward, options=options, std=std, outliers=outliers, outlier_scale=outlier_scale, bias=bias, seed=seed
    )  # fmt: skip
    inner = build_nested(reward, options, device=device, owner="reward 'noisy'")
    return FunctionReward(
        name="noisy",
        score=partial(_score, inner=inner, widths=(std, std * outlier_scale), outliers=outliers, bias=bias, seed=seed),
        needs=inner.needs | {"group_ids", "sample_ids"},
        version=f"noisy:std-{std:g}:outliers-{outliers:g}x{outlier_scale:g}:bias-{bias:g}:seed-{seed}:{inner.version}",
        kind=inner.kind,
        differentiable=inner.differentiable,
        waits=inner.waits,
    )


def _score(
    inputs: RewardInputs, *, inner: Reward, widths: tuple[float, float], outliers: float, bias: float, seed: int
) -> RewardOutput:
    output = inner(inputs)
    noise = []
    for group, i in zip(inputs.group_ids.tolist(), inputs.sample_ids.tolist(), strict=True):
        key = (inputs.iteration, group, i)
        wild = counter_integers(0, _MILLION, seed, "reward-outlier", *key) < outliers * _MILLION
        noise.append(widths[wild] * counter_normal((1,), seed, "reward-noise", *key))
    values = output.values + (bias + torch.cat(noise)).to(output.values.device)
    return RewardOutput(
        values=values, valid=output.valid, parts={**output.parts, "clean": output.values}, errors=output.errors
    )
