"""Calibration of rewards before anything is normalised: raw reward in, raw reward out.

Maps of one reward are listed in `MAPS`, each a frozen dataclass of its options; `log_tame` looks at several rewards at
once. A reward that is missing (NaN) stays so. Arithmetic is in float64, the result in the rewards' dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.runtime.shapes import Float


@dataclass(frozen=True, kw_only=True, slots=True)
class Logistic:
    """Bring rewards of different sources to one scale: `1 / (1 + exp(-k (r - p50) / (p75 - p25)))`.

    MedGRPO (arXiv 2512.06581). The median of the source becomes 1/2; far from it the map is flat and teaches little.
    Take the percentiles once for each source of prompts, from samples of the untrained model: percentiles that follow
    training would take its gains away again.
    """

    p25: float
    """25th percentile of the source's rewards."""
    p50: float
    """Their median."""
    p75: float
    """75th percentile, greater than p25."""
    k: float = 3.0
    """Steepness, positive."""

    def __post_init__(self) -> None:
        if not (self.p25 <= self.p50 <= self.p75 and self.p25 < self.p75):
            raise ValueError(
                f"percentiles must ascend with p25 < p75, got {self.p25}, {self.p50}, {self.p75}: a source whose "
                "middle half scores the same cannot be calibrated this way"
            )
        if not self.k > 0:
            raise ValueError(f"k is a steepness and must be positive, got {self.k}: MedGRPO takes 3")

    def __call__(self, reward: Float[Tensor, " *shape"]) -> Float[Tensor, " *shape"]:
        """The mapped rewards."""
        return torch.sigmoid(self.k * (reward.double() - self.p50) / (self.p75 - self.p25)).to(reward.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardCorrected:
    """Undo a verifier's known errors on average: `(R - rho0) / (1 - rho0 - rho1)`.

    With rho0 = P(1 seen | 0 true) and rho1 = P(0 seen | 1 true) its expectation is the true reward (arXiv 2510.00915).
    The map is affine: division by the std of a set cancels it. It acts only without division, or if rewards are mixed
    before they are normalised. Neither rate may depend on what the image shows.
    """

    false_positive: float
    """rho0, in [0, 1)."""
    false_negative: float
    """rho1, likewise; rho0 + rho1 < 1."""

    def __post_init__(self) -> None:
        _check_rates(false_positive=self.false_positive, false_negative=self.false_negative)
        if not self.false_positive + self.false_negative < 1:
            raise ValueError(
                f"false_positive + false_negative must stay below 1, got {self.false_positive + self.false_negative:g}:"
                " such a verdict says nothing about the truth"
            )

    def __call__(self, reward: Float[Tensor, " *shape"]) -> Float[Tensor, " *shape"]:
        """The mapped verdicts, 0 or 1. Raises ValueError: a reward is not a verdict."""
        _check_verdicts(reward)
        informative = 1 - self.false_positive - self.false_negative
        return ((reward.double() - self.false_positive) / informative).to(reward.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardWeights:
    """Weights of a verifier's verdicts that need its false negatives only: rho1 for a 1, rho1 - 1 for a 0.

    The expected weight is 0 where the truth is 1 and -(1 - rho0 - rho1) where it is 0, so that the expected update is
    the clean one times 1 - rho0 - rho1 (the forward correction of arXiv 2510.00915, re-derived). Affine in the verdict;
    `BackwardCorrected` says what cancels it.
    """

    false_negative: float
    """rho1 = P(0 seen | 1 true), in [0, 1)."""

    def __post_init__(self) -> None:
        _check_rates(false_negative=self.false_negative)

    def __call__(self, reward: Float[Tensor, " *shape"]) -> Float[Tensor, " *shape"]:
        """The weights of verdicts, 0 or 1. Raises ValueError: a reward is not a verdict."""
        _check_verdicts(reward)
        return (reward.double() + self.false_negative - 1).to(reward.dtype)


def _check_rates(**rates: float) -> None:
    for name, rate in rates.items():
        if not 0 <= rate < 1:
            raise ValueError(f"{name} is a probability in [0, 1), got {rate:g}")


def _check_verdicts(reward: Tensor) -> None:
    if not bool((reward.isnan() | (reward == 0) | (reward == 1)).all()):
        raise ValueError("a noisy verifier's rewards are verdicts, 0 or 1 (NaN where it gave none): got other values")


MAPS: dict[str, type[Any]] = {
    "logistic": Logistic,
    "backward_corrected": BackwardCorrected,
    "forward_weights": ForwardWeights,
}


def log_tame(raw_KM: Float[Tensor, " K M"]) -> Float[Tensor, " K M"]:
    """Replace rewards that spread too much for their mean by log(1 + R) (PaCo-GRPO, arXiv 2512.04784).

    `h_k = std(R_k) / mean(R_k)` over all rows, population std; channel k is replaced if h_k exceeds the mean of all
    h_k, so that one channel at least is tamed unless they are equal. A constant channel has h = 0. NaN takes no part.
    Raises ValueError: a channel that varies has a mean of 0 or less; one to be tamed a value of -1 or less.
    """
    value, valid = raw_KM.double(), ~raw_KM.isnan()
    count = valid.sum(1, keepdim=True).clamp(min=1)
    mean = torch.where(valid, value, 0.0).sum(1, keepdim=True) / count
    std = (torch.where(valid, value - mean, 0.0).square().sum(1, keepdim=True) / count).sqrt()
    varies = ((value != value.nan_to_num(-torch.inf).amax(1, keepdim=True)) & valid).any(1, keepdim=True)
    if bool((varies & ~(mean > 0)).any()):
        raise ValueError(
            f"log_tame divides by the mean of every reward, which must be positive, got {mean.flatten().tolist()}: "
            "shift those that are not, or aggregate otherwise"
        )
    h = torch.where(varies, std / mean, 0.0)
    tame = h > float(h.mean())
    if bool((tame & (value <= -1)).any()):
        raise ValueError("log_tame takes log(1 + R), so rewards it tames must be greater than -1")
    return torch.where(tame, value.log1p(), value).to(raw_KM.dtype)
