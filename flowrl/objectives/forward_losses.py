"""Losses on finished images that are noised again: no trajectory, no log-density of the sampler.

One image, one noise and one sigma give a latent `x = (1 - sigma) clean + sigma noise` whose velocity is known to be
`v = noise - clean`; the losses weigh how well the policy predicts it. A loss is a frozen dataclass whose fields are its
options; called with a micro-batch it gives (loss [b], metrics), the loss unreduced and the metrics [b]; a recipe takes
it from `FORWARD`. All errors are means
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
| sft | e of an image of a file | flow matching |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from flowrl.objectives import terms
from flowrl.objectives.preference_losses import best_of_group, centred_distillation, group_gate, reward_weights
from flowrl.objectives.terms import AdvantageMode, Weighting
from flowrl.runtime.placement import widened
from flowrl.runtime.shapes import Float, Int
from flowrl.samplers.parametrization import column, working_dtype

Weighed = tuple[Tensor, dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Matched:
    """b images noised once each, and what the networks say at the noisy latents. Raises ValueError: shapes differ, or a
    sigma is outside (0, 1]."""

    clean: Float[Tensor, " b *latent"]
    """Finished latents."""
    noise: Float[Tensor, " b *latent"]
    """Standard normal."""
    sigma: Float[Tensor, " b"]
    """In (0, 1], on any device."""
    velocity: Float[Tensor, " b *latent"]
    """Of the trained policy, with its graph."""
    advantage: Float[Tensor, " b"]
    """Clipped as the run clips advantages."""
    reward: Float[Tensor, " b"]
    group: Int[Tensor, " b"]
    """Images of one prompt alike."""
    old: Float[Tensor, " b *latent"] | None = None
    """Velocity of the old policy at the same latents, or None."""
    reference: Float[Tensor, " b *latent"] | None = None
    """Velocity of the reference policy likewise, or None."""

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


def noised(
    clean: Float[Tensor, " b *latent"], noise: Float[Tensor, " b *latent"], sigma: Float[Tensor, " b"]
) -> Float[Tensor, " b *latent"]:
    """Latent on the path, `(1 - sigma) clean + sigma noise`, in at least float32."""
    if clean.shape != noise.shape:
        raise ValueError(f"noise must have the shape of clean {tuple(clean.shape)}, got {tuple(noise.shape)}")
    clean, noise = clean.to(working_dtype(clean)), noise.to(working_dtype(clean))
    return (1 - column(sigma, clean)) * clean + column(sigma, clean) * noise


class Loss(Protocol):
    """The options of a loss, which is called with a micro-batch."""

    @property
    def reads_old(self) -> bool:
        """Whether `Matched.old` must be there."""

    def __call__(self, matched: Matched) -> Weighed: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardMethod:
    """An entry of `FORWARD`."""

    options: type[Any]
    """The class of the loss's options; `options(...)(matched) -> (loss [b], metrics of [b])`."""
    sampled_by: Literal["policy", "sampling"] | None = None
    """The copy of the policy that images are sampled with; None takes the old one where the loss reads it."""
    needs_reference: bool = False
    """`Matched.reference` must be there."""
    group_complete: bool = False
    """All images of a group must be in the same call."""
    shared_noise: bool = False
    """Images of a group are meant to share noise."""
    one_level: bool = False
    """Errors of a group's images are compared, which only means something at one noise level."""
    weighs_rewards: bool = False
    """It reads rewards themselves, not advantages."""
    best_only: bool = False
    """It trains the best images of each group only; they are chosen before."""
    by_parts: bool = False
    """Each part of a state can have a loss of its own, from the rewards that speak of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Nft:
    """DiffusionNFT: pulls the policy to good images and, mirrored at the old policy, away from bad ones.

        v+ = beta v_new + (1 - beta) v_old,  v- = (1 + beta) v_old - beta v_new
        loss = (c / beta) [ r L(v+) + (1 - r) L(v-) ],  L(u) = mean(d^2) / sg[max(mean|d|, floor)],  d = sigma (v - u)

    On the old policy itself the gradient is that of `A L(v_new)`: advantage-weighted matching, whatever beta is. Off it
    beta bounds how far the optimum lies: without the adaptive weight it is `v_old + (1/beta) E[(2 r - 1)(v - v_old)]`.
    Metrics: optimality, positive_error, negative_error (L of the branches).
    """

    beta: float = 1.0
    """Positive; 1 and 0.1 are published. Small is fast."""
    advantage_range: float = 5.0
    """c of `optimality`."""
    mode: AdvantageMode = "all"
    """Of `optimality`."""
    adaptive: bool = True
    """Divide by the mean absolute error, per sample."""
    floor: float = 1e-5
    """Least mean absolute error to divide by."""
    published_scale: bool = True
    """Multiply by c / beta, which keeps the gradient's size independent of both."""

    reads_old: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _positive(beta=self.beta, advantage_range=self.advantage_range, floor=self.floor)

    def __call__(self, matched: Matched) -> Weighed:
        """Loss and metrics of b images, with `old`."""
        old = _of("old", matched, "nft")
        r = widened(terms.optimality(matched.advantage, advantage_range=self.advantage_range, mode=self.mode))
        velocity = matched.velocity.to(working_dtype(matched.velocity))
        sigma = column(matched.sigma, velocity)
        branches = (old + sign * self.beta * (velocity - old) for sign in (1, -1))
        positive, negative = (
            terms.matching_error(sigma * (branch - matched.target), adaptive=self.adaptive, floor=self.floor)
            for branch in branches
        )
        scale = self.advantage_range / self.beta if self.published_scale else 1.0
        loss = scale * (r * positive + (1 - r) * negative)
        return _finish(matched, loss, optimality=r, positive_error=positive, negative_error=negative)


