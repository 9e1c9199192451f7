"""The Gaussian transition of one denoising step: its density and its Kullback-Leibler divergence.

Everything here is summed over the latent dimensions, as a log-probability is. Published clip ranges assume means: a
recipe that reproduces them divides by the number of latent elements, in plain sight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowrl.runtime.placement import widened, widest
from flowrl.runtime.shapes import Float
from flowrl.samplers.parametrization import Sigma, column


@dataclass(frozen=True, slots=True, eq=False)
class Transition:
    """Distribution of the next latent given this one: N(mean, std^2), independent in every dimension."""

    mean: Float[Tensor, " b *latent"]
    """[b, *latent]."""
    std: Tensor
    """Standard deviation of the next latent, square root of the step included; 0 for a deterministic step. A 0-d
    tensor, which kernels leave on the CPU, or [b, 1, ...]; it broadcasts over the mean."""
    least_std: float | None = None
    """The smallest std, if it is known without waiting for a device."""

    def part(self, region: tuple[Any, ...]) -> Transition:
        """Of some elements of the latent alone, by their index in it: they are independent of the others."""
        return replace(self, mean=self.mean[region])


def _per_sample_sum(values: Tensor) -> Tensor:
    """Sum over all but the first dimension, in the widest dtype there is: a latent has 1e4 to 1e6 elements."""
    return values.flatten(1).sum(1, dtype=widest(values.device)) if values.ndim > 1 else widened(values)


def _check(x_next: Tensor, transition: Transition) -> None:
    if x_next.shape != transition.mean.shape:
        raise ValueError(f"x_next {tuple(x_next.shape)} must have the mean's shape {tuple(transition.mean.shape)}")


def positive_std(transition: Transition) -> Tensor:
    """The std, which is 0-d or has as many dimensions as the mean. Raises ValueError: it is 0 somewhere, so the
    transition has no density."""
    std, mean, least = transition.std, transition.mean, transition.least_std
    if not (bool((std > 0).all()) if least is None else least > 0):
        raise ValueError(
            "a transition with std 0 is deterministic and has no density: score only stochastic steps (not the ODE "
            "kernel, noise_level 0, or a last step whose noise vanishes, as with cps and ddim_flow)"
        )
    return std.reshape(*[1] * (mean.ndim - std.ndim), *std.shape) if std.ndim else std


def _sum_over_mean(value: Tensor, mean: Tensor) -> Tensor:
    """Per-sample sum of a value that broadcasts over the mean, without expanding it: [b], [1] or 0-d."""
    given = value[:1].numel() if value.ndim else 1
    return _per_sample_sum(value) * (mean[:1].numel() / given)


def gaussian_log_prob(x_next: Float[Tensor, " b *latent"], transition: Transition) -> Float[Tensor, " b"]:
    """Log-density of the produced latent, summed over the latent dimensions.

    `sum_d [ -(x_next - mean)^2 / (2 std^2) - log std - log(2 pi) / 2 ]`

    The produced latent is data of the policy gradient and is detached: no gradient flows through it (Black et al.,
    DDPO, arXiv 2305.13301). Published code takes the mean over dimensions instead.

    Args:
        x_next: [b, *latent], the value that is stored, rounded to its storage dtype.
        transition: Kernel output at the source latent.

    Returns [b] in the dtype of x_next, at least float32. The sum is accumulated in float64 if the device has it.
    Raises ValueError: the std is 0 anywhere, or x_next and mean differ in shape.
    """
    _check(x_next, transition)
    std, mean = positive_std(transition), transition.mean
    standardized = (x_next.detach().to(mean.dtype) - mean) / std
    square = _per_sample_sum(standardized.square())
    log_norm = _sum_over_mean(widened(std).log() + 0.5 * math.log(2 * math.pi), mean)
    return (-0.5 * square - log_norm).to(torch.promote_types(x_next.dtype, torch.float32))


def cps_log_prob(x_next: Float[Tensor, " b *latent"], transition: Transition) -> Float[Tensor, " b"]:
    """The published stand-in for a log-density in CPS runs, `-sum_d (x_next - mean)^2`.

    Not a log-probability: it lacks 1/(2 std^2) and the normalisation, so its log-ratios are `2 std^2` times the
    Gaussian ones and clip ranges do not carry over. Divided by the number of latent elements it is Flow-CPS's value
    (arXiv 2509.05952) as released. It is finite even if the std is 0.

    Returns [b] in the dtype of x_next, at least float32; x_next is detached.
    """
    _check(x_next, transition)
    square = (x_next.detach().to(transition.mean.dtype) - transition.mean).square()
    return -_per_sample_sum(square).to(torch.promote_types(x_next.dtype, torch.float32))


def gaussian_kl(new: Transition, reference: Transition) -> Float[Tensor, " b"]:
    """Exact divergence KL(new || reference) of two transitions at the same latent, in nats, summed.

    `sum_d [ (r - 1 - log r) / 2 + (mean_new - mean_ref)^2 / (2 std_ref^2) ]` with `r = std_new^2 / std_ref^2`, the
    first term exactly 0 for equal std.

    Returns [b] in the dtype of the new mean. Raises ValueError: a std is 0 anywhere, or the means differ in shape.
    """
    _check(reference.mean, new)
    std, reference_std = positive_std(new), positive_std(reference)
    difference = _per_sample_sum(((new.mean - reference.mean) / reference_std).square())
    excess = (widened(std) / widened(reference_std)).square() - 1
    spread = _sum_over_mean(excess - torch.log1p(excess), new.mean)
    return (0.5 * (difference + spread)).to(new.mean.dtype)


def published_kl(new: Transition, reference: Transition, *, step_size: Sigma | None) -> Float[Tensor, " b"]:
    """The divergence of released Flow-GRPO code, which published coefficients were tuned for, summed.

    For Flow-SDE (and Dance) that code divides the squared mean difference by twice the squared diffusion coefficient g
    instead of the step's variance `g^2 h`, so its value is `h * KL`. Its CPS branch divides by the full variance.

    Args:
        new: Transition of the trained policy.
        reference: Transition of the reference policy at the same latent.
        step_size: `h = sigma - sigma_next` of the step, a number, a 0-d tensor or [b]; None for kernels whose published
            noise scale is the full standard deviation (`Kernel.full_std`), which returns `gaussian_kl`.

    Returns [b]; the published number is this divided by the number of latent elements. Raises ValueError: as
    `gaussian_kl`; or step_size is neither a scalar nor [b], or not positive.
    """
    kl = gaussian_kl(new, reference)
    if step_size is None:
        return kl
    step = torch.as_tensor(step_size, dtype=kl.dtype)
    if not bool((step > 0).all()):
        raise ValueError(f"step_size is sigma - sigma_next and must be above 0, got {step_size}")
    return kl * column(step, kl, "step_size")
