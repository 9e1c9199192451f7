"""On-policy distillation: the weight of a step in the loss, and which states of a path are trained; and distribution
matching of finished images.

Student and teacher take a step from the same state with the same std, and a kernel's mean is affine in the velocity:
their means differ by `c (v - v_T)`, c = d mean / d velocity. So whatever distance of the two steps is minimised is that
of the velocities, times a number of the step:

    loss = w mean_D (v - sg[v_T])^2

| weight | w | what it is |
|---|---|---|
| velocity | 1 | squared distance of the velocities (DanceOPD, arXiv 2606.27377) |
| mean | c^2 / 2 | half the squared distance of the means (UniRL without its KL coefficient) |
| kl | c^2 / (2 std^2) | KL of the steps in nats, over D latent elements (DiffusionOPD, arXiv 2605.15055) |
| transition | kl at steps with noise, mean at others | Flow-Factory's denominators |

There is no advantage: a policy gradient whose advantage is minus a detached KL has the gradient 0 in the mean, since
the KL of a step does not depend on what is drawn there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.objectives.policy_gradient import kernel_sensitivity
from flowrl.objectives.terms import mean_squared_error, sample_mean
from flowrl.runtime.randomness import Part, counter_integers
from flowrl.runtime.shapes import Float
from flowrl.samplers.kernels import Kernel
from flowrl.samplers.parametrization import column, working_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Opd:
    """On-policy distillation: the teacher's velocity at states of the student's own paths (DiffusionOPD, DanceOPD)."""

    weight: Literal["velocity", "mean", "kl", "transition"] = "velocity"
    """Weight w of a step, with c = d mean / d velocity: 1 (velocity), c²/2 (mean), c²/(2 std²) (kl), or kl at steps
    with noise and mean at others (transition)."""
    states: Literal["all"] | int = "all"
    """How many states of each path to train: all of its trained steps, or so many, drawn for each image."""
    query: tuple[float, float] = (1.0, 1.0)
    """Law of drawn states: Beta(a, b) of the place between the first step (0) and the last (1). [1, 1] is uniform,
    [5, 2] DanceOPD's, mostly low noise."""

    def __post_init__(self) -> None:
        if self.states != "all" and self.states < 1:
            raise ValueError(f"option states is all, or at least 1 state of a path, got {self.states}")
        if min(self.query) <= 0:
            raise ValueError(f"option query holds the two parameters of a Beta law, above 0, got {list(self.query)}")
        if self.states == "all" and self.query != (1.0, 1.0):
            raise ValueError(
                f"option query is {list(self.query)}, but states is all, so none is drawn: set states to a number (1 "
                "is DanceOPD's), or remove query"
            )

    def weight_of(self, kernel: Kernel, sigma: float | Tensor, sigma_next: float | Tensor) -> float:
        """The weight w of a step of a kernel that has its noise_level and sigma_max bound. Raises ValueError: weight kl
        at a step without noise."""
        if self.weight == "velocity":
            return 1.0
        zero = torch.zeros(1, 1, dtype=torch.float64)
        variance = float(kernel(zero, zero, sigma, sigma_next).std) ** 2
        if self.weight == "mean" or (self.weight == "transition" and variance == 0):
            variance = 1.0
        elif variance == 0:
            raise ValueError(
                "weight kl divides by the variance of a step, and one without noise has none: set weight=mean"
            )
        return kernel_sensitivity(kernel, sigma, sigma_next) ** 2 / (2 * variance)

    def places(self, num_steps: int, *key: Part) -> tuple[int, ...]:
        """The trained places among so many steps, ascending: all, or `states` different ones by the counters `key`.

        The odds of place k are the density at its middle, (k + 1/2) / num_steps, among those that are left: places that
        come first in a race of exponential times at these rates.
        """
        if self.states == "all":
            return tuple(range(num_steps))
        (a, b), middle = self.query, (torch.arange(num_steps, dtype=torch.float64) + 0.5) / num_steps
        log_rate = (a - 1) * middle.log() + (b - 1) * (1 - middle).log()
        drawn = [(counter_integers(0, 2**52, "query", place, *key) + 0.5) / 2**52 for place in range(num_steps)]
        log_time = (-torch.tensor(drawn, dtype=torch.float64).log()).log() - log_rate
        return tuple(sorted(log_time.argsort()[: self.states].tolist()))


def noise_level(highest: float, *key: Part) -> float:
    """A noise level, even on [0.02, 0.98] by the counters `key`, and at most the highest that a network knows (DMD)."""
    return min(0.02 + 0.96 * (counter_integers(0, 2**52, *key) + 0.5) / 2**52, highest)


def distribution_matching(
    clean: Float[Tensor, " b *latent"],
    drawn: Float[Tensor, " b *latent"],
    real: Float[Tensor, " b *latent"],
    fake: Float[Tensor, " b *latent"],
) -> Float[Tensor, " b"]:
    """Loss whose gradient leads what a policy draws from its own distribution to the teacher's, in float64.

        g = (x_f - x_r) / max(mean_D |x_g - x_r|, 1e-6),    loss = 1/2 mean_D (x_g - sg[x_g - g])^2

    Its gradient is g / D: a difference of two scores, along which the KL of the policy's distribution to the teacher's
    falls at a noise level, and exactly 0 where x_f = x_r. DMD2 (arXiv 2405.14867), after DMD (arXiv 2311.18828).

    Args:
        clean: x_g with its graph: the policy's clean latents.
        drawn: their values, which were noised.
        real, fake: clean estimates x_r of the teacher and x_f of the fake score there.
    """
    size = sample_mean((drawn - real).abs()).clamp(min=1e-6)
    step = (fake - real) / column(size.to(working_dtype(fake)), fake)
    return mean_squared_error(clean, (clean - step).detach()) / 2


VISITED = {"opd": Opd}
"""Losses at the states that a policy visits (recipe visited), by name."""
