"""Losses at states that the policy visits: on-policy distillation, and the direction in which a group's rewards rise;
and distribution matching of finished images.

On-policy distillation: student and teacher take a step from the same state with the same std, and a kernel's mean is
affine in the velocity. Their means differ by `c (v - v_T)`, c = d mean / d velocity. So whatever distance of the two
steps is minimised is that of the velocities, times a number of the step:

    loss = w mean_D (v - sg[v_T])^2

| weight | w | what it is |
|---|---|---|
| velocity | 1 | squared distance of the velocities (DanceOPD, arXiv 2606.27377) |
| mean | c^2 / 2 | half the squared distance of the means (UniRL without its KL coefficient) |
| kl | c^2 / (2 std^2) | KL of the steps in nats, over D latent elements (DiffusionOPD, arXiv 2605.15055) |
| transition | kl at steps with noise, mean at others | Flow-Factory's denominators |

There is no advantage: a policy gradient whose advantage is minus a detached KL has the gradient 0 in the mean, since
the KL of a step does not depend on what is drawn there.

DiffusionART (arXiv 2610.12572), a reconstruction: only its project page and the names of its arguments were read. The
images of a prompt give one direction G (`reward_direction`), and the target is the rollout's own velocity, with its
clean estimate moved along it:

    loss = w mean_D (v - sg[v_target])^2,    clean_target = clean_old + m G,    v_target = v_old - (m / sigma) G
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.objectives.policy_gradient import kernel_sensitivity
from flowrl.objectives.terms import mean_squared_error, sample_mean
from flowrl.runtime.randomness import Part, counter_integers
from flowrl.runtime.shapes import Bool, Float
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
    off_policy: float = 0.0
    """Share of the trained states that are not of the path: its finished latent, noised again to their level, `x =
    (1 - sigma) final + sigma noise`. 0 takes none (on-policy distillation), 1 all (DanceOPD's comparison)."""

    def __post_init__(self) -> None:
        if not 0 <= self.off_policy <= 1:
            raise ValueError(f"option off_policy is a share of states, from 0 to 1, got {self.off_policy:g}")
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

    def noised_again(self, *key: Part) -> bool:
        """Whether a state is off the policy's path, drawn by the counters `key`."""
        return counter_integers(0, 2**52, "off policy", *key) < self.off_policy * 2**52


@dataclass(frozen=True, kw_only=True, slots=True)
class Art:
    """The rollout's own velocity, moved to where a prompt's rewards rise (DiffusionART, ART-Flash; a reconstruction).

    A reconstruction from the project page of arXiv 2610.12572 and the names of its arguments: how the magnitude is set,
    and in which measure the threshold is taken, was not read.
    """

    magnitude: float = 0.1
    """Length m of the move of the clean estimate, root mean square of a latent's element."""
    space: Literal["clean", "velocity", "sigma_velocity"] = "sigma_velocity"
    """Whose squared error is minimised: that of the clean estimate, which is sigma² times that of the velocity; of the
    velocity; or sigma times it, by which every noise level pulls alike."""
    threshold: float | None = 1e-5
    """Mean square distance of the velocity from the rollout's beyond which steps that lead further away are left out;
    those that lead back stay. Null leaves out none."""
    high_noise: int | None = None
    """How many states of each path to train, those of the most noise (ART-Flash); null trains all."""

    def __post_init__(self) -> None:
        for name in ("magnitude", "threshold"):
            value = getattr(self, name)
            if value is not None and not 0 < value < torch.inf:
                raise ValueError(f"option {name} is a finite number above 0, got {value}")
        if self.high_noise is not None and self.high_noise < 1:
            raise ValueError(f"option high_noise is at least 1 state of a path, got {self.high_noise}")

    def weight_of(self, kernel: Kernel, sigma: float | Tensor, sigma_next: float | Tensor) -> float:
        """The weight w of a step: 1, sigma or sigma²."""
        return float(sigma) ** {"velocity": 0, "sigma_velocity": 1, "clean": 2}[self.space]

    def places(self, num_steps: int, *key: Part) -> tuple[int, ...]:
        """The trained places among so many steps: those of the most noise."""
        return tuple(range(num_steps))[: self.high_noise]

    def target(
        self, old: Float[Tensor, " b *latent"], direction: Float[Tensor, " b *latent"], sigma: Float[Tensor, " b"]
    ) -> Float[Tensor, " b *latent"]:
        """The velocity `v_old - (m / sigma) G` that is learned at states."""
        return old - self.magnitude / sigma.view(-1, *[1] * (old.ndim - 1)) * direction

    def left_out(
        self, velocity: Float[Tensor, " b *latent"], old: Float[Tensor, " b *latent"], target: Tensor
    ) -> Bool[Tensor, " b"]:
        """States where `mean (v - v_old)^2 > threshold` and the way to the target leads further from the old velocity,
        `<v_target - v, v - v_old> > 0`: Flow-DPPO's rule for a regression."""
        moved, ahead = velocity - old, target - velocity
        far = sample_mean(moved.square()) > (torch.inf if self.threshold is None else self.threshold)
        return far & (sample_mean(moved * ahead) > 0)


def reward_direction(advantage: Float[Tensor, " G"], clean: Float[Tensor, " G *latent"]) -> Float[Tensor, " *latent"]:
    """Where the rewards of a prompt's K images rise, in float64: `C / sqrt(mean C^2)`, or 0 where there is no contrast.

    `C = 1/K sum_i (R_i - mean R)(clean_i - mean clean)`, where the mean of the latents drops out: the advantages
    `R_i - mean R` sum to 0. Of two images it counts which one is better, and not by how much.
    """
    covariance = torch.tensordot(advantage.double(), clean.double(), 1) / len(advantage)
    size = covariance.square().mean().sqrt()
    return covariance / torch.where(size > 0, size, 1.0)


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


VISITED = {"opd": Opd, "art": Art}
"""Losses at the states that a policy visits (recipe visited), by name."""