@dataclass(frozen=True, kw_only=True, slots=True)
class Awm:
    """Advantage-weighted matching: policy gradient with a matching loss in place of a log-probability (AWM).

    `max(-A' rho, -A' clip(rho, 1 - clip, 1 + clip))`, `A' = advantage_max clip(A / advantage_range, -1, 1)`, rho the
    exponential of new minus old log-probability. On policy, the default, the old one is the new one detached: the loss
    is -A' and its gradient `A' d psi`. The ratio is taken for each draw of (sigma, noise) ("exp_first"). Metrics:
    error, ratio.

    With weighting uniform that gradient is `A' (v_new - v)` up to a factor: the step of reward-based velocity matching
    (RVM, arXiv 2608.23664), whose pull to the base is kl_coef. With kl_coef 1 and the reward itself as A it is
    reinforce adjoint matching (RAM, arXiv 2605.10759), and its fixed point the optimum of reward minus KL.
    """

    weighting: Weighting = "ghuber"
    """Of `matching_log_prob`."""
    power: float = 0.25
    """Of ghuber."""
    advantage_range: float = 5.0
    """Where advantages are clipped."""
    advantage_max: float = 1.0
    """What that becomes."""
    clip: float = 1.0
    """Distance of the ratio from 1 on either side; 1, as published, hardly ever binds."""
    off_policy: bool = False
    """Take the old log-probability from the old policy, which then samples too."""

    def __post_init__(self) -> None:
        _positive(power=self.power, advantage_range=self.advantage_range, advantage_max=self.advantage_max)
        _not_negative(clip=self.clip)

    @property
    def reads_old(self) -> bool:
        """Whether `Matched.old` must be there."""
        return self.off_policy

    def __call__(self, matched: Matched) -> Weighed:
        """Loss and metrics of b images, with `old` if off_policy."""
        error = terms.mean_squared_error(matched.velocity, matched.target)
        log_prob = terms.matching_log_prob(error, matched.sigma, weighting=self.weighting, power=self.power)
        before = log_prob.detach()
        if self.off_policy:
            old_error = terms.mean_squared_error(_of("old", matched, "awm with off_policy"), matched.target)
            before = terms.matching_log_prob(old_error, matched.sigma, weighting=self.weighting, power=self.power)
        advantage = widened(matched.advantage).clamp(-self.advantage_range, self.advantage_range)
        advantage = advantage * (self.advantage_max / self.advantage_range)
        loss = terms.clipped_surrogate(log_prob - before, advantage, clip_low=self.clip, clip_high=self.clip)
        return _finish(matched, loss, error=error, ratio=(log_prob - before).exp())


