"""Gradients of a differentiable reward through the deterministic sampler: no log-density, no advantage.

Sampling is the Euler chain `x_{k+1} = x_k + (sigma_{k+1} - sigma_k) v(x_k)`. The methods differ in which network calls
keep their gradient, in whether it also flows through the network's input, and in where the chain ends:

| path | calls with gradient | input | end |
|---|---|---|---|
| refl | one late step, drawn | - | clean estimate at that step |
| draft | the last K | attached | sigma 0 |
| alignprop | all, or drawn for each step | attached | sigma 0 |
| drtune | K evenly spaced | stopped | sigma 0, or earlier |

Guidance, decoding and reward are the caller's; the network's inputs are its business too (checkpointing is an option).
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as checkpointed

from flowrl.runtime.randomness import counter_integers
from flowrl.runtime.shapes import Float
from flowrl.samplers.guidance import Velocity
from flowrl.samplers.parametrization import clean_from_velocity
from flowrl.samplers.path_memory import PathMemory
from flowrl.samplers.step import euler
from flowrl.trajectory import Schedule, start_state


@dataclass(frozen=True, kw_only=True, slots=True)
class Path:
    """How a reward's gradient goes back through one sampling run: arguments of `backprop_sample`."""

    train_steps: tuple[int, ...]
    last_step: int
    stop_input: bool = False


