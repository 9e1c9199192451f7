"""Which prompts are worth sampling: filters on groups, replay of prompts, a Gaussian curriculum, a KL that follows.

State is a plain value: a function takes the old one and returns the new one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowrl.advantages.normalise import set_statistics, sets_of
from flowrl.randomness import Part, counter_integers


def informative_groups(
    reward_B: Float[Tensor, " B"],
    group: Int[Tensor, " B"] | int,
    kind: Literal["success", "std"] = "std",
    *,
    tol: float = 0.0,
    success_at: float = 0.5,
) -> Bool[Tensor, " P"]:
    """Groups that can teach something, the others being sampled again (dynamic sampling of DAPO, arXiv 2503.14476).

    Args:
        reward_B: [B] float; NaN takes no part.
        group: Size of contiguous groups, or [B] integers; the answer is in ascending order of their numbers.
        kind: "success" keeps a group whose success rate lies strictly between tol and 1 - tol, a reward counting as
            success from `success_at` on; "std" one whose rewards have a population std above tol.
        tol: Not negative; below 1/2 for "success".
        success_at: See kind.

    Returns:
        [P] bool, False too for a group with fewer than two valid rewards.

    Raises:
        ValueError: groups do not divide the batch, shapes differ, the kind is unknown or tol is out of range.
    """
    if kind not in ("success", "std"):
        raise ValueError(f"groups are judged by success or std, got {kind!r}")
    if not 0 <= tol < (0.5 if kind == "success" else math.inf):
        raise ValueError(f"tol must not be negative, and below 1/2 for success rates, got {tol} for {kind!r}")
    if isinstance(group, int):
        if group < 1 or len(reward_B) % group:
            raise ValueError(f"groups of {group} do not divide {len(reward_B)} rewards: groups are contiguous")
        group = torch.arange(len(reward_B), device=reward_B.device) // group
    if group.shape != reward_B.shape:
        raise ValueError(f"every reward needs its group, got {tuple(group.shape)} for {tuple(reward_B.shape)}")
    index, num_groups = sets_of(group)
    value = reward_B.double()
    if kind == "success":
        value = torch.where(value.isnan(), torch.nan, (value >= success_at).double())
    groups = set_statistics(value[None], index, num_groups)
    if kind == "success":
        told_apart = (groups.mean > tol) & (groups.mean < 1 - tol)
    else:
        told_apart = groups.std > tol
    return (told_apart & (groups.count >= 2))[0]


@dataclass(frozen=True, slots=True)
class ReplayEntry:
    """A prompt that may be sampled again.

    Attributes:
        prompt: Its number.
        pass_rate: At its last visit, in [0, 1].
        last_used: Iteration of its last visit.
        reuses: Visits since it entered.
    """

    prompt: int
    pass_rate: float
    last_used: int
    reuses: int = 0


@dataclass(frozen=True, slots=True)
class ReplayBuffer:
    """Prompts worth another visit (prompt replay, arXiv 2603.21177). Prompts alone are kept: rollouts are always fresh.

    Attributes:
        band: Lowest and highest pass rate that is kept.
        share: Largest fraction of a batch that may be replayed.
        cooldown: Iterations until a prompt may come again.
        max_reuse: A prompt is replayed this often at most.
        entries: Ascending by prompt.

    Raises:
        ValueError: an option is out of range.
    """

    band: tuple[float, float] = (0.25, 0.75)
    share: float = 0.75
    cooldown: int = 10
    max_reuse: int = 15
    entries: tuple[ReplayEntry, ...] = ()

    def __post_init__(self) -> None:
        low, high = self.band
        if not 0 <= low <= high <= 1 or not 0 <= self.share <= 1 or self.cooldown < 0 or self.max_reuse < 0:
            raise ValueError(
                "band ascends within [0, 1], share lies in [0, 1], cooldown and max_reuse are not negative, got "
                f"{self.band}, {self.share}, {self.cooldown}, {self.max_reuse}"
            )


def remember(buffer: ReplayBuffer, prompts: Sequence[int], pass_rates: Sequence[float], iteration: int) -> ReplayBuffer:
    """Take in the prompts of an iteration, fresh ones and replayed ones.

    A pass rate inside the band enters or renews a prompt, one outside removes it. A prompt that was there already has
    been used once more. One that has used up its replays stays listed, so that it does not start over.

    Args:
        buffer: Is not changed.
        prompts: Distinct numbers.
        pass_rates: One per prompt, in [0, 1]; NaN (nothing valid) leaves the prompt's entry as it was.
        iteration: Of these visits.

    Raises:
        ValueError: lengths differ, a prompt comes twice, or a pass rate is out of range.
    """
    if len(prompts) != len(pass_rates) or len(set(prompts)) != len(prompts):
        raise ValueError(f"one pass rate per prompt and every prompt once, got {list(prompts)} and {list(pass_rates)}")
    entries = {entry.prompt: entry for entry in buffer.entries}
    low, high = buffer.band
    for prompt, rate in zip(prompts, pass_rates, strict=True):
        if math.isnan(rate):
            continue
        if not 0 <= rate <= 1:
            raise ValueError(f"a pass rate lies in [0, 1], got {rate} for prompt {prompt}")
        old = entries.pop(prompt, None)
        if low <= rate <= high:
            entries[prompt] = ReplayEntry(prompt, float(rate), iteration, 0 if old is None else old.reuses + 1)
    ordered = tuple(entries[prompt] for prompt in sorted(entries))
    return replace(buffer, entries=ordered)


def replay(buffer: ReplayBuffer, batch_size: int, iteration: int) -> tuple[int, ...]:
    """Prompts to sample again in this iteration, at most `floor(share * batch_size)`; fill the batch with fresh ones.

    Only prompts whose last visit is at least `cooldown` iterations ago and that have replays left. Those with a pass
    rate nearest to 1/2 come first; of equal ones the longest unused, then the lowest number.

    Raises:
        ValueError: the batch is negative.
    """
    if batch_size < 0:
        raise ValueError(f"a batch cannot hold {batch_size} prompts")
    ready = [
        entry
        for entry in buffer.entries
        if iteration - entry.last_used >= buffer.cooldown and entry.reuses < buffer.max_reuse
    ]
    ready.sort(key=lambda entry: (abs(entry.pass_rate - 0.5), entry.last_used, entry.prompt))
    return tuple(entry.prompt for entry in ready[: math.floor(buffer.share * batch_size)])


def gaussian_weights(
    pass_rate_P: Float[Tensor, " P"], *, centre: float = 0.5, width: float = 0.35
) -> Float[Tensor, " P"]:
    """Weights that prefer prompts of middling difficulty, `exp(-(p - centre)^2 / (2 width^2))`.

    Gaussian curriculum sampling of FG-ExPO (arXiv 2605.11403); prompts not visited yet start at p = 0.5.

    Raises:
        ValueError: a pass rate is outside [0, 1], or the width is not positive.
    """
    if not width > 0 or not bool(((pass_rate_P >= 0) & (pass_rate_P <= 1)).all()):
        raise ValueError(
            f"pass rates lie in [0, 1] and the width is positive, got width {width}, {pass_rate_P.tolist()}"
        )
    p = pass_rate_P.double()
    return (-(p - centre).square() / (2 * width**2)).exp().to(pass_rate_P.dtype)


def update_pass_rates(
    pass_rate_P: Float[Tensor, " P"],
    prompts: Sequence[int],
    observed: Sequence[float],
    *,
    momentum: float = 0.9,
) -> Float[Tensor, " P"]:
    """Moving average of each prompt's pass rate, `p <- momentum p + (1 - momentum) observed` (FG-ExPO).

    Args:
        pass_rate_P: [P]; is not changed.
        prompts: Distinct numbers in 0 .. P-1.
        observed: Pass rates of this iteration, one per prompt, in [0, 1]; NaN (nothing valid) changes nothing.
        momentum: In [0, 1).

    Raises:
        ValueError: lengths differ, a prompt comes twice or is unknown, or a number is out of range.
    """
    known = len(set(prompts)) == len(prompts) == len(observed) and all(0 <= i < len(pass_rate_P) for i in prompts)
    if not known:
        raise ValueError(
            f"one pass rate per prompt and every prompt once, of 0 .. {len(pass_rate_P) - 1}, got {list(prompts)} and "
            f"{list(observed)}"
        )
    if not 0 <= momentum < 1 or any(rate < 0 or rate > 1 for rate in observed):
        raise ValueError(f"momentum lies in [0, 1) and pass rates in [0, 1], got {momentum} and {list(observed)}")
    updated = pass_rate_P.clone()
    for prompt, rate in zip(prompts, observed, strict=True):
        if not math.isnan(rate):
            updated[prompt] = momentum * float(pass_rate_P[prompt]) + (1 - momentum) * rate
    return updated


def draw_prompts(weight_P: Float[Tensor, " P"], n: int, *counters: Part) -> tuple[int, ...]:
    """Draw n distinct prompts, each in turn with a probability proportional to its weight among those left.

    The answer depends on the weights and the counters alone, and that for n begins the answer for n + 1.

    Args:
        weight_P: [P], not negative and finite; weight 0 is never drawn.
        n: At most the number of positive weights.
        *counters: As `flowrl.randomness.counter_seed`, for instance (seed, "prompts", iteration).

    Raises:
        ValueError: a weight is negative or not finite, or n is negative or too large.
    """
    weight = weight_P.detach().cpu().double().clone()
    if not bool((weight.isfinite() & (weight >= 0)).all()):
        raise ValueError("weights of prompts must be finite and not negative")
    available = int((weight > 0).sum())
    if not 0 <= n <= available:
        raise ValueError(f"cannot draw {n} distinct prompts of {available} with a positive weight")
    chosen = []
    for draw in range(n):
        cumulative = weight.cumsum(0)
        uniform = counter_integers(0, 2**53, "prompts", draw, *counters) / 2**53
        prompt = int(torch.searchsorted(cumulative, uniform * float(cumulative[-1]), right=True))
        if prompt == len(weight):  # the product was rounded up to the whole
            prompt = int((weight > 0).nonzero()[-1])
        chosen.append(prompt)
        weight[prompt] = 0.0
    return tuple(chosen)


def accuracy_scaled_kl(beta: float, accuracy: float) -> float:
    """KL coefficient that tightens as the batch succeeds, `beta (tanh(accuracy) + 1) / 2` (AKL of FG-ExPO).

    Between beta / 2 at accuracy 0 and 0.881 beta at 1: it never reaches beta.

    Raises:
        ValueError: beta is negative, or the accuracy is outside [0, 1].
    """
    if not beta >= 0 or not 0 <= accuracy <= 1:
        raise ValueError(f"beta must not be negative and accuracy lies in [0, 1], got {beta} and {accuracy}")
    return beta * (math.tanh(accuracy) + 1) / 2
