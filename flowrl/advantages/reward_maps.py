"""Calibration of rewards before anything is normalised: raw reward in, raw reward out.

Maps of one reward are listed in `MAPS`; `log_tame` looks at several at once. A reward that is missing (NaN) stays so.
Arithmetic is in float64, the result in the rewards' dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

Rate = float | Tensor


def percentiles(reward_B: Float[Tensor, " B"]) -> tuple[float, float, float]:
    """The 25th, 50th and 75th percentile of one source's rewards, linear between neighbours, NaN left out.

    Take them once a source of prompts from samples of the untrained model, and keep them: percentiles that follow
    training would take its gains away again.

    Raises:
        ValueError: no reward is valid.
    """
    value = reward_B[~reward_B.isnan()].double()
    if len(value) == 0:
        raise ValueError("percentiles need at least one valid reward, got none")
    low, median, high = torch.quantile(value, torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64, device=value.device))
    return float(low), float(median), float(high)


def logistic(
    reward: Float[Tensor, " *shape"], *, p25: float, p50: float, p75: float, k: float = 3.0
) -> Float[Tensor, " *shape"]:
    """Bring rewards of different sources to one scale: `1 / (1 + exp(-k (r - p50) / (p75 - p25)))`.

    MedGRPO (arXiv 2512.06581). The median of the source becomes 1/2; far from it the map is flat and teaches little.

    Args:
        reward: Any shape.
        p25: 25th percentile of the source, see `percentiles`.
        p50: Its median.
        p75: Its 75th percentile, greater than p25.
        k: Steepness, positive.

    Raises:
        ValueError: the percentiles do not ascend, p25 equals p75, or k is not positive.
    """
    if not (p25 <= p50 <= p75 and p25 < p75):
        raise ValueError(
            f"percentiles must ascend with p25 < p75, got {p25}, {p50}, {p75}: a source whose middle half scores the "
            "same cannot be calibrated this way"
        )
    if not k > 0:
        raise ValueError(f"k is a steepness and must be positive, got {k}: MedGRPO takes 3")
    return torch.sigmoid(k * (reward.double() - p50) / (p75 - p25)).to(reward.dtype)


def _rate(rate: Rate, reward: Tensor, name: str) -> Tensor:
    """An error rate as float64, checked."""
    value = torch.as_tensor(rate, dtype=torch.float64, device=reward.device)
    if value.ndim and value.shape != reward.shape:
        raise ValueError(f"{name} is one number or one a reward {tuple(reward.shape)}, got {tuple(value.shape)}")
    if not bool(((value >= 0) & (value < 1)).all()):
        raise ValueError(f"{name} is a probability in [0, 1), got {value.tolist()}")
    return value


def _check_verdicts(reward: Tensor) -> None:
    if not bool((reward.isnan() | (reward == 0) | (reward == 1)).all()):
        raise ValueError("a noisy verifier's rewards are verdicts, 0 or 1 (NaN where it gave none): got other values")


def backward_corrected(
    reward: Float[Tensor, " *shape"], *, false_positive: Rate, false_negative: Rate
) -> Float[Tensor, " *shape"]:
    """Undo a verifier's known errors on average: `(R - rho0) / (1 - rho0 - rho1)`.

    With rho0 = P(1 seen | 0 true) and rho1 = P(0 seen | 1 true) its expectation is the true reward (arXiv 2510.00915).
    The map is affine: with the same rates for a whole set, division by the set's std cancels it. It acts where there is
    no division, where rates differ within a set, or where rewards are mixed before they are normalised.

    Args:
        reward: Verdicts 0 or 1, any shape.
        false_positive: rho0, one number or one a reward.
        false_negative: rho1, likewise; rho0 + rho1 < 1. Neither may depend on what the image shows.

    Raises:
        ValueError: a reward is no verdict, a rate is out of range or of another shape, or the rates add up to 1.
    """
    _check_verdicts(reward)
    rho0, rho1 = _rate(false_positive, reward, "false_positive"), _rate(false_negative, reward, "false_negative")
    informative = 1 - rho0 - rho1
    if not bool((informative > 0).all()):
        raise ValueError(
            f"false_positive + false_negative must stay below 1, got {(rho0 + rho1).tolist()}: such a verdict says "
            "nothing about the truth"
        )
    return ((reward.double() - rho0) / informative).to(reward.dtype)


def forward_weights(reward: Float[Tensor, " *shape"], *, false_negative: Rate) -> Float[Tensor, " *shape"]:
    """Weights of a verifier's verdicts that need its false negatives only: rho1 for a 1, rho1 - 1 for a 0.

    The expected weight is 0 where the truth is 1 and -(1 - rho0 - rho1) where it is 0, so that the expected update is
    the clean one times 1 - rho0 - rho1 (the forward correction of arXiv 2510.00915, re-derived). Affine in the verdict;
    what cancels it is told at `backward_corrected`.

    Args:
        reward: Verdicts 0 or 1, any shape.
        false_negative: rho1 = P(0 seen | 1 true), one number or one a reward.

    Raises:
        ValueError: a reward is no verdict, or a rate is out of range or of another shape.
    """
    _check_verdicts(reward)
    return (reward.double() + _rate(false_negative, reward, "false_negative") - 1).to(reward.dtype)


MAPS: dict[str, Callable[..., Tensor]] = {
    "logistic": logistic,
    "backward_corrected": backward_corrected,
    "forward_weights": forward_weights,
}


def log_tame(raw_KM: Float[Tensor, " K M"], *, delta: float | None = None) -> Float[Tensor, " K M"]:
    """Replace rewards that spread too much for their mean by log(1 + R) (PaCo-GRPO, arXiv 2512.04784).

    `h_k = std(R_k) / mean(R_k)` over all rows, population std; channel k is replaced if h_k > delta. With delta the
    mean of all h_k, one channel at least is tamed unless they are equal. A constant channel has h = 0.

    Args:
        raw_KM: [K, M] float; NaN takes no part.
        delta: Bound of h, or None for the mean of all h_k.

    Raises:
        ValueError: a channel that varies has a mean that is not positive; one to be tamed holds a value of -1 or less;
            delta is negative.
    """
    if delta is not None and not delta >= 0:
        raise ValueError(f"delta bounds a ratio std / mean and must not be negative, got {delta}")
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
    tame = h > (float(h.mean()) if delta is None else delta)
    if bool((tame & (value <= -1)).any()):
        raise ValueError("log_tame takes log(1 + R), so rewards it tames must be greater than -1")
    return torch.where(tame, value.log1p(), value).to(raw_KM.dtype)
