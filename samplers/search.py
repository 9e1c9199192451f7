"""Search at sampling time: draw N candidates of a prompt and keep the best, or drop the worst on the way.

On the way a candidate is judged by the clean latent that the network predicts at a step, `x - sigma * velocity`, the
diffusion counterpart of judging a half-decoded image (PARM, arXiv 2501.13926). The velocity is needed for the step
anyway, so a look costs a decoding and a score but no evaluation of the network.

Letters: P groups (a prompt, or a prompt and a sample), N candidates each, T steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from flowrl.runtime.shapes import Float, Int64
from flowrl.samplers.guidance import Velocity
from flowrl.samplers.parametrization import clean_from_velocity
from flowrl.samplers.path_memory import PathMemory
from flowrl.samplers.step import euler
from flowrl.trajectory import Schedule, start_state


def best_of_n_kl(count: int) -> float:
    """`log N - (N - 1) / N` nats: bound of KL(best of N || one draw), reached without ties (Beirami, "Theoretical
    guarantees on the best-of-n alignment policy", arXiv 2401.01879). Raises ValueError: count is below 1."""
    if count < 1:
        raise ValueError(f"best of N needs N of at least 1, got {count}")
    return math.log(count) - (count - 1) / count


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruning:
    """How many candidates start, and how many are kept at which steps; no cuts is best of N. Raises
    ValueError: steps do not rise, or a cut drops nobody or everybody."""

    num_candidates: int
    """N."""
    cuts: tuple[tuple[int, int], ...] = ()
    """(step, kept) pairs: at `step` (0 .. T-2) the network is evaluated for all remaining candidates, and only `kept`
    of them take the step and go on."""

    def __post_init__(self) -> None:
        if self.num_candidates < 1:
            raise ValueError(f"a search needs at least 1 candidate, got {self.num_candidates}")
        steps = [step for step, _ in self.cuts]
        if steps != sorted(set(steps)) or any(step < 0 for step in steps):
            raise ValueError(f"cuts are made at steps that rise from 0 on, got {steps}")
        for before, after in pairwise(self._counts):
            if not 1 <= after < before:
                raise ValueError(
                    f"a cut must keep at least 1 and fewer than there are, got {before} -> {after}: start with more "
                    f"candidates than {self.num_candidates}, or cut less often"
                )

    @property
    def _counts(self) -> list[int]:
        """Candidates at the start and after each cut."""
        return [self.num_candidates, *(kept for _, kept in self.cuts)]

    def check_steps(self, num_steps: int) -> None:
        """Refuses cuts without a place in a schedule. Raises ValueError: a cut is at the last step, or after it."""
        if self.cuts and self.cuts[-1][0] > num_steps - 2:
            raise ValueError(
                f"a cut at step {self.cuts[-1][0]} (from 0) comes too late for {num_steps} steps: the latest is "
                f"{num_steps - 2}, since the last step's prediction is the image by which the best one is chosen"
            )

    def alive(self, num_steps: int) -> list[int]:
        """Candidates that the network is evaluated for, at each of T steps."""
        self.check_steps(num_steps)
        kept_at, left, counts = dict(self.cuts), self.num_candidates, []
        for step in range(num_steps):
            counts.append(left)
            left = kept_at.get(step, left)
        return counts

    def evaluations(self, num_steps: int) -> int:
        """Candidates times steps that the network is evaluated at for one kept image: N T without cuts."""
        return sum(self.alive(num_steps))

    @property
    def looks(self) -> int:
        """Images decoded and scored for one kept image; a single one left at the end needs no score."""
        return sum(count for count in self._counts if count > 1)


def pruning(num_candidates: int, steps: Sequence[int], keep: float = 0.5) -> Pruning:
    """Cuts that each keep the fraction `keep` of those left, rounded up. Raises ValueError: keep is not within (0, 1),
    or a cut would drop nobody; see `Pruning`."""
    if not 0 < keep < 1:
        raise ValueError(f"a cut keeps a fraction between 0 and 1, got {keep:g}: 0.5 keeps the better half")
    cuts, left = [], num_candidates
    for step in steps:
        left = math.ceil(keep * left - 1e-9)  # 0.1 * 30 is a little more than 3
        cuts.append((step, left))
    return Pruning(num_candidates=num_candidates, cuts=tuple(cuts))


def survivors(score_PN: Float[Tensor, " p n"], keep: int) -> Int64[Tensor, " p keep"]:
    """Places of each row's `keep` highest scores, ascending, the earlier of equal ones; NaN and infinity are failed,
    and kept only where numbers are too few."""
    order = torch.where(torch.isfinite(score_PN), score_PN, -math.inf).sort(dim=1, descending=True, stable=True).indices
    return order[:, :keep].sort(dim=1).values


def best(score_PN: Float[Tensor, " p n"]) -> Int64[Tensor, " p"]:
    """Place of the highest score of each row, as `survivors`; the first if none is a number."""
    return survivors(score_PN, 1)[:, 0]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Searched:
    """What a search found."""

    final: Float[Tensor, " p *latent"]
    """[P, *latent] the kept candidates at sigma = 0."""
    chosen: Int64[Tensor, " p"]
    """[P] their numbers, 0 .. N-1."""
    scores: Float[Tensor, " c p n"]
    """[C+1, P, N] float64 scores at every cut and at the end; NaN for candidates not scored there, or failed."""
    evaluations: Int64[Tensor, " p n"]
    """[P, N] steps that the network was evaluated at for each candidate."""


def search(
    velocity_of: Callable[[Tensor], Velocity],
    x: Float[Tensor, " p n *latent"],
    schedule: Schedule,
    plan: Pruning,
    score: Callable[[Tensor, Tensor], Tensor],
) -> Searched:
    """Denoises by the ODE (Euler steps), drops candidates at the cuts and keeps the best of those that are finished.

    Args:
        velocity_of: `velocity_of(rows)` gives the velocity of a batch of candidates, by their numbers int64 [b] in
            0 .. PN-1. It is called at the start and after each cut.
        x: standard normal start noise; candidate n of group p is row `p N + n`.
        score: `score(clean, rows) -> [b]`, of predicted or finished clean latents [b, *latent]; NaN: failed.
    """
    groups, count = x.shape[:2]
    plan.check_steps(schedule.num_steps)
    if count != plan.num_candidates:
        raise ValueError(f"the plan is for {plan.num_candidates} candidates, and x holds {count} per group")
    rows_PA = torch.arange(groups * count).reshape(groups, count)
    scores = torch.full((len(plan.cuts) + 1, groups * count), math.nan, dtype=torch.float64)
    evaluations = torch.zeros(groups * count, dtype=torch.int64)
    kept_at, cut = dict(plan.cuts), 0

    def scored(clean: Tensor) -> Tensor:
        rows = rows_PA.flatten()
        given = score(clean, rows)
        if given.shape != rows.shape:
            raise ValueError(f"score must return one number per candidate [{len(rows)}], got {list(given.shape)}")
        number = given.detach().cpu().double()
        scores[cut, rows] = torch.where(torch.isfinite(number), number, math.nan)
        return scores[cut, rows].reshape(rows_PA.shape)

    flat, memory = start_state(x.flatten(0, 1), schedule), PathMemory(schedule)
    velocity = memory.along(velocity_of(rows_PA.flatten()))
    for step in range(schedule.num_steps):
        sigma, sigma_next = schedule.sigma[step], schedule.sigma[step + 1]
        predicted = velocity(flat, sigma, schedule.timestep[step])
        evaluations[rows_PA.flatten()] += 1
        if step in kept_at:
            places = survivors(scored(clean_from_velocity(flat, predicted, sigma)), kept_at[step])
            memory = memory.chosen(partial(_take, places=places, shape=rows_PA.shape))
            flat, predicted = (_take(tensor, places, rows_PA.shape) for tensor in (flat, predicted))
            rows_PA = rows_PA.gather(1, places)
            velocity, cut = memory.along(velocity_of(rows_PA.flatten())), cut + 1
        flat = euler(flat, predicted, sigma, sigma_next)
    single = rows_PA.shape[1] == 1
    places = torch.zeros(groups, dtype=torch.int64) if single else best(scored(flat))
    return Searched(
        final=_take(flat, places[:, None], rows_PA.shape),
        chosen=rows_PA.gather(1, places[:, None])[:, 0] % count,
        scores=scores.reshape(-1, groups, count),
        evaluations=evaluations.reshape(groups, count),
    )


def _take(tensor: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    """Rows [P * k, ...] of a batch [P * A, ...] by their places [P, k] within the groups."""
    rows = torch.arange(shape[0])[:, None] * shape[1] + places
    return tensor[rows.flatten().to(tensor.device)]