def backprop_sample(
    velocity: Velocity,
    x: Float[Tensor, " b *latent"],
    schedule: Schedule,
    *,
    train_steps: Collection[int],
    last_step: int | None = None,
    stop_input: bool = False,
    checkpoint: bool = False,
) -> Float[Tensor, " b *latent"]:
    """Sample by the ODE and keep the graph of chosen network calls.

    Calls that are not trained run without gradient; their output counts as a constant, while the latent stays attached
    to the calls before (AlignProp's truncation). With all inputs attached the gradient is that of the chain,

        dx_end/dtheta = sum_{k in train} [prod_{j > k, j in train} (1 + h_j dv_j/dx_j)] h_k dv_k/dtheta

    with `h_k = sigma_{k+1} - sigma_k`; with stopped inputs the products are 1. Given theta x for a network, states are
    those that `rollout` computes in the same dtype.

    Args:
        velocity: `velocity(x, sigma, timestep)`; holds the trained parameters.
        x: [b, *latent] at `schedule.sigma[0]`.
        train_steps: Steps in 0 .. last_step, at least one.
        last_step: The run ends with the clean estimate `x - sigma v` of this step; T - 1, the default, is the end of
            the schedule, as its last Euler step is that estimate.
        stop_input: Call the network on the detached latent (DRTune).
        checkpoint: Recompute trained calls in the backward pass instead of keeping their activations.

    Returns [b, *latent] with its graph, in at least float32.
    """
    last = schedule.num_steps - 1 if last_step is None else last_step
    if not 0 <= last < schedule.num_steps:
        raise ValueError(f"last_step must lie in 0 .. {schedule.num_steps - 1}, got {last_step}")
    if not train_steps or any(not 0 <= step <= last for step in train_steps):
        raise ValueError(f"train_steps must be steps in 0 .. {last}, at least one, got {sorted(train_steps)}")
    x, velocity = start_state(x, schedule), PathMemory(schedule).along(velocity)
    for step in range(last + 1):
        sigma, trained = schedule.sigma[step], step in train_steps
        source = x if trained and not stop_input else x.detach()
        with nullcontext() if trained else torch.no_grad():
            if trained and checkpoint:
                predicted = checkpointed(velocity, source, sigma, schedule.timestep[step], use_reentrant=False)
            else:
                predicted = velocity(source, sigma, schedule.timestep[step])
        if step < last:
            x = euler(x, predicted, sigma, schedule.sigma[step + 1])
    return clean_from_velocity(x, predicted, sigma)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardLoss:
    """Loss of rewards: `-scale r`, or ReFL's hinge `scale max(target - r, 0)` (Xu et al., ImageReward, arXiv
    2304.05977), which lets go of what is good enough."""

    loss: Literal["negative", "hinge"] = "negative"
    """Which of the two."""
    scale: float = 1.0
    """Factor, positive."""
    target: float = 2.0
    """Where the hinge is."""

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ValueError(f"scale of the loss must be above 0, got {self.scale:g}")

    def __call__(self, reward: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
        """Loss of each image."""
        if self.loss == "hinge":
            return self.scale * (self.target - reward).clamp(min=0)
        return -self.scale * reward


@dataclass(frozen=True, kw_only=True, slots=True)
class Refl:
    """ReFL: one late step m, uniform in first .. last; its clean estimate is scored."""

    first: int | None = None
    """Null takes three quarters of the way, 30 of 40."""
    last: int | None = None
    """Included; null takes the last step."""

    def __call__(self, num_steps: int, *, seed: int, iteration: int) -> Path:
        """The path of an iteration. Raises ValueError: the range is empty or leaves the schedule."""
        low = 3 * num_steps // 4 if self.first is None else self.first
        high = num_steps - 1 if self.last is None else self.last
        if not 0 <= low <= high < num_steps:
            raise ValueError(f"refl draws a step from {low} .. {high}, which must lie within 0 .. {num_steps - 1}")
        step = counter_integers(low, high + 1, seed, "refl", iteration)
        return Path(train_steps=(step,), last_step=step)


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """DRaFT-K (Clark et al., arXiv 2309.17400): the last `count` steps; nothing is drawn."""

    count: int = 1
    """K, in 1 .. T."""

    def __call__(self, num_steps: int, *, seed: int, iteration: int) -> Path:
        """The path of every iteration. Raises ValueError: count is not in 1 .. T."""
        _check_count("draft", self.count, num_steps)
        return Path(train_steps=tuple(range(num_steps - self.count, num_steps)), last_step=num_steps - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignProp:
    """AlignProp (Prabhudesai et al., arXiv 2310.03739): all steps, or each kept at random, late ones more often.

    Random truncation draws K uniform in 0 .. T at every step k and keeps it where K <= k, so with probability
    (k + 1) / (T + 1). A draw that keeps none keeps the last. Truncation at a fixed step is `Draft`.
    """

    truncation: Literal["random", "none"] = "random"
    """See above."""

    def __call__(self, num_steps: int, *, seed: int, iteration: int) -> Path:
        """The path of an iteration."""
        steps = tuple(range(num_steps))
        if self.truncation == "random":
            kept = (k for k in steps if counter_integers(0, num_steps + 1, seed, "alignprop", iteration, k) <= k)
            steps = tuple(kept) or steps[-1:]
        return Path(train_steps=steps, last_step=num_steps - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class DrTune:
    """DRTune (Wu et al., arXiv 2405.00760): `count` evenly spaced steps from a random offset, inputs stopped."""

    count: int = 1
    """Steps that keep their gradient."""
    early_stop: int = 0
    """The run ends by the clean estimate up to this many steps before the end, how many is drawn."""

    def __call__(self, num_steps: int, *, seed: int, iteration: int) -> Path:
        """The path of an iteration. Raises ValueError: early_stop is negative, or leaves fewer than count steps."""
        if self.early_stop < 0:
            raise ValueError(f"early_stop of drtune counts steps and must not be negative, got {self.early_stop}")
        _check_count("drtune", self.count, num_steps - self.early_stop)
        end = num_steps - counter_integers(0, self.early_stop + 1, seed, "drtune end", iteration)
        offset = counter_integers(0, end // self.count, seed, "drtune", iteration)
        steps = tuple(offset + i * end // self.count for i in range(self.count))
        return Path(train_steps=steps, last_step=end - 1, stop_input=True)


def _check_count(name: str, count: int, num_steps: int) -> None:
    if not 1 <= count <= num_steps:
        raise ValueError(f"{name} trains between 1 and {num_steps} steps here, got count {count}")


PATHS: dict[str, type[Any]] = {"refl": Refl, "draft": Draft, "alignprop": AlignProp, "drtune": DrTune}
"""Options of a path; called with `(num_steps, seed=, iteration=)` they give it."""
