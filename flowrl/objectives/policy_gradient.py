"""Policy-gradient objectives of one signature, and the importance ratios of whole trajectories.

An objective is a frozen dataclass whose fields are its options; called with a micro-batch it gives the loss [b],
unreduced and to be minimised, and its `cut` says whose gradient it takes away. A recipe takes it from `OBJECTIVES`.
What it needs of a micro-batch is in `Scored`; the step weight and the KL term are the recipe's.

| name | loss of a row, r = exp(log_ratio) | source |
|---|---|---|
| clip | max(-A r, -A clip(r)) | PPO, DDPO-IS, Flow-GRPO, DanceGRPO |
| guard | the same of a ratio without bias and without 1/std, times 1/abs(c) or 1/h | GRPO-Guard |
| dppo | -A r, left out where the KL is large and the ratio moves away | Flow-DPPO |
| reinforce | -A r / sg[r] | DDPO-SF |

Letters: b rows of a micro-batch, M rows of a table; h the size of a step in sigma, c = d mean / d velocity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.objectives.terms import clipped, clipped_surrogate, sample_mean
from flowrl.runtime.shapes import Bool, Float, Int
from flowrl.samplers.kernels import Kernel, LogProb
from flowrl.samplers.transition import Transition, positive_std
from flowrl.trajectory import check_columns


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scored:
    """A micro-batch of transitions of one denoising step, scored again by the trained policy. Raises ValueError: shapes
    differ, the step size is not positive, or the sensitivity is 0."""

    log_ratio: Float[Tensor, " b"]
    """New minus old log-density, summed over dimensions or divided by them as the run's `log_ratio` says."""
    advantage: Float[Tensor, " b"]
    clip_low: Float[Tensor, " b"]
    clip_high: Float[Tensor, " b"]
    """Distances: the ratio is held within 1 - clip_low .. 1 + clip_high."""
    new: Transition
    """Of the trained policy; its mean carries the gradient."""
    old_mean: Float[Tensor, " b *latent"] | None
    """The mean under the policy that sampled, or None where the objective does not need it."""
    produced: Float[Tensor, " b *latent"]
    """The latent that was drawn."""
    step_size: float
    """h = sigma - sigma_next > 0."""
    sensitivity: float
    """c of the kernel at this step (`kernel_sensitivity`); only its size counts."""

    def __post_init__(self) -> None:
        rows = {name: tuple(getattr(self, name).shape) for name in ("log_ratio", "advantage", "clip_low", "clip_high")}
        latents = {"new.mean": tuple(self.new.mean.shape), "produced": tuple(self.produced.shape)}
        if self.old_mean is not None:
            latents["old_mean"] = tuple(self.old_mean.shape)
        if set(rows.values()) != {(len(self.produced),)} or len(set(latents.values())) != 1:
            raise ValueError(f"b rows need columns [b] and latents [b, *latent] of one shape, got {rows} and {latents}")
        if not self.step_size > 0 or self.sensitivity == 0:
            raise ValueError(
                f"a step has step_size = sigma - sigma_next > 0 and a sensitivity other than 0, got {self.step_size} "
                f"and {self.sensitivity}"
            )

    def anchored(self) -> Scored:
        """The same rows with the policy as it is now for the one that sampled: the ratio is exactly 1, and its gradient
        that of the log-density."""
        old_mean = None if self.old_mean is None else self.new.mean.detach()
        return replace(self, log_ratio=self.log_ratio - self.log_ratio.detach(), old_mean=old_mean)

    def part(
        self, region: tuple[Any, ...], advantage: Float[Tensor, " b"], log_prob: LogProb, dims: Callable[[Tensor], int]
    ) -> Scored:
        """The same rows of one part of the latents, with an advantage of its own; `dims` divide a latent's log-ratio.
        The density is a product over elements, so that the part's ratio is one of the factors of the whole's."""
        new, produced = self.new.part(region), self.produced[region]
        old = replace(new, mean=_old_mean(self, "of parts of a state")[region])
        log_ratio = (log_prob(produced, new) - log_prob(produced, old)) / dims(produced[0])
        return replace(self, log_ratio=log_ratio, advantage=advantage, new=new, old_mean=old.mean, produced=produced)


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """An entry of `OBJECTIVES`."""

    options: type[Any]
    """The class of its options; `options(...)(scored) -> loss [b]`."""
    needs_old_mean: bool = False
    """Whether `Scored.old_mean` must be there: have the rollout keep its means."""
    needs_mean_log_ratio: bool = False
    """Whether it is defined for log-ratios per latent dimension only."""
    of_whole_paths: bool = False
    """Whether a ratio of whole trajectories is defined for it."""
    cut: str = "clip_fraction"
    """What the log calls the share of rows in the mask `options(...).cut(scored)`, [b], whose gradient it takes away;
    "" where it takes none."""


