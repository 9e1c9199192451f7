"""Noise levels at which finished images are noised again during training, drawn by counters.

| kind | rule for T draws of one image (or of one batch that shares them) | used by |
|---|---|---|
| schedule | leading share of the rollout's own steps in random order, the first T of them | DiffusionNFT, DGPO |
| discrete | leading share of the schedule in T strata of steps, one step of each | AWM |
| discrete_wo_init | the same from the second step on: never the start | AWM |
| discrete_with_init | the first step always, T - 1 strata from the second on | AWM |
| logit_normal | sigmoid of a normal, in T strata of equal probability, shifted, at least 0.01 | AWM, DPO |
| uniform | even on [0.2, 1] in T strata, shifted | AWM |

A schedule's last sigma before 0 can be very small (0.0089 on SD3's default grid), so what a rule leaves out matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor

from flowrl.runtime.randomness import Part, counter_choice, counter_integers
from flowrl.runtime.shapes import Float
from flowrl.samplers.schedules import shift_sigma
from flowrl.trajectory import Schedule

TimeKind = Literal["schedule", "discrete", "discrete_wo_init", "discrete_with_init", "logit_normal", "uniform"]

_LOWEST = 0.01  # of logit_normal
_UNIFORM_FROM = 0.2  # before the shift


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Times:
    """Noise levels and what the network is fed at them."""

    sigma: Float[Tensor, " b T"]
    """[b, T] float32, in (0, 1]."""
    timestep: Float[Tensor, " b T"]
    """[b, T] float32; the schedule's own if the levels are its steps, otherwise 1000 sigma."""


def training_times(
    kind: TimeKind,
    schedule: Schedule,
    keys: Sequence[tuple[Part, ...]],
    *,
    count: int,
    fraction: float | None = None,
    shift: float = 1.0,
) -> Times:
    """Draw T noise levels for each key.

    Args:
        schedule: The rollout's n steps; of it logit_normal and uniform use the highest level and the network's times.
        keys: Counters, one tuple per image; an image's levels do not depend on the others'. For levels that a batch, or
            the images of a prompt, share, repeat their key or expand the result.
        fraction: See `steps_in_reach`; logit_normal and uniform do not read it.
        shift: Static shift of logit_normal and uniform, towards noise above 1 (3 for SD3).

    Returns levels [b, T].
    """
    if kind not in get_args(TimeKind):
        raise ValueError(f"unknown kind of training times {kind!r}: choose one of {', '.join(get_args(TimeKind))}")
    if not keys:
        raise ValueError("training times need one key per image, got none")
    if kind in ("logit_normal", "uniform"):
        continuous = logit_normal_sigmas if kind == "logit_normal" else uniform_sigmas
        sigma = torch.stack([continuous(count, *key, shift=shift) for key in keys])
        sigma = sigma.clamp(max=schedule.highest_sigma)
        return Times(sigma=sigma, timestep=schedule.timestep_of(sigma))
    reach = steps_in_reach(kind, schedule.num_steps, fraction)
    if kind == "schedule":
        steps = [permuted_steps(reach, count, *key) for key in keys]
    else:
        steps = [stratified_steps(kind, reach, count, *key) for key in keys]
    index = torch.tensor(steps, device=schedule.sigma.device)
    return Times(sigma=schedule.sigma[index], timestep=schedule.timestep[index])


def steps_in_reach(kind: TimeKind, num_steps: int, fraction: float | None = None) -> int:
    """Leading steps of a schedule that may be drawn, `int(num_steps * fraction)`.

    Args:
        kind: schedule, or one of the kinds discrete.
        fraction: In (0, 1]; None takes all steps for schedule (DiffusionNFT) and 0.99 of them for the kinds discrete
            (AWM), which leaves out the last.
    """
    if fraction is None:
        fraction = 1.0 if kind == "schedule" else 0.99
    if not 0 < fraction <= 1:
        raise ValueError(f"times.fraction is the share of the schedule that is trained, in (0, 1], got {fraction:g}")
    return int(num_steps * fraction)


def permuted_steps(reach: int, count: int, *key: Part) -> tuple[int, ...]:
    """`count` steps of the `reach` leading ones, each with chance count / reach: of all steps in DiffusionNFT (arXiv
    2509.16117), of the noisier half in DGPO (arXiv 2510.08425). Raises ValueError: not 1 <= count <= reach."""
    if not 1 <= count <= reach:
        raise ValueError(
            f"{count} different steps cannot be taken of the first {reach} of the schedule: lower times.count, or "
            "raise times.fraction or the number of steps"
        )
    return counter_choice(reach, count, "times", *key)


def strata(kind: TimeKind, reach: int, count: int) -> list[range]:
    """The steps that each draw of the kinds discrete is taken from: bounds evenly over the steps in reach, rounded
    down; an empty stratum is its lower bound. Raises ValueError: the kind has no strata, no draw, or no step."""
    if kind not in ("discrete", "discrete_wo_init", "discrete_with_init"):
        raise ValueError(f"kind {kind!r} has no strata of steps")
    low = 0 if kind == "discrete" else 1
    fixed = [range(0, 1)] if kind == "discrete_with_init" else []
    pieces = count - len(fixed)
    if count < 1 or (pieces > 0 and reach <= low):
        raise ValueError(
            f"{kind} cannot take {count} draws from steps {low} .. {reach - 1}: draw at least one, and raise "
            "times.fraction or the number of steps"
        )
    bounds = [low + (reach - low) * i // max(pieces, 1) for i in range(pieces + 1)]
    return [*fixed, *(range(a, max(b, a + 1)) for a, b in pairwise(bounds))]


def stratified_steps(kind: TimeKind, reach: int, count: int, *key: Part) -> tuple[int, ...]:
    """One step of each of `strata`, uniformly and in the order of the schedule (AWM, arXiv 2509.25050)."""
    pieces = enumerate(strata(kind, reach, count))
    return tuple(counter_integers(piece.start, piece.stop, "times", i, *key) for i, piece in pieces)


def _stratified_uniform(count: int, key: tuple[Part, ...]) -> Tensor:
    """One number in (0, 1) of each of T equal strata, in random order, float64."""
    if count < 1:
        raise ValueError(f"at least one level must be drawn, got count {count}")
    inner = [(counter_integers(0, 2**52, "times", i, *key) + 0.5) / 2**52 for i in range(count)]
    order = counter_choice(count, count, "times order", *key)
    return torch.tensor([(k + inner[k]) / count for k in order], dtype=torch.float64)


def logit_normal_sigmas(count: int, *key: Part, shift: float = 1.0) -> Float[Tensor, " T"]:
    """Stratified logit-normal levels, `S(sigmoid(Phi^-1((k + U) / T)))`, at least 0.01, in random order, S the static
    shift (`shift_sigma`). Esser et al., arXiv 2403.03206, section 3.1, with location 0 and scale 1."""
    sigma = torch.sigmoid(torch.special.ndtri(_stratified_uniform(count, key)))
    return shift_sigma(sigma, shift).clamp(min=_LOWEST).float()


def uniform_sigmas(count: int, *key: Part, shift: float = 1.0) -> Float[Tensor, " T"]:
    """Stratified levels `S(0.2 + 0.8 (k + U) / T)`, in random order; S as in `logit_normal_sigmas`."""
    return shift_sigma(_UNIFORM_FROM + (1 - _UNIFORM_FROM) * _stratified_uniform(count, key), shift).float()
