"""Chooses prompts worth sampling: groups with unequal rewards, replay, a Gaussian curriculum; scales the KL by success.

A curriculum is a frozen dataclass of its options, listed in `CURRICULA`. Its state between iterations is a plain value
under `memory` in the run's memory: it takes the old value and returns the new one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowrl.advantages.normalise import set_statistics, sets_of
from flowrl.prompts.loading import prompts_of_iteration
from flowrl.runtime.randomness import Part, counter_integers
from flowrl.runtime.shapes import Bool, Float, Int


def informative_groups(reward_B: Float[Tensor, " B"], group_B: Int[Tensor, " B"]) -> Bool[Tensor, " P"]:
    """Groups with a learning signal; the others are sampled again (dynamic sampling of DAPO, arXiv 2503.14476).

    Args:
        reward_B: [B] float; NaN takes no part.
        group_B: [B] integers; the answer is in ascending order of their numbers.

    Returns [P] whether a group has two valid rewards that differ.

    Raises ValueError: shapes differ.
    """
    if group_B.shape != reward_B.shape:
        raise ValueError(f"every reward needs its group, got {tuple(group_B.shape)} for {tuple(reward_B.shape)}")
    index, num_groups = sets_of(group_B)
    return set_statistics(reward_B[None], index, num_groups).std[0] > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Shuffled:
    """One shuffled pass over the prompts after another; remembers nothing."""

    memory: ClassVar[str] = ""

    def choose(
        self, state: Any, *, total: int, count: int, seed: int, iteration: int, round: int
    ) -> tuple[int, ...] | None:
        """None: the next prompts of the pass."""
        return None

    def remembered(self, state: Any, prompts: Sequence[int], pass_rates: Sequence[float], **where: int) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True)
class ReplayEntry:
    """A prompt that may come again: number, pass rate in [0, 1] and iteration of its last visit, and its visits."""

    prompt: int
    pass_rate: float
    last_used: int
    reuses: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """Prompts worth another visit with fresh rollouts (prompt replay, arXiv 2603.21177), remembered as a list of
    `[prompt, pass_rate, last_used, reuses]`, ascending by prompt."""

    band: tuple[float, float] = (0.25, 0.75)
    """Lowest and highest pass rate that is kept."""
    share: float = 0.75
    """Largest fraction of a batch that may be replayed."""
    cooldown: int = 10
    """Iterations until a prompt may come again."""
    max_reuse: int = 15
    """Largest number of replays of a prompt."""

    memory: ClassVar[str] = "replay"

    def __post_init__(self) -> None:
        low, high = self.band
        if not 0 <= low <= high <= 1 or not 0 <= self.share <= 1 or self.cooldown < 0 or self.max_reuse < 0:
            raise ValueError(
                "band ascends within [0, 1], share lies in [0, 1], cooldown and max_reuse are not negative, got "
                f"{self.band}, {self.share}, {self.cooldown}, {self.max_reuse}"
            )

    def choose(
        self, state: Any, *, total: int, count: int, seed: int, iteration: int, round: int
    ) -> tuple[int, ...] | None:
        """Prompts of an iteration's first round: those that come again, then fresh ones."""
        if round:
            return None
        again = self.again(_entries(state), count, iteration)
        fresh = prompts_of_iteration(total, count, seed, iteration)
        return (*again, *(number for number in fresh if number not in again))[:count]

    def again(self, entries: Sequence[ReplayEntry], batch_size: int, iteration: int) -> tuple[int, ...]:
        """Prompts to sample again, at most `floor(share * batch_size)`.

        These are prompts with replays left whose last visit is at least `cooldown` iterations ago. Pass rates nearest
        to 1/2 come first; among equal ones the longest unused, then the lowest number.
        """
        ready = [e for e in entries if iteration - e.last_used >= self.cooldown and e.reuses < self.max_reuse]
        ready.sort(key=lambda entry: (abs(entry.pass_rate - 0.5), entry.last_used, entry.prompt))
        return tuple(entry.prompt for entry in ready[: math.floor(self.share * batch_size)])

    def remembered(
        self, state: Any, prompts: Sequence[int], pass_rates: Sequence[float], *, iteration: int, total: int
    ) -> list[list[Any]]:
        """Takes in the prompts of an iteration, fresh ones and replayed ones.

        A pass rate inside the band enters or renews a prompt; one outside removes it. An existing entry counts one more
        use. A prompt without replays left stays listed and does not start over. NaN (nothing valid) changes nothing.

        Raises ValueError: lengths differ, a prompt comes twice, or a pass rate is out of range.
        """
        _check_rates(prompts, pass_rates, total)
        entries, (low, high) = {entry.prompt: entry for entry in _entries(state)}, self.band
        for prompt, rate in zip(prompts, pass_rates, strict=True):
            if math.isnan(rate):
                continue
            old = entries.pop(prompt, None)
            if low <= rate <= high:
                entries[prompt] = ReplayEntry(prompt, float(rate), iteration, 0 if old is None else old.reuses + 1)
        ordered = (entries[prompt] for prompt in sorted(entries))
        return [[e.prompt, e.pass_rate, e.last_used, e.reuses] for e in ordered]