def kernel_sensitivity(kernel: Kernel, sigma: float | Tensor, sigma_next: float | Tensor) -> float:
    """How much the mean of a step moves with the network's velocity, c = d mean / d velocity.

    Every kernel's mean is affine in the velocity, so two evaluations at numbers give it exactly:
    `c = mean(x=0, v=1) - mean(x=0, v=0)`. -h for the ODE, `-h (1 + g^2 (1 - sigma) / (2 sigma))` for Flow-SDE and
    Dance. Negative for all kernels: a larger velocity leads to a smaller latent. The kernel has noise_level and
    sigma_max bound; sigma is that of the source, a number or a 0-d tensor. Raises ValueError: not
    0 <= sigma_next < sigma <= 1.
    """
    zero = torch.zeros(1, 1, dtype=torch.float64)
    return float(kernel(zero, zero + 1, sigma, sigma_next).mean - kernel(zero, zero, sigma, sigma_next).mean)


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """PPO's clipped surrogate, in ranges that may differ between rows and between the two sides of 1.

    The objective of Flow-GRPO (Liu et al., arXiv 2505.05470), DanceGRPO (arXiv 2505.07818) and, on a DDIM chain, of
    DDPO-IS (Black et al., arXiv 2305.13301). Ranges like 1e-4 are for log-ratios per dimension.
    """

    def __call__(self, scored: Scored) -> Float[Tensor, " b"]:
        """Loss of each row."""
        return clipped_surrogate(
            scored.log_ratio, scored.advantage, clip_low=scored.clip_low, clip_high=scored.clip_high
        )

    def cut(self, scored: Scored) -> Bool[Tensor, " b"]:
        """Rows beyond their range, in the direction of their advantage."""
        return clipped(scored.log_ratio, scored.advantage, clip_low=scored.clip_low, clip_high=scored.clip_high)


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """Clipped surrogate of a normalised ratio, gradients equalised over steps (GRPO-Guard, arXiv 2510.22319).

    With `d = mean_new - mean_old` and the standard normal that was drawn, `xi = (produced - mean_old) / std`:

        log r^ = mean(d xi) = std (log r + mean(d^2) / (2 std^2))      (log r the mean over dimensions)
        loss = delta max(-A r^, -A clip(r^, 1 - clip_low, 1 + clip_high))

    log r^ has mean 0 under the old policy at every step, and no factor 1/std, so that one range fits all steps; its
    derivative with respect to the velocity is `c xi / D`, which delta makes the same at all steps. Always in the
    mean-over-dimensions convention, whatever the run's `log_ratio` is, and in units of its own: published ranges are
    2e-6 and 4e-6. The bias is taken from each sample, where the released code averages it over the batch.
    """

    delta: Literal["exact", "published", "none"] = "exact"
    """exact is 1 / abs(c), which equalises every kernel and step; published is 1 / h, which is the same but for a
    constant on Flow-SDE steps after the first; none leaves the loss as it is (Flow-Factory)."""

    def __call__(self, scored: Scored) -> Float[Tensor, " b"]:
        """Loss of each row. Raises ValueError: old_mean is missing, or a std is 0."""
        scales = {"exact": 1 / abs(scored.sensitivity), "published": 1 / scored.step_size, "none": 1.0}
        loss = clipped_surrogate(
            _unbiased_log_ratio(scored), scored.advantage, clip_low=scored.clip_low, clip_high=scored.clip_high
        )
        return loss * scales[self.delta]

    def cut(self, scored: Scored) -> Bool[Tensor, " b"]:
        """Rows whose log r^ is beyond their range, in the direction of their advantage."""
        log_ratio = _unbiased_log_ratio(scored).detach()
        return clipped(log_ratio, scored.advantage, clip_low=scored.clip_low, clip_high=scored.clip_high)


