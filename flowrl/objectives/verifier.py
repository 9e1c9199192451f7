"""Losses of a judge that learns: the weighted likelihood of its texts, and GCPO of the verdicts that it samples.

Letters: b answers of at most l tokens, of which a mask says which there are; n pairs of images, N traces of either.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.advantages.normalise import group_advantages
from flowrl.objectives.terms import approx_kl, clipped_surrogate
from flowrl.runtime.shapes import Bool, Float


def weighted_likelihood(
    log_prob: Float[Tensor, " b l"], mask: Bool[Tensor, " b l"], first_weight: float | None
) -> Float[Tensor, " b"]:
    """`-(a log p(y_0) + (1 - a) / (n - 1) sum_{i>=1} log p(y_i))` of an answer's n tokens, the first its verdict.

    PaCo-Reward (arXiv 2512.04784) with a = 0.1; a = None is the plain mean. One token alone has all the weight. The
    released trainer (X-GenGroup/PaCo-RL at 08caac6) divides the first weight by n, and weighs answers by n.
    """
    count = mask.sum(dim=1)
    if first_weight is None:
        return -(log_prob * mask).sum(dim=1) / count
    rest = (log_prob * mask)[:, 1:].sum(dim=1) / (count - 1).clamp(min=1)
    return -torch.where(count > 1, first_weight * log_prob[:, 0] + (1 - first_weight) * rest, log_prob[:, 0])


def contrast_rewards(
    winner: Float[Tensor, " n N"], loser: Float[Tensor, " n N"]
) -> tuple[Float[Tensor, " n N"], Float[Tensor, " n N"]]:
    """GCPO's rewards of the scores that the traces of either image end with (Edit-R1, arXiv 2604.27505).

    `r^w_j = mean_k 1[t^w_j > t^l_k]` and `r^l_j = mean_k 1[t^l_j < t^w_k]`: how many traces of the other image a trace
    is ordered rightly against. Equal scores are 0 on both sides. A score NaN, of a trace without one, has no order.
    """
    above = (winner[:, :, None] > loser[:, None, :]).to(winner.dtype)
    return above.mean(dim=2), above.mean(dim=1)


def contrast_advantages(winner: Float[Tensor, " n N"], loser: Float[Tensor, " n N"]) -> Float[Tensor, " n 2 N"]:
    """Rewards of `contrast_rewards`, standardised among the traces of one image: winners' first, then losers'."""
    rewards = torch.stack(contrast_rewards(winner, loser), dim=1)
    return group_advantages(rewards.flatten(), rewards.shape[2]).view_as(rewards)


def gcpo_loss(
    log_prob: Float[Tensor, " b l"],
    old_log_prob: Float[Tensor, " b l"],
    mask: Bool[Tensor, " b l"],
    advantage: Float[Tensor, " b"],
    *,
    clip_range: float,
    reference: Float[Tensor, " b l"] | None = None,
    kl_coef: float = 0.0,
) -> Float[Tensor, " b"]:
    """Loss of each trace, the mean over its tokens of the clipped surrogate and `kl_coef (e^d - 1 - d)`.

    d is the reference's log-probability minus the trained one's. The range, the weight of the KL and its form are not
    known of Edit-R1, so the last two are a reconstruction.
    """
    rows = advantage[:, None].expand_as(log_prob).flatten()
    ratio = torch.where(mask, log_prob - old_log_prob, 0.0).flatten()
    loss = clipped_surrogate(ratio, rows, clip_low=clip_range, clip_high=clip_range).view_as(log_prob)
    if reference is not None:
        loss = loss + kl_coef * approx_kl(torch.where(mask, reference - log_prob, 0.0).flatten()).view_as(loss)
    return (loss * mask).sum(dim=1) / mask.sum(dim=1)