@dataclass(frozen=True, kw_only=True, slots=True)
class Dgpo:
    """Direct group preference optimisation: all images of a group against each other (DGPO).

    `loss_i = sigmoid(S) A_i d_i` with the group's gate S (`group_gate`) and d the mean squared error of the velocity;
    up to beta / K the gradient of `-log sigmoid(-S)`. With a clip distance, an image whose ratio
    `exp(d_old - d)` is above 1 + clip at A > 0, or below 1 - clip otherwise, gets no gradient. Metrics: error, gate,
    clipped (also the mask that may be put on a KL).
    """

    beta: float = 100.0
    """Not negative; changes the gate only."""
    advantage_range: float = 5.0
    """Where advantages are clipped."""
    clip: float | None = None
    """Distance of the ratio to the old policy from 1; null does not clip."""

    def __post_init__(self) -> None:
        _positive(advantage_range=self.advantage_range)
        _not_negative(beta=self.beta, clip=self.clip or 0.0)

    @property
    def reads_old(self) -> bool:
        """Whether `Matched.old` must be there."""
        return self.clip is not None

    def __call__(self, matched: Matched) -> Weighed:
        """Loss and metrics of complete groups that share sigma and noise, with `reference`; with clip, `old`."""
        error = terms.mean_squared_error(matched.velocity, matched.target)
        reference_error = terms.mean_squared_error(_of("reference", matched, "dgpo"), matched.target)
        advantage = widened(matched.advantage).clamp(-self.advantage_range, self.advantage_range)
        gate = group_gate(error, reference_error, advantage, matched.group, beta=self.beta)
        clipped = torch.zeros_like(advantage, dtype=torch.bool)
        if self.clip is not None:
            old_error = terms.mean_squared_error(_of("old", matched, "dgpo with clip"), matched.target)
            ratio = (old_error - error.detach()).exp()
            clipped = torch.where(advantage > 0, ratio > 1 + self.clip, ratio < 1 - self.clip)
        loss = gate * advantage * torch.where(clipped, error.detach(), error)
        return _finish(matched, loss, error=error, gate=gate, clipped=widened(clipped))


@dataclass(frozen=True, kw_only=True, slots=True)
class Crd:
    """Centred reward distillation: the policy's implicit reward is fitted to the real one (CRD).

    `rho = L(v_old) - L(v_new)` with L the mean squared error of the velocity, over its own mean absolute error if
    adaptive; `r = optimality(A)`; the loss is `centred_distillation`, times advantage_range / beta as published.
    Metrics: implicit_reward, optimality.
    """

    beta: float = 1.0
    """Positive."""
    advantage_range: float = 5.0
    """Of `optimality`."""
    adaptive: bool = True
    """As in nft, for either velocity."""
    floor: float = 1e-5
    """As in nft."""
    loss: Literal["square", "cross_entropy"] = "square"
    """Of `centred_distillation`."""
    temperature: float | None = None
    """Of `centred_distillation`; above 0, or null."""
    published_scale: bool = True
    """Multiply by advantage_range / beta."""

    reads_old: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _positive(beta=self.beta, advantage_range=self.advantage_range, floor=self.floor)
        if self.temperature is not None:
            _positive(temperature=self.temperature)

    def __call__(self, matched: Matched) -> Weighed:
        """Loss and metrics of complete groups, with `old`."""
        old = _of("old", matched, "crd")
        r = widened(terms.optimality(matched.advantage, advantage_range=self.advantage_range))
        new_error, old_error = (
            terms.matching_error(v - matched.target, adaptive=self.adaptive, floor=self.floor)
            for v in (matched.velocity, old)
        )
        rho = old_error - new_error
        value = centred_distillation(
            rho, r, matched.group, beta=self.beta, loss=self.loss, temperature=self.temperature
        )
        scale = self.advantage_range / self.beta if self.published_scale else 1.0
        return _finish(matched, value * scale, implicit_reward=rho, optimality=r)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rwr:
    """Regression with weights w by reward (RWR), `w mse(velocity, v)`; its optimum is E[w v | x] / E[w | x]."""

    weights: Literal["raw", "softmax"] = "softmax"
    """Of `reward_weights`."""
    temperature: float = 1.0
    """Of the softmax."""

    reads_old: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _positive(temperature=self.temperature)

    def __call__(self, matched: Matched) -> Weighed:
        """Loss and metrics of complete groups; raises as `reward_weights`."""
        weight = reward_weights(matched.reward, matched.group, weights=self.weights, temperature=self.temperature)
        return _weigh(matched, weight)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rft:
    """Fine-tuning on the best image of each group, `w mse(velocity, v)` with `best_of_group`.

    Images of weight 0 stay in the mean; leave them out before, with weights found for whole groups, to save their
    network calls, and use `Rwr` with weights "raw" and the weight as reward.
    """

    reads_old: ClassVar[bool] = False

    def __call__(self, matched: Matched) -> Weighed:
        """Loss and metrics of complete groups."""
        return _weigh(matched, best_of_group(matched.reward, matched.group))


