"""Losses on finished images that are noised again: no trajectory, no log-density of the sampler.

One image, one noise and one sigma give a latent `x = (1 - sigma) clean + sigma noise` whose velocity is known to be
`v = noise - clean`; the losses weigh how well the policy predicts it. A loss is `function(matched, **options) ->
(loss [b], metrics)`, the loss unreduced and the metrics [b]; a recipe takes it from `FORWARD`. All errors are means
over the elements of a sample (a coefficient for sums is that for means divided by their number), taken in float64, and
only through velocities: the error of the clean prediction is `sigma (v - velocity)`, whatever x was rounded to.

| name | loss, e = mse(velocity, v) | source |
|---|---|---|
| nft | r e(v+) + (1 - r) e(v-), branches around the old policy | DiffusionNFT, arXiv 2509.16117 |
| awm | -A psi-ELBO as a log-probability, PPO-clipped | AWM, arXiv 2509.25050 |
| dgpo | sigmoid(S) A e, S of the whole group | DGPO, arXiv 2510.08425 |
| crd | (beta centred implicit reward - centred reward)^2 | CRD, arXiv 2603.14128 |
| rwr | weight of the reward times e | reward-weighted regression |
| rft | e of the best image of a group | rejection-sampling fine-tuning |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowrl.objectives.preference_losses import best_of_group, centred_distillation, group_gate, reward_weights
from flowrl.objectives.terms import (
    AdvantageMode,
    Weighting,
    clipped_surrogate,
    matching_error,
    matching_log_prob,
    mean_squared_error,
    optimality,
)
from flowrl.samplers.parametrization import column, working_dtype

Loss = tuple[Tensor, dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Matched:
    """b images noised once each, and what the networks say at the noisy latents.

    Attributes:
        clean: [b, *latent] finished latents.
        noise: [b, *latent] standard normal.
        sigma: [b] in (0, 1], on any device.
        velocity: [b, *latent] of the trained policy, with its graph.
        old: [b, *latent] velocity of the old policy at the same latents, or None.
        reference: [b, *latent] velocity of the reference policy likewise, or None.
        advantage: [b], clipped as the run clips advantages.
        reward: [b].
        group: [b] integers, images of one prompt alike.

    Raises:
        ValueError: shapes differ, or a sigma is outside (0, 1].
    """

    clean: Float[Tensor, " b *latent"]
    noise: Float[Tensor, " b *latent"]
    sigma: Float[Tensor, " b"]
    velocity: Float[Tensor, " b *latent"]
    advantage: Float[Tensor, " b"]
    reward: Float[Tensor, " b"]
    group: Int[Tensor, " b"]
    old: Float[Tensor, " b *latent"] | None = None
    reference: Float[Tensor, " b *latent"] | None = None

    def __post_init__(self) -> None:
        names = ("clean", "noise", "velocity", "old", "reference")
        latents = {name: tuple(getattr(self, name).shape) for name in names if getattr(self, name) is not None}
        columns = {name: tuple(getattr(self, name).shape) for name in ("sigma", "advantage", "reward", "group")}
        if len(set(latents.values())) != 1 or set(columns.values()) != {(len(self.clean),)}:
            raise ValueError(f"latents [b, *latent] have one shape and columns are [b], got {latents} and {columns}")
        if not bool(((self.sigma > 0) & (self.sigma <= 1)).all()):
            raise ValueError(f"sigma is a noise fraction in (0, 1], not a timestep, got {self.sigma.tolist()}")

    @property
    def target(self) -> Float[Tensor, " b *latent"]:
        """The velocity of the path, noise - clean."""
        return self.noise - self.clean


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """An entry of `FORWARD`.

    Attributes:
        function: `function(matched, **options) -> (loss [b], metrics of [b])`.
        needs_old: `Matched.old` must be there.
        needs_reference: `Matched.reference` must be there.
        group_complete: All images of a group must be in the same call.
        shared_noise: Images of a group are meant to share sigma and noise.
    """

    function: Callable[..., Loss]
    needs_old: bool = False
    needs_reference: bool = False
    group_complete: bool = False
    shared_noise: bool = False


def noised(
    clean: Float[Tensor, " b *latent"], noise: Float[Tensor, " b *latent"], sigma: Float[Tensor, " b"]
) -> Float[Tensor, " b *latent"]:
    """Latent on the path, `(1 - sigma) clean + sigma noise`, in at least float32."""
    if clean.shape != noise.shape:
        raise ValueError(f"noise must have the shape of clean {tuple(clean.shape)}, got {tuple(noise.shape)}")
    clean, noise = clean.to(working_dtype(clean)), noise.to(working_dtype(clean))
    return (1 - column(sigma, clean)) * clean + column(sigma, clean) * noise


# ---- DiffusionNFT ----------------------------------------------------------------------------------------------------


def nft(
    matched: Matched,
    *,
    beta: float = 1.0,
    advantage_range: float = 5.0,
    mode: AdvantageMode = "all",
    adaptive: bool = True,
    floor: float = 1e-5,
    published_scale: bool = True,
) -> Loss:
    """DiffusionNFT: pulls the policy to good images and, mirrored at the old policy, away from bad ones.

        v+ = beta v_new + (1 - beta) v_old,  v- = (1 + beta) v_old - beta v_new
        loss = (c / beta) [ r L(v+) + (1 - r) L(v-) ],  L(u) = mean(d^2) / sg[max(mean|d|, floor)],  d = sigma (v - u)

    On the old policy itself the gradient is that of `A L(v_new)`: advantage-weighted matching, whatever beta is. Off it
    beta bounds how far the optimum lies: without the adaptive weight it is `v_old + (1/beta) E[(2 r - 1)(v - v_old)]`.

    Args:
        matched: With `old`.
        beta: Positive; 1 and 0.1 are published. Small is fast.
        advantage_range: c of `optimality`.
        mode: Of `optimality`.
        adaptive: Divide by the mean absolute error, per sample.
        floor: Least mean absolute error to divide by.
        published_scale: Multiply by c / beta, which keeps the gradient's size independent of both.

    Returns:
        The loss, and metrics optimality, positive_error, negative_error (L of the branches).

    Raises:
        ValueError: old is missing, or an option is out of range.
    """
    if not beta > 0:
        raise ValueError(f"beta of nft must be positive, got {beta}")
    old, r = _old(matched, "nft"), optimality(matched.advantage, advantage_range=advantage_range, mode=mode).double()
    velocity = matched.velocity.to(working_dtype(matched.velocity))
    sigma = column(matched.sigma, velocity)
    branches = (old + sign * beta * (velocity - old) for sign in (1, -1))
    positive, negative = (
        matching_error(sigma * (branch - matched.target), adaptive=adaptive, floor=floor) for branch in branches
    )
    scale = advantage_range / beta if published_scale else 1.0
    loss = scale * (r * positive + (1 - r) * negative)
    return _finish(matched, loss, optimality=r, positive_error=positive, negative_error=negative)


# ---- AWM -------------------------------------------------------------------------------------------------------------


def awm(
    matched: Matched,
    *,
    weighting: Weighting = "ghuber",
    power: float = 0.25,
    advantage_range: float = 5.0,
    advantage_max: float = 1.0,
    clip: float = 1.0,
    off_policy: bool = False,
) -> Loss:
    """Advantage-weighted matching: policy gradient with `matching_log_prob` in place of a log-probability.

    `max(-A' rho, -A' clip(rho, 1 - clip, 1 + clip))`, `A' = advantage_max clip(A / advantage_range, -1, 1)`, rho the
    exponential of new minus old log-probability. On policy, the default, the old one is the new one detached: the loss
    is -A' and its gradient `A' d psi`. The ratio is taken for each draw of (sigma, noise) ("exp_first").

    Args:
        matched: With `old` if off_policy.
        weighting: Of `matching_log_prob`.
        power: Of ghuber.
        advantage_range: Where advantages are clipped.
        advantage_max: What that becomes.
        clip: Distance of the ratio from 1 on either side; 1, as published, hardly ever binds.
        off_policy: Take the old log-probability from `old`.

    Returns:
        The loss, and metrics error, ratio.

    Raises:
        ValueError: off_policy without old, or an option is out of range.
    """
    if not advantage_range > 0 or not advantage_max > 0:
        raise ValueError(f"advantage_range and advantage_max must be positive, got {advantage_range}, {advantage_max}")
    error = mean_squared_error(matched.velocity, matched.target)
    log_prob = matching_log_prob(error, matched.sigma, weighting=weighting, power=power)
    before = log_prob.detach()
    if off_policy:
        old_error = mean_squared_error(_old(matched, "awm with off_policy"), matched.target)
        before = matching_log_prob(old_error, matched.sigma, weighting=weighting, power=power)
    advantage = matched.advantage.double().clamp(-advantage_range, advantage_range) * (advantage_max / advantage_range)
    loss = clipped_surrogate(log_prob - before, advantage, clip_low=clip, clip_high=clip)
    return _finish(matched, loss, error=error, ratio=(log_prob - before).exp())


# ---- DGPO ------------------------------------------------------------------------------------------------------------


def dgpo(matched: Matched, *, beta: float = 100.0, advantage_range: float = 5.0, clip: float | None = None) -> Loss:
    """Direct group preference optimisation: all images of a group against each other (DGPO).

    `loss_i = sigmoid(S) A_i d_i` with the group's gate S (`group_gate`) and d the mean squared error of the velocity;
    up to beta / K the gradient of `-log sigmoid(-S)`. With a clip distance, an image whose ratio
    `exp(d_old - d)` is above 1 + clip at A > 0, or below 1 - clip otherwise, gets no gradient.

    Args:
        matched: With `reference`, complete groups, sigma and noise shared within a group; with `old` if clip is set.
        beta: Not negative; changes the gate only.
        advantage_range: Where advantages are clipped.
        clip: Distance of the ratio from 1, or None.

    Returns:
        The loss, and metrics error, gate, clipped (also the mask that may be put on a KL).

    Raises:
        ValueError: reference is missing, clip is set without old, or an option is negative.
    """
    if not beta >= 0 or (clip is not None and not clip >= 0) or not advantage_range > 0:
        raise ValueError(f"dgpo needs beta, clip >= 0 and advantage_range > 0, got {beta}, {clip}, {advantage_range}")
    error = mean_squared_error(matched.velocity, matched.target)
    reference_error = mean_squared_error(_reference(matched, "dgpo"), matched.target)
    advantage = matched.advantage.double().clamp(-advantage_range, advantage_range)
    gate = group_gate(error, reference_error, advantage, matched.group, beta=beta)
    clipped = torch.zeros_like(advantage, dtype=torch.bool)
    if clip is not None:
        old_error = mean_squared_error(_old(matched, "dgpo with clip"), matched.target)
        ratio = (old_error - error.detach()).exp()
        clipped = torch.where(advantage > 0, ratio > 1 + clip, ratio < 1 - clip)
    loss = gate * advantage * torch.where(clipped, error.detach(), error)
    return _finish(matched, loss, error=error, gate=gate, clipped=clipped.double())


# ---- CRD -------------------------------------------------------------------------------------------------------------


def crd(
    matched: Matched,
    *,
    beta: float = 1.0,
    advantage_range: float = 5.0,
    adaptive: bool = True,
    floor: float = 1e-5,
    loss: Literal["square", "cross_entropy"] = "square",
    temperature: float | None = None,
    published_scale: bool = True,
) -> Loss:
    """Centred reward distillation: the policy's implicit reward is fitted to the real one (CRD).

    `rho = L(v_old) - L(v_new)` with L the mean squared error of the velocity, over its own mean absolute error if
    adaptive; `r = optimality(A)`; the loss is `centred_distillation`, times advantage_range / beta as published.

    Args:
        matched: With `old`, complete groups.
        beta: Positive.
        advantage_range: Of `optimality`.
        adaptive: As in `nft`, for either velocity.
        floor: As in `nft`.
        loss: Of `centred_distillation`.
        temperature: Of `centred_distillation`.
        published_scale: Multiply by advantage_range / beta.

    Returns:
        The loss, and metrics implicit_reward, optimality.

    Raises:
        ValueError: old is missing, or an option is out of range.
    """
    old = _old(matched, "crd")
    r = optimality(matched.advantage, advantage_range=advantage_range).double()
    new_error, old_error = (
        matching_error(v - matched.target, adaptive=adaptive, floor=floor) for v in (matched.velocity, old)
    )
    rho = old_error - new_error
    value = centred_distillation(rho, r, matched.group, beta=beta, loss=loss, temperature=temperature)
    return _finish(
        matched, value * (advantage_range / beta if published_scale else 1.0), implicit_reward=rho, optimality=r
    )


# ---- regression with weights -----------------------------------------------------------------------------------------


def rwr(matched: Matched, *, weights: Literal["raw", "softmax"] = "softmax", temperature: float = 1.0) -> Loss:
    """Reward-weighted regression, `w mse(velocity, v)` with `reward_weights`; its optimum is E[w v | x] / E[w | x].

    Raises:
        ValueError: as `reward_weights`.
    """
    weight = reward_weights(matched.reward, matched.group, weights=weights, temperature=temperature).double()
    error = mean_squared_error(matched.velocity, matched.target)
    return _finish(matched, weight * error, error=error, weight=weight)


def rft(matched: Matched) -> Loss:
    """Fine-tuning on the best image of each group, `w mse(velocity, v)` with `best_of_group`.

    Images of weight 0 stay in the mean; leave them out before, with weights found for whole groups, to save their
    network calls, and use `rwr` with weights "raw" and the weight as reward.
    """
    weight = best_of_group(matched.reward, matched.group).double()
    error = mean_squared_error(matched.velocity, matched.target)
    return _finish(matched, weight * error, error=error, weight=weight)


FORWARD = {
    "nft": Method(function=nft, needs_old=True),
    "awm": Method(function=awm),
    "dgpo": Method(function=dgpo, needs_reference=True, group_complete=True, shared_noise=True),
    "crd": Method(function=crd, needs_old=True, group_complete=True),
    "rwr": Method(function=rwr, group_complete=True),
    "rft": Method(function=rft, group_complete=True),
}

# ---- the old policy --------------------------------------------------------------------------------------------------

# First step of the ramp, value before it, slope, highest value.
DECAYS = {
    "copy": (0, 0.0, 0.0, 0.0),  # NFT type 0
    "linear": (0, 0.0, 0.001, 0.5),  # NFT type 1
    "delayed": (75, 0.0, 0.0075, 0.999),  # NFT type 2, CRD's sampling policy
    "awm": (0, 0.0, 0.001, 0.3),  # also DGPO's fast average
    "crd": (0, 0.25, 0.005, 0.999),
}


def old_decay(kind: str, step: int) -> float:
    """Decay d of the old policy's weights, `old <- d old + (1 - d) new`, after so many optimiser steps.

    `min(value + slope max(step - start, 0), highest)`.

    Args:
        kind: A name in `DECAYS`, or four numbers "start-value-slope-highest" such as "75-0-0.0075-0.999" (CRD).
        step: Optimiser steps taken so far; iterations where a method counts those.

    Raises:
        ValueError: the kind is neither, or step is negative.
    """
    numbers = DECAYS.get(kind)
    if numbers is None:
        try:
            start, value, slope, highest = (float(part) for part in kind.split("-"))
        except ValueError:
            raise ValueError(
                f"a decay is {', '.join(DECAYS)} or four numbers 'start-value-slope-highest', got {kind!r}"
            ) from None
    else:
        start, value, slope, highest = numbers
    if step < 0:
        raise ValueError(f"step counts optimiser steps from 0, got {step}")
    return min(value + slope * max(step - start, 0), highest)


# ---- shared ----------------------------------------------------------------------------------------------------------


def _finish(matched: Matched, loss: Tensor, **metrics: Tensor) -> Loss:
    dtype = working_dtype(matched.velocity)
    return loss.to(dtype), {name: value.detach().to(dtype) for name, value in metrics.items()}


def _old(matched: Matched, name: str) -> Tensor:
    if matched.old is None:
        raise ValueError(f"{name} needs the velocity of the old policy: evaluate it at the same latents as `old`")
    return matched.old.detach()


def _reference(matched: Matched, name: str) -> Tensor:
    if matched.reference is None:
        raise ValueError(f"{name} needs the velocity of the reference policy at the same latents as `reference`")
    return matched.reference.detach()
