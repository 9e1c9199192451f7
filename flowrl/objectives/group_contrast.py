"""GCPO: training a reward model that reasons, on preference pairs, by contrast between two groups of its own scores.

For a pair in which x_w is preferred to x_l the model draws N reasoning traces for each image; each trace ends in a
score. A trace is rewarded by how often its score is on the right side of the other image's scores (Edit-R1 with a
reasoning verifier, arXiv 2604.27505):

    r^w_j = mean_k [tau^w_j > tau^l_k]        r^l_j = mean_k [tau^l_j < tau^w_k]

Rewards are standardised within the winner's traces and within the loser's, separately; the clipped surrogate
(`flowrl.objectives.terms.clipped_surrogate`) is then averaged over all 2N traces.

Letters: P pairs, N traces of each winner, M of each loser, usually M = N. NaN marks a trace without a score.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def contrast_rewards(
    winner_PN: Float[Tensor, " P N"], loser_PM: Float[Tensor, " P M"]
) -> tuple[Float[Tensor, " P N"], Float[Tensor, " P M"]]:
    """How often each trace ranks the pair rightly against the other side's traces, in [0, 1]; equal scores are wrong.

    Traces without a score are left out of the counts and get NaN, as do all traces of a side whose other side has none.

    Args:
        winner_PN: scores of the preferred image's traces.
        loser_PM: scores of the other image's traces.

    Raises:
        ValueError: if the shapes do not fit, or a score is infinite.
    """
    _check(winner_PN, loser_PM)
    right = (winner_PN.double()[:, :, None] > loser_PM.double()[:, None, :]).double()  # NaN compares false
    has_w, has_l = ~winner_PN.isnan(), ~loser_PM.isnan()
    winner = torch.where(has_w, right.sum(2) / has_l.sum(1, keepdim=True), torch.nan)  # 0 / 0 is NaN
    loser = torch.where(has_l, right.sum(1) / has_w.sum(1, keepdim=True), torch.nan)
    return winner.to(winner_PN.dtype), loser.to(loser_PM.dtype)


def contrast_advantages(
    winner_PN: Float[Tensor, " P N"], loser_PM: Float[Tensor, " P M"], *, eps: float = 1e-4, correction: int = 0
) -> tuple[Float[Tensor, " P N"], Float[Tensor, " P M"]]:
    """Rewards of both sides, each standardised within its own row: `(r - mean) / (std + eps)`.

    Pooled, the two sides would share a mean that tells nothing about a trace. A row whose rewards are all equal gets 0,
    and so does a trace without a reward.

    Args:
        winner_PN: scores of the preferred image's traces.
        loser_PM: scores of the other image's traces.
        eps: added to the standard deviation.
        correction: 0 for the population's standard deviation, 1 for the unbiased one.

    Raises:
        ValueError: as `contrast_rewards`, or for another correction or a negative eps.
    """
    if correction not in (0, 1) or not eps >= 0:
        raise ValueError(f"correction must be 0 or 1 and eps at least 0, got {correction!r} and {eps!r}.")
    winner, loser = contrast_rewards(winner_PN, loser_PM)
    return _standardised(winner, eps, correction), _standardised(loser, eps, correction)


def _standardised(reward: Float[Tensor, " P n"], eps: float, correction: int) -> Float[Tensor, " P n"]:
    valid: Bool[Tensor, " P n"] = ~reward.isnan()
    value = torch.where(valid, reward.double(), 0.0)
    count = valid.sum(1, keepdim=True)
    centred = torch.where(valid, value - value.sum(1, keepdim=True) / count.clamp(min=1), 0.0)
    std = (centred.square().sum(1, keepdim=True) / (count - correction).clamp(min=1)).sqrt()
    highest = torch.where(valid, value, -torch.inf).amax(1, keepdim=True)
    lowest = torch.where(valid, value, torch.inf).amin(1, keepdim=True)
    # Decided by the rewards themselves: rounding of the mean leaves equal ones with a std just above 0.
    return torch.where(highest > lowest, centred / (std + eps), 0.0).to(reward.dtype)


def _check(winner: Tensor, loser: Tensor) -> None:
    fit = winner.ndim == loser.ndim == 2 and winner.shape[0] == loser.shape[0] and min(*winner.shape, *loser.shape) > 0
    if not fit or not winner.is_floating_point() or not loser.is_floating_point():
        raise ValueError(
            f"scores must be float [P, N] and [P, M] with one row a pair, got {winner.dtype} {tuple(winner.shape)} and "
            f"{loser.dtype} {tuple(loser.shape)}."
        )
    if bool(winner.isinf().any() or loser.isinf().any()):
        raise ValueError("a score is infinite: mark traces without a score as NaN, and cut scores to their range.")
