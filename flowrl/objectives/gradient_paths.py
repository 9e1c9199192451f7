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

from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint as checkpointed

from flowrl.randomness import counter_integers
from flowrl.samplers.guidance import Velocity
from flowrl.samplers.parametrization import clean_from_velocity
from flowrl.samplers.step import euler
from flowrl.trajectory import Schedule, start_state


@dataclass(frozen=True, kw_only=True, slots=True)
class Path:
    """How a reward's gradient goes back through one sampling run; the arguments of `backprop_sample`.

    Attributes:
        train_steps: Steps whose network call keeps its gradient, ascending.
        last_step: Step whose clean estimate ends the run; T - 1 is sampling to the end.
        stop_input: Whether the network's input is cut off, so that its Jacobian is left out.
    """

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
        schedule: T steps.
        train_steps: Steps in 0 .. last_step, at least one.
        last_step: The run ends with the clean estimate `x - sigma v` of this step; T - 1, the default, is the end of
            the schedule, as its last Euler step is that estimate.
        stop_input: Call the network on the detached latent (DRTune).
        checkpoint: Recompute trained calls in the backward pass instead of keeping their activations.

    Returns:
        [b, *latent] with its graph, in at least float32.

    Raises:
        ValueError: no step is trained, or a step is out of range.
    """
    last = schedule.num_steps - 1 if last_step is None else last_step
    if not 0 <= last < schedule.num_steps:
        raise ValueError(f"last_step must lie in 0 .. {schedule.num_steps - 1}, got {last_step}")
    if not train_steps or any(not 0 <= step <= last for step in train_steps):
        raise ValueError(f"train_steps must be steps in 0 .. {last}, at least one, got {sorted(train_steps)}")
    x = start_state(x, schedule)
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


def refl_loss(reward: Float[Tensor, " b"], *, scale: float = 1e-3, target: float = 2.0) -> Float[Tensor, " b"]:
    """ReFL's hinge `scale max(target - reward, 0)` (Xu et al., ImageReward, arXiv 2304.05977): no gradient beyond.

    Raises:
        ValueError: scale is not positive.
    """
    if not scale > 0:
        raise ValueError(f"scale of refl_loss must be positive, got {scale}")
    return scale * (target - reward).clamp(min=0)


# ---- which steps -----------------------------------------------------------------------------------------------------


def refl(num_steps: int, *, seed: int, iteration: int, first: int | None = None, last: int | None = None) -> Path:
    """ReFL: one late step m, uniform in first .. last; its clean estimate is scored.

    Args:
        num_steps: T.
        seed: Of the run.
        iteration: Of the run; the step is drawn again in each.
        first: Three quarters of the way by default, 30 of 40.
        last: T - 1 by default, included.

    Raises:
        ValueError: the range is empty or leaves the schedule.
    """
    low = 3 * num_steps // 4 if first is None else first
    high = num_steps - 1 if last is None else last
    if not 0 <= low <= high < num_steps:
        raise ValueError(f"refl draws a step from {low} .. {high}, which must lie within 0 .. {num_steps - 1}")
    step = counter_integers(low, high + 1, seed, "refl", iteration)
    return Path(train_steps=(step,), last_step=step)


def draft(num_steps: int, *, seed: int, iteration: int, count: int = 1) -> Path:
    """DRaFT-K (Clark et al., arXiv 2309.17400): the last `count` steps; nothing is drawn.

    Raises:
        ValueError: count is not in 1 .. T.
    """
    _check_count("draft", count, num_steps)
    return Path(train_steps=tuple(range(num_steps - count, num_steps)), last_step=num_steps - 1)


def alignprop(num_steps: int, *, seed: int, iteration: int, truncation: Literal["random", "none"] = "random") -> Path:
    """AlignProp (Prabhudesai et al., arXiv 2310.03739): all steps, or each kept at random, late ones more often.

    Random truncation draws K uniform in 0 .. T again at every step k and keeps it where K <= k, so with probability
    (k + 1) / (T + 1). A draw that keeps none keeps the last. Truncation at a fixed step is `draft`.

    Raises:
        ValueError: truncation is unknown.
    """
    if truncation not in ("random", "none"):
        raise ValueError(f"truncation of alignprop is random or none, got {truncation!r}; fixed truncation is draft")
    steps = tuple(range(num_steps))
    if truncation == "random":
        kept = (k for k in steps if counter_integers(0, num_steps + 1, seed, "alignprop", iteration, k) <= k)
        steps = tuple(kept) or steps[-1:]
    return Path(train_steps=steps, last_step=num_steps - 1)


def drtune(num_steps: int, *, seed: int, iteration: int, count: int = 1, early_stop: int = 0) -> Path:
    """DRTune (Wu et al., arXiv 2405.00760): `count` evenly spaced steps from a random offset, inputs stopped.

    The run ends by the clean estimate up to `early_stop` steps before the end, how many is drawn.

    Raises:
        ValueError: early_stop is negative, or leaves fewer than count steps.
    """
    if early_stop < 0:
        raise ValueError(f"early_stop of drtune counts steps and must not be negative, got {early_stop}")
    _check_count("drtune", count, num_steps - early_stop)
    end = num_steps - counter_integers(0, early_stop + 1, seed, "drtune end", iteration)
    offset = counter_integers(0, end // count, seed, "drtune", iteration)
    return Path(train_steps=tuple(offset + i * end // count for i in range(count)), last_step=end - 1, stop_input=True)


def _check_count(name: str, count: int, num_steps: int) -> None:
    if not 1 <= count <= num_steps:
        raise ValueError(f"{name} trains between 1 and {num_steps} steps here, got count {count}")


PATHS: dict[str, Callable[..., Path]] = {"refl": refl, "draft": draft, "alignprop": alignprop, "drtune": drtune}