@dataclass(frozen=True, kw_only=True, slots=True)
class Sft:
    """Supervised fine-tuning on images of a file, `mse(velocity, v)`: a start for what learns from rewards afterwards.

    The optimum is the velocity of the data, E[v | x]; the gradient by a velocity of D elements `2 (velocity - v) / D`.
    Nothing is sampled or scored in training. Set `guidance_scale: 1`, or it is the guided velocity that is fitted.
    """

    images: str
    """A JSONL file of prompts and images, or a folder with `images.jsonl` (`flowrl.prompts.pairs`). An image of another
    size is scaled until it covers that of the run, and what sticks out is cut off."""

    reads_old: ClassVar[bool] = False

    def __call__(self, matched: Matched) -> Weighed:
        """Loss and metrics of b images."""
        return _weigh(matched, torch.ones_like(matched.reward))


FORWARD = {
    "nft": ForwardMethod(options=Nft, by_parts=True),
    "awm": ForwardMethod(options=Awm, by_parts=True),
    "dgpo": ForwardMethod(
        options=Dgpo, sampled_by="policy", needs_reference=True, group_complete=True, shared_noise=True, one_level=True
    ),
    "crd": ForwardMethod(options=Crd, sampled_by="sampling", group_complete=True, one_level=True),
    "rwr": ForwardMethod(options=Rwr, group_complete=True, weighs_rewards=True, by_parts=True),
    "rft": ForwardMethod(options=Rft, group_complete=True, weighs_rewards=True, best_only=True),
    "sft": ForwardMethod(options=Sft),
}

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

    `kind` is a name in `DECAYS`; steps are iterations where a method counts those.
    """
    start, value, slope, highest = DECAYS[kind]
    return min(value + slope * max(step - start, 0), highest)


def _finish(matched: Matched, loss: Tensor, **metrics: Tensor) -> Weighed:
    dtype = working_dtype(matched.velocity)
    return loss.to(dtype), {name: value.detach().to(dtype) for name, value in metrics.items()}


def _weigh(matched: Matched, weight: Tensor) -> Weighed:
    error = terms.mean_squared_error(matched.velocity, matched.target)
    return _finish(matched, widened(weight) * error, error=error, weight=widened(weight))


def _positive(**options: float) -> None:
    for name, value in options.items():
        if not value > 0:
            raise ValueError(f"option {name} must be above 0, got {value:g}")


def _not_negative(**options: float) -> None:
    for name, value in options.items():
        if not value >= 0:
            raise ValueError(f"option {name} must not be negative, got {value:g}")


def _of(policy: Literal["old", "reference"], matched: Matched, name: str) -> Tensor:
    velocity = matched.old if policy == "old" else matched.reference
    if velocity is None:
        raise ValueError(f"{name} needs the velocity of the {policy} policy at the same latents as `{policy}`")
    return velocity.detach()