def _unbiased_log_ratio(scored: Scored) -> Float[Tensor, " b"]:
    """log r^ of `Guard`."""
    old_mean = _old_mean(scored, "guard")
    drift = scored.new.mean - old_mean
    log_ratio = sample_mean(drift * ((scored.produced.detach() - old_mean) / positive_std(scored.new)))
    return log_ratio.to(scored.advantage.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dppo:
    """Importance-weighted loss without clipping; rows that have moved too far, and move on, are left out (Flow-DPPO).

    `KL = mean((mean_new - mean_old)^2) / (2 std^2)`, per dimension. A row counts 0 where `KL >= threshold` and it moves
    away from the old policy: r > 1 and A > 0, or r < 1 and A < 0. All others count `-A r`. Rows left out stay in the
    denominator. The row's clip range is not used.
    """

    threshold: float = 1e-5
    """Positive; 1e-5 in verl-omni, 1e-6 in Flow-Factory."""

    def __post_init__(self) -> None:
        if not self.threshold > 0:
            raise ValueError(f"threshold is a divergence per dimension and must be positive, got {self.threshold}")

    def __call__(self, scored: Scored) -> Float[Tensor, " b"]:
        """Loss of each row. Raises ValueError: old_mean is missing, or a std is 0."""
        ratio = scored.log_ratio.exp()
        return torch.where(self.cut(scored), torch.zeros_like(ratio), -scored.advantage * ratio)

    def cut(self, scored: Scored) -> Bool[Tensor, " b"]:
        """Rows that are left out."""
        drift = (scored.new.mean.detach() - _old_mean(scored, "dppo")) / positive_std(scored.new)
        far = 0.5 * sample_mean(drift.square()) >= self.threshold
        return far & clipped(scored.log_ratio.detach(), scored.advantage, clip_low=0.0, clip_high=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reinforce:
    """Score-function loss without importance weights, `-A exp(log p - sg[log p])` (DDPO-SF, arXiv 2305.13301).

    Its value is -A and its gradient `-A d log p` everywhere; unbiased only for the first update after a rollout.
    """

    def __call__(self, scored: Scored) -> Float[Tensor, " b"]:
        """Loss of each row."""
        return -scored.advantage * (scored.log_ratio - scored.log_ratio.detach()).exp()


OBJECTIVES = {
    "clip": Objective(options=Clip, of_whole_paths=True),
    "guard": Objective(options=Guard, needs_old_mean=True, needs_mean_log_ratio=True),
    "dppo": Objective(options=Dppo, needs_old_mean=True, cut="masked_fraction"),
    "reinforce": Objective(options=Reinforce, cut=""),
}


def _old_mean(scored: Scored, name: str) -> Tensor:
    if scored.old_mean is None:
        raise ValueError(
            f"objective {name} compares the new mean with that of the rollout, but old_mean is None: keep the means "
            "(keep_means=True), or replay them before the first update"
        )
    return scored.old_mean.detach()


def sequence_coefficients(
    log_ratio_M: Float[Tensor, " M"],
    sample_M: Int[Tensor, " M"],
    advantage_M: Float[Tensor, " M"],
    clip_low_M: Float[Tensor, " M"],
    clip_high_M: Float[Tensor, " M"],
    kind: Literal["sequence", "mixed"] = "sequence",
) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
    """Loss of each row under a ratio of its whole trajectory, and the exact gradient by the rows' log-ratios.

    With `s_i = exp(mean_t log rho_it)` over the rows of sample i, and C(r, A) = min(A r, A clip(r)):

        sequence    loss_it = -C(s_i, A_i)                                       (GSPO, arXiv 2507.18071)
        mixed       loss_it = -(C(rho_it, A_it) + C(s_i, A_it)) / 2              (DHPO, arXiv 2601.05607)

    One row's log-ratio enters the loss of all rows of its sample, whose graphs rarely fit into memory together. The
    coefficient is the derivative of `sum_t loss_it` by that log-ratio, so `coefficient * log_ratio`, row by row and
    reduced as the loss is (mean over rows, or over the rows of each sample), has the gradient of the whole loss. Find
    it from log-ratios computed without gradient before the update. Step weights that differ within a sample do not go
    with this. What the ratios are taken of, sums or means over dimensions, is the caller's; so is the range.

    Args:
        log_ratio_M: [M]; no gradient flows through it here.
        sample_M: [M] trajectory of each row, not negative. All trained rows of a sample must be there.
        advantage_M: [M]; equal within a sample for "sequence".
        clip_low_M, clip_high_M: [M] distances below and above 1.

    Returns coefficient [M] and loss [M], detached, in the dtype of the log-ratio. Raises ValueError: shapes differ,
    kind is unknown, a sample is negative (a transition that several paths share), or advantages or ranges differ within
    a sample under "sequence".
    """
    check_columns(
        log_ratio_M=log_ratio_M,
        sample_M=sample_M,
        advantage_M=advantage_M,
        clip_low_M=clip_low_M,
        clip_high_M=clip_high_M,
    )
    if kind not in ("sequence", "mixed"):
        raise ValueError(f"kind is sequence or mixed, got {kind!r}")
    if bool((sample_M < 0).any()):
        raise ValueError("a transition that several paths share (sample -1) has no sequence ratio: use the step ratio")
    log_ratio, advantage = log_ratio_M.detach().double(), advantage_M.detach().double()
    low, high = clip_low_M.double(), clip_high_M.double()
    _, sample = sample_M.unique(return_inverse=True)
    sequence = _sample_mean(log_ratio, sample)
    if kind == "sequence":
        for name, column in (("advantage_M", advantage), ("clip_low_M", low), ("clip_high_M", high)):
            of_sample = torch.zeros_like(column)  # that of one of its rows, by the number of the sample
            of_sample[sample] = column
            if not torch.equal(column, of_sample[sample]):
                raise ValueError(
                    f"{name} differs within a sample, but a sequence ratio goes with one advantage and one range "
                    "per trajectory: use credit outcome, or ratio step"
                )
    loss, slope = _clip(sequence, advantage, low, high)
    if kind == "mixed":
        step_loss, step_slope = _clip(log_ratio, advantage, low, high)
        loss, slope = 0.5 * step_loss + 0.5 * loss, 0.5 * step_slope + 0.5 * _sample_mean(slope, sample)
    return slope.to(log_ratio_M.dtype), loss.to(log_ratio_M.dtype)


def sequence_cut(
    log_ratio_M: Float[Tensor, " M"],
    sample_M: Int[Tensor, " M"],
    advantage_M: Float[Tensor, " M"],
    clip_low_M: Float[Tensor, " M"],
    clip_high_M: Float[Tensor, " M"],
    kind: Literal["sequence", "mixed"] = "sequence",
) -> Float[Tensor, " M"]:
    """How much of each row's ratio is beyond its range, in the direction of its advantage; arguments as above.

    Returns [M]: 1 where the ratio of its trajectory is; of "mixed" half each for that and for the ratio of the step.
    """
    _, sample = sample_M.unique(return_inverse=True)
    steps, ranges = log_ratio_M.detach().double(), {"clip_low": clip_low_M.double(), "clip_high": clip_high_M.double()}
    advantage = advantage_M.double()
    whole = clipped(_sample_mean(steps, sample), advantage, **ranges).double()
    return whole if kind == "sequence" else 0.5 * whole + 0.5 * clipped(steps, advantage, **ranges)


def _clip(log_ratio: Tensor, advantage: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Clipped surrogate and its derivative by the log-ratio."""
    loss, ratio = clipped_surrogate(log_ratio, advantage, clip_low=low, clip_high=high), log_ratio.exp()
    inside = torch.where(advantage > 0, ratio <= 1 + high, ratio >= 1 - low)
    return loss, torch.where(inside, -advantage * ratio, torch.zeros_like(ratio))


def _sample_mean(values: Tensor, sample: Tensor) -> Tensor:
    """Mean over the rows of each sample, at each row; samples are numbered from 0."""
    size = int(sample.max()) + 1 if len(sample) else 0
    total = values.new_zeros(size).index_add(0, sample, values)
    count = values.new_zeros(size).index_add(0, sample, torch.ones_like(values))
    return (total / count)[sample]