def _entries(state: Any) -> list[ReplayEntry]:
    return [ReplayEntry(int(p), float(rate), int(used), int(n)) for p, rate, used, n in state or []]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gaussian:
    """Prompts of middling difficulty come more often: Gaussian curriculum sampling of FG-ExPO (arXiv 2605.11403). It
    remembers the pass rate [P] of every prompt, 0.5 before its first visit."""

    centre: float = 0.5
    """Pass rate that is preferred."""
    width: float = 0.35
    """Of the Gaussian, positive."""
    momentum: float = 0.9
    """Of the moving averages of pass rates, in [0, 1)."""

    memory: ClassVar[str] = "pass_rates"

    def __post_init__(self) -> None:
        if not self.width > 0 or not 0 <= self.momentum < 1:
            raise ValueError(
                f"width is positive and momentum lies in [0, 1), got width {self.width} and momentum {self.momentum}"
            )

    def choose(
        self, state: Any, *, total: int, count: int, seed: int, iteration: int, round: int
    ) -> tuple[int, ...] | None:
        """Different prompts, drawn by their weights."""
        return draw_prompts(self.weights(_rates(state, total)), count, seed, iteration, round)

    def weights(self, pass_rate_P: Float[Tensor, " P"]) -> Float[Tensor, " P"]:
        """`exp(-(p - centre)^2 / (2 width^2))`."""
        p = pass_rate_P.double()
        return (-(p - self.centre).square() / (2 * self.width**2)).exp().to(pass_rate_P.dtype)

    def remembered(
        self, state: Any, prompts: Sequence[int], pass_rates: Sequence[float], *, iteration: int, total: int
    ) -> Tensor:
        """Moving average of each prompt's pass rate, `p <- momentum p + (1 - momentum) observed`; NaN changes nothing.
        Raises ValueError: lengths differ, a prompt comes twice or is unknown, or a pass rate is out of range."""
        _check_rates(prompts, pass_rates, total)
        updated = _rates(state, total).clone()
        for prompt, rate in zip(prompts, pass_rates, strict=True):
            if not math.isnan(rate):
                updated[prompt] = self.momentum * float(updated[prompt]) + (1 - self.momentum) * rate
        return updated


def _rates(state: Any, total: int) -> Tensor:
    return torch.full((total,), 0.5, dtype=torch.float64) if state is None else state


def _check_rates(prompts: Sequence[int], pass_rates: Sequence[float], total: int) -> None:
    if len(prompts) != len(pass_rates) or len(set(prompts)) != len(prompts):
        raise ValueError(f"one pass rate per prompt and every prompt once, got {list(prompts)} and {list(pass_rates)}")
    if any(not 0 <= prompt < total for prompt in prompts) or any(rate < 0 or rate > 1 for rate in pass_rates):
        raise ValueError(
            f"prompts are 0 .. {total - 1} and pass rates lie in [0, 1], got {list(prompts)} and {list(pass_rates)}"
        )


CURRICULA: dict[str, type[Shuffled] | type[Replay] | type[Gaussian]] = {
    "shuffled": Shuffled,
    "replay": Replay,
    "gaussian": Gaussian,
}


def draw_prompts(weight_P: Float[Tensor, " P"], n: int, *counters: Part) -> tuple[int, ...]:
    """Draw n distinct prompts, each in turn with a probability proportional to its weight among those left.

    The answer depends on the weights and the counters alone, and that for n begins the answer for n + 1.

    Args:
        weight_P: [P], not negative and finite; weight 0 is never drawn.
        n: At most the number of positive weights.
        *counters: As `flowrl.runtime.randomness.counter_seed`, for instance (seed, "prompts", iteration).

    Raises ValueError: a weight is negative or not finite, or n is negative or too large.
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
    """KL coefficient that grows as the batch succeeds, `beta (tanh(accuracy) + 1) / 2` (AKL of FG-ExPO).

    Between beta / 2 at accuracy 0 and 0.881 beta at 1: it never reaches beta.

    Raises ValueError: beta is negative, or the accuracy is outside [0, 1].
    """
    if not beta >= 0 or not 0 <= accuracy <= 1:
        raise ValueError(f"beta must not be negative and accuracy lies in [0, 1], got {beta} and {accuracy}")
    return beta * (math.tanh(accuracy) + 1) / 2
