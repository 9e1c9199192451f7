"""What guidance keeps from step to step of a path, and guidance that does: by a running average of differences.

Whoever follows a path evaluates its velocity `along` a `PathMemory`. What guidance kept before a step is then a part of
the state there: a rollout records it beside the latent, and an update evaluates the step with the record, a constant.
So it gives what the rollout had, and gradient of the step's own call alone. Outside of a path every step is the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.runtime.shapes import Float, Int
from flowrl.samplers.guidance import Velocity
from flowrl.samplers.guidance_rules import linear_cfg
from flowrl.trajectory import Schedule

_PATH: ContextVar[PathMemory | None] = ContextVar("path", default=None)


class PathMemory:
    """Of b samples of a path; `before` `[b, *latent]` is what was kept before the first step that is evaluated."""

    def __init__(self, schedule: Schedule, before: Tensor | None = None) -> None:
        self._schedule, self.step = schedule, 0
        self._steps = {sigma: step for step, sigma in enumerate(schedule.sigma.tolist())}
        self._given, self._kept = before, dict[tuple[int, int], Tensor]()  # by guidance and step

    def along(self, velocity: Velocity) -> Velocity:
        """A velocity that is evaluated at levels of the path's schedule, each as the step that it begins. A step may be
        evaluated often: the next has what the last call kept."""

        def followed(x: Tensor, sigma: Tensor, timestep: Tensor) -> Tensor:
            self.step, token = self._steps[float(sigma)], _PATH.set(self)
            try:
                return velocity(x, sigma, timestep)
            finally:
                _PATH.reset(token)

        return followed

    def at_states(self, states: Sequence[int]) -> Tensor | None:
        """`[b, S, *latent]` what guidance had kept where a step begins, 0 at the start; None where it keeps nothing."""
        if not self._kept or not states:
            return None
        (owner, _), some = next(iter(self._kept.items()))
        nothing = torch.zeros_like(some)
        return torch.stack([self._kept.get((owner, state - 1), nothing) for state in states], dim=1)

    def chosen(self, choose: Callable[[Tensor], Tensor]) -> PathMemory:
        """The memory of some of the samples, which go on under other guidance after the step just evaluated."""
        found = next((kept for (_, step), kept in self._kept.items() if step == self.step), None)
        return PathMemory(self._schedule, None if found is None else choose(found))

    def averaged(self, owner: object, difference: Tensor, momentum: float) -> Tensor:
        """The running average with the step's difference, which is kept as a constant."""
        known = self._kept.get((id(owner), self.step - 1), self._given)
        average = difference if known is None else difference + momentum * known.to(difference)
        self._kept[id(owner), self.step] = average.detach()
        return average


@dataclass(frozen=True, kw_only=True, eq=False)
class ProjectedGuidance:
    """Adaptive projected guidance (Sadat et al., arXiv 2410.02416) after some linear steps, a rule of guidance.

    With d = positive - negative, a_t = d_t + momentum a_(t-1), p = a_t shortened to at most `longest`, and p_parallel
    its part along the positive output (over all of a sample):

        step <= last_linear:  negative + scale d
        later:                negative + projected_scale (p - p_parallel + parallel p_parallel)

    The average runs from step 0 on. Projections are taken in float64. As in diffusers' AdaptiveProjectedMixGuidance, a
    projected scale of 1 leaves every step linear. Not bilinear: finish it before reinforcement learning guidance.
    """

    last_linear: Int[Tensor, " b"]
    """[b] last linear step of each sample, counted from 0."""
    projected_scale: float = 10.0
    momentum: float = -0.5
    """0 keeps nothing."""
    longest: float = 10.0
    """Norm; 0 is no limit."""
    parallel: float = 0.0
    """How much of the parallel part stays."""

    def __call__(
        self, negative: Float[Tensor, " b *latent"], positive: Float[Tensor, " b *latent"], scale: float
    ) -> Float[Tensor, " b *latent"]:
        path, linear = _PATH.get(), linear_cfg(negative, positive, scale)
        if path is None:
            return linear
        average = path.averaged(self, positive - negative, self.momentum)
        later = path.step > self.last_linear
        if self.projected_scale == 1 or not bool(later.any()):
            return linear
        rows = (-1, *[1] * (average.ndim - 1))
        update = shortened(average, positive, tuple(range(1, average.ndim)), self.longest, self.parallel)
        projected = negative + self.projected_scale * update
        return torch.where(later.to(linear.device).reshape(rows), projected, linear)


@dataclass(frozen=True, kw_only=True, eq=False)
class AdaptiveProjection:
    """Adaptive projected guidance at every step: diffusers' AdaptiveProjectedGuidance, `use_original_formulation` on.

    With a_t and p as in `ProjectedGuidance`, norms and projections over `dims`:

        positive + scale (p - p_parallel + parallel p_parallel)

    A scale of 0 is the positive output. Not bilinear either.
    """

    momentum: float = 0.0
    longest: float = 15.0
    parallel: float = 1.0
    dims: tuple[int, ...] = (-1, -2, -3)
    """Dimensions over which an output has one norm; the others are guided each by itself."""

    def __call__(
        self, negative: Float[Tensor, " b *latent"], positive: Float[Tensor, " b *latent"], scale: float
    ) -> Float[Tensor, " b *latent"]:
        path, average = _PATH.get(), positive - negative
        if path is not None and self.momentum != 0:
            average = path.averaged(self, average, self.momentum)
        return positive + scale * shortened(average, positive, self.dims, self.longest, self.parallel)


def shortened(
    average: Float[Tensor, " b *latent"],
    positive: Float[Tensor, " b *latent"],
    dims: tuple[int, ...],
    longest: float,
    parallel: float,
) -> Float[Tensor, " b *latent"]:
    """A difference of at most a norm (0 is no limit), with a share of its part along the positive output; both over
    `dims`. The projection is in float64."""
    if longest > 0:
        average = average * (longest / torch.linalg.vector_norm(average, dim=dims, keepdim=True)).clamp(max=1)
    wide, along = average.double(), positive.double()
    along = along / torch.linalg.vector_norm(along, dim=dims, keepdim=True).clamp(min=1e-12)
    lengthwise = (wide * along).sum(dim=dims, keepdim=True) * along
    return (wide - lengthwise).to(average) + parallel * lengthwise.to(average)
