"""Velocity functions, and guidance as functions over them.

A network is `network(x, timestep, cond) -> v`, in any dtype. A velocity is `velocity(x, sigma, timestep)
-> v`: it knows its conditioning and answers in at least float32; rollouts and updates call it. Guidance takes
networks or velocities and returns velocities, so rollout and update are guided alike. The stack is classifier-free
guidance of each network first, then reinforcement learning guidance between two or more of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flowrl.runtime.placement import sent
from flowrl.runtime.shapes import Float
from flowrl.samplers.guidance_rules import Rule, linear_cfg
from flowrl.samplers.parametrization import Sigma, column, working_dtype
from flowrl.trajectory import Conditioning

Network = Callable[[Tensor, Tensor, Conditioning], Tensor]
Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]
ScaleAt = Callable[[float], float]
"""A schedule: the scale of reinforcement learning guidance at a sigma."""
Scale = float | ScaleAt
TrainNegative = bool | Literal["recompute"]
"""How the half of guidance without the prompt is trained; see `classifier_free_guidance`."""

_UNCOUNTED = ContextVar("uncounted", default=False)


def _evaluate(network: Network, x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
    """Call a network with one timestep per sample; check what it is given and what comes back."""
    if len(cond) != len(x):
        raise ValueError(
            f"conditioning of {len(cond)} samples cannot drive a batch of {len(x)}: index or expand it to the batch"
        )
    if timestep.shape not in ((), x.shape[:1]):
        raise ValueError(f"timestep must be 0-d or [{len(x)}], got shape {tuple(timestep.shape)}")
    velocity = network(x, sent(timestep, x.device).expand(len(x)), cond)
    if velocity.shape != x.shape:
        raise ValueError(
            f"a network must return a velocity of the shape of x {tuple(x.shape)}, got {tuple(velocity.shape)}"
        )
    return velocity.to(torch.promote_types(velocity.dtype, working_dtype(x)))


def conditioned(network: Network, cond: Conditioning) -> Velocity:
    """Bind a network to its conditioning: one evaluation, no guidance.

    Args:
        network: Receives x as it is, timestep [b] on the device of x, and the conditioning.
        cond: [b]; index it with the rows at hand.

    Returns a velocity. It raises ValueError if the batch differs from the conditioning's, or an output's shape from x's
    """

    def velocity(x: Float[Tensor, " b *latent"], sigma: Tensor, timestep: Tensor) -> Float[Tensor, " b *latent"]:
        return _evaluate(network, x, timestep, cond)

    return velocity


def classifier_free_guidance(
    network: Network, cond: Conditioning, negative: Conditioning, scale: float, *, rule: Rule = linear_cfg,
    train_negative: TrainNegative = True, apart: bool = False,
) -> Velocity:  # fmt: skip
    """Classifier-free guidance `v_neg + scale (v_pos - v_neg)` (Ho and Salimans, arXiv 2207.12598, eq. 6).

    The mixture is computed in float32. At scale 1 this rule evaluates only the positive, once. Otherwise the network
    answers for both, negative first, and `train_negative` decides what is kept for a backward pass:

        True          both halves, from one call of 2b rows; the gradient is that of the mixture
        "recompute"   the positive; the negative is computed again after the positive's backward pass, when its graph
                      is freed: the same gradient for half the activations and one more forward pass of b rows
        False         the positive; the negative is a constant, `dv = scale dv_pos`: half the activations, and half of
                      the backward pass. It is a constant as a function of x, too

    Except with True, each half is a call of b rows, with or without gradient, so a rollout and an update under the
    same setting agree to the bit. Numbers of calls of b and of 2b rows differ by rounding.

    Args:
        network: As in `conditioned`; sees a batch of 2b or two of b, except at scale 1.
        rule: Another family's rule of guidance (`flowrl.samplers.guidance_rules`), which defines the meaning of scale.
        apart: Two calls of b rows with True too, for networks that work better with prompts of one length.
    """
    if not math.isfinite(scale):
        raise ValueError(f"guidance scale must be finite, got {scale}: 1 means no guidance")
    if scale == 1 and rule is linear_cfg:
        return conditioned(network, cond)
    negative = negative.expand(len(cond))
    if apart or train_negative is not True:
        # A backward pass starts with the newest call: the positive's graph is gone when the negative's is built again.
        def half_by_half(x: Float[Tensor, " b *latent"], sigma: Tensor, timestep: Tensor) -> Tensor:
            if train_negative == "recompute" and torch.is_grad_enabled():
                without = checkpoint(
                    _evaluate, network, x, timestep, negative, use_reentrant=False, preserve_rng_state=False,
                    context_fn=lambda: (nullcontext(), uncounted()),
                )  # fmt: skip
            else:
                with torch.set_grad_enabled(train_negative is not False and torch.is_grad_enabled()):
                    without = _evaluate(network, x, timestep, negative)
            return rule(without, _evaluate(network, x, timestep, cond), scale)

        return half_by_half
    both = Conditioning.cat([negative, cond])

    def velocity(x: Float[Tensor, " b *latent"], sigma: Tensor, timestep: Tensor) -> Float[Tensor, " b *latent"]:
        doubled = timestep if timestep.ndim == 0 else torch.cat([timestep, timestep])
        without, with_prompt = _evaluate(network, torch.cat([x, x]), doubled, both).chunk(2)
        return rule(without, with_prompt, scale)

    return velocity


def is_uncounted() -> bool:
    """Whether a network is being called for nothing new: see `uncounted`."""
    return _UNCOUNTED.get()


class uncounted:
    """If `active`, marks network calls inside as giving nothing new: a backward pass makes them for what its forward
    pass did not keep, or a process for others that wait. Two backward passes through one graph enter it twice."""

    def __init__(self, active: bool = True) -> None:
        self._active = active

    def __enter__(self) -> None:
        self._before = _UNCOUNTED.set(self._active or _UNCOUNTED.get())

    def __exit__(self, *_: object) -> None:
        _UNCOUNTED.reset(self._before)


def mix_outputs(
    anchor: Float[Tensor, " b *latent"], others: Sequence[Float[Tensor, " b *latent"]], weights: Sequence[Sigma]
) -> Float[Tensor, " b *latent"]:
    """`anchor + sum_k weights_k (others_k - anchor)`, in at least float32; equal outputs stay what they are.

    The weights of all outputs sum to 1, and velocity, noise, v-prediction, clean data and score are affine in each
    other at one latent and one noise level, so any of them mix alike, and so do the means of a step. Convert outputs of
    different kinds to one first. Raises ValueError: shapes or numbers of outputs differ.
    """
    dtype = working_dtype(anchor)
    anchor = anchor.to(dtype)
    mixed = anchor
    for other, weight in zip(others, weights, strict=True):
        if other.shape != anchor.shape:
            raise ValueError(
                f"outputs that are mixed must have one shape, got {tuple(anchor.shape)} and {tuple(other.shape)}"
            )
        mixed = mixed + column(weight, anchor, "scale") * (other.to(dtype) - anchor)
    return mixed


def needed(weights: Sequence[Sigma]) -> tuple[bool, list[int]]:
    """Whether a mixture needs the base (not if the weights sum to 1), and which experts (not those of weight 0). The
    first needed network is the anchor of `mix_outputs`, the others follow with their weights. One alone is exact."""
    active = [k for k, weight in enumerate(weights) if isinstance(weight, Tensor) or weight != 0]
    plain = [weight for k in active if not isinstance(weight := weights[k], Tensor)]
    return len(plain) < len(active) or math.fsum(plain) != 1, active


def rlg(base: Velocity, rl: Velocity, scale: Scale) -> Velocity:
    """Reinforcement learning guidance, `v_base + scale (v_rl - v_base)` (RLG, arXiv 2508.21016).

    If the tuned model is `p_base exp(R / beta)`, the scores mix to that of `p_base exp(scale R / beta)`: the scale
    turns the strength of the KL penalty to beta / scale without training. Limits: tuned models are not such exact
    tilts, and following the mixed score does not sample the product of densities, since mixing and noising do not
    commute (a base N(0, 1) and a tuned N(0, 1/4) at scale 2 give a std of 0.25, the product would have 0.378).

    Args:
        base: Velocity of the base model, its guidance included.
        rl: Velocity of the tuned model, its guidance included; its guidance scale may differ.
        scale: A number, or a function of sigma (`by_step(rl_first(...), sigma_T)`, `rl_outside`, or your own).

    Returns `velocity(x, sigma, timestep)`. At scale 0 it is `base` and at scale 1 `rl`, bit for bit and without calling
    the other one. Otherwise 4 network rows per sample and step, 3 if one of the two is not guided, 2 if neither is.
    """
    return rlg_experts(base, [rl], [scale])


def rlg_experts(base: Velocity, experts: Sequence[Velocity], scales: Sequence[Scale]) -> Velocity:
    """Guidance by several tuned models, `v_base + sum_k scale_k (v_k - v_base)`; experts of weight 0 are not called.

    Args:
        base: Velocity of the base model, guided as `rlg` says.
        experts: Velocities of models tuned from this base, at least one.
        scales: One for each: a number, or a function of sigma.
    """
    if not experts or len(experts) != len(scales):
        raise ValueError(
            f"reinforcement learning guidance needs one scale per expert, got {len(experts)}, {len(scales)}"
        )
    for scale in scales:
        if not callable(scale):
            check_scale(scale)

    def velocity(x: Float[Tensor, " b *latent"], sigma: Sigma, *timestep: Tensor) -> Float[Tensor, " b *latent"]:
        weights = [scale_at(scale, sigma) for scale in scales]
        with_base, active = needed(weights)
        called: list[Callable[..., Tensor]] = [*[base] * with_base, *(experts[k] for k in active)]
        anchor, *others = [network(x, sigma, *timestep) for network in called]
        return mix_outputs(anchor, others, [weights[k] for k in active][-len(others) :]) if others else anchor

    return velocity


def network_rows(weights: Sequence[float], *, base_guidance_scale: float, rl_guidance_scale: float) -> int:
    """Rows that networks evaluate for one sample and step: for each network needed 1, or 2 if it is guided."""
    with_base, active = needed(list(weights))
    base, expert = (1 if scale == 1 else 2 for scale in (base_guidance_scale, rl_guidance_scale))
    return base * with_base + expert * len(active)


def by_step(scale_of_step: Callable[[int], float], sigma_T: Float[Tensor, " T1"]) -> ScaleAt:
    """A function of the step, 0 .. T-1, as one of sigma: that of the step with the nearest sigma in `sigma_T`."""
    sigmas = sigma_T[:-1].detach().cpu().double()
    return lambda sigma: scale_of_step(int((sigmas - sigma).abs().argmin()))


def rl_first(scale: float, num_steps: int) -> Callable[[int], float]:
    """The tuned model alone (scale 1) in the first `num_steps` steps (published code: `zero_init_step`), then `scale`:
    a function of the step. Raises ValueError: num_steps is negative, or scale not finite."""
    check_scale(scale)
    if num_steps < 0:
        raise ValueError(f"the number of first steps without extrapolation must not be negative, got {num_steps}")
    return lambda step: 1.0 if step < num_steps else scale


def rl_outside(scale: float, low: float, high: float) -> ScaleAt:
    """`scale` where low <= sigma <= high, and the tuned model alone (scale 1) elsewhere: a function of sigma. Raises
    ValueError: not 0 <= low <= high <= 1, or scale not finite."""
    check_scale(scale)
    if not 0 <= low <= high <= 1:
        raise ValueError(f"an interval of noise levels needs 0 <= low <= high <= 1, got {low} and {high}")
    # float32 sigmas may miss the bound that they are meant to equal by a rounding.
    return lambda sigma: scale if low - 1e-6 <= sigma <= high + 1e-6 else 1.0


def scale_at(scale: Scale, sigma: Sigma) -> float | Float[Tensor, " b"]:
    """The scale at a noise level: a number, or [b] if it differs between the samples' levels. Raises ValueError: a
    schedule gives a number that is not finite."""
    if not callable(scale):
        return float(scale)
    levels = sigma.flatten().tolist() if isinstance(sigma, Tensor) else [float(sigma)]
    known = {level: float(scale(level)) for level in dict.fromkeys(levels)}
    for value in known.values():
        check_scale(value)
    if len(set(known.values())) == 1:
        return next(iter(known.values()))
    return torch.tensor([known[level] for level in levels], dtype=torch.float64)


def check_scale(scale: float) -> None:
    """Refuses a scale of reinforcement learning guidance that is not finite."""
    if not math.isfinite(scale):
        raise ValueError(
            f"the scale of reinforcement learning guidance must be finite, got {scale}: 1 is the tuned model"
        )
