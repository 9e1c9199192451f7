"""Losses that compare images with one another: pairs (DPO, D3PO), and the groups of forward losses (DGPO, CRD, RWR).

Losses are unreduced and to be minimised, errors are means over the elements of a sample, sums are taken in float64.
Letters: b images, p pairs, K images of a group.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

from flowrl.objectives.terms import mean_squared_error
from flowrl.runtime.placement import widened
from flowrl.runtime.shapes import Bool, Float, Int
from flowrl.trajectory import check_columns

PairLoss = tuple[Tensor, dict[str, Tensor]]


def pairs_of_groups(
    value: Float[Tensor, " b"], group: Int[Tensor, " b"], *, valid: Bool[Tensor, " b"] | None = None
) -> tuple[Int[Tensor, " p"], Int[Tensor, " p"]]:
    """The best and the worst image of every group, as indexes. Groups [b] come in any order; only `valid` images [b]
    may be chosen, all if None. Returns winner [p] and loser [p], ordered by group number. Groups whose valid values are
    all equal, or with fewer than two, have none: a pair without a difference is noise. Among equals the first is taken.
    Raises ValueError: shapes differ, or a valid value is not finite."""
    check_columns(value=value, group=group)
    usable = torch.ones_like(value, dtype=torch.bool) if valid is None else valid
    if usable.shape != value.shape or not bool(value[usable].isfinite().all()):
        raise ValueError("values must be finite: mark images whose reward failed with valid [b]")
    winner, loser = [], []
    for number in group[usable].unique().tolist():
        members = ((group == number) & usable).nonzero().flatten()
        scores = value[members].tolist()
        best, worst = scores.index(max(scores)), scores.index(min(scores))
        if scores[best] > scores[worst]:
            winner.append(int(members[best]))
            loser.append(int(members[worst]))
    device = value.device
    return torch.tensor(winner, dtype=torch.long, device=device), torch.tensor(loser, dtype=torch.long, device=device)


def preference_loss(
    score: Float[Tensor, " b"], winner: Int[Tensor, " p"], loser: Int[Tensor, " p"], *, dtype: torch.dtype
) -> PairLoss:
    """Bradley-Terry loss `-log sigmoid(z)`, `z = score[winner] - score[loser]` (DPO, arXiv 2305.18290). Scores [b] are
    implicit rewards, with their graph. Returns the loss [p], and metrics margin (z), accuracy (1 where z > 0),
    winner_reward, loser_reward [p]."""
    check_columns(winner=winner, loser=loser)
    wide = widened(score)
    margin = wide[winner] - wide[loser]
    metrics = {"margin": margin, "accuracy": margin > 0, "winner_reward": wide[winner], "loser_reward": wide[loser]}
    return softplus(-margin).to(dtype), {name: value.detach().to(dtype) for name, value in metrics.items()}


def diffusion_dpo(
    prediction: Float[Tensor, " b *latent"],
    reference: Float[Tensor, " b *latent"],
    target: Float[Tensor, " b *latent"],
    winner: Int[Tensor, " p"],
    loser: Int[Tensor, " p"],
    *,
    beta: float,
) -> PairLoss:
    """Diffusion-DPO: the policy learns to predict the better image better (Wallace et al., arXiv 2311.12908, eq. 14).

        z = -(beta / 2) [(e_w - eref_w) - (e_l - eref_l)],  loss = -log sigmoid(z)

    with e and eref the mean squared errors of policy and reference: of the noise for SD1.5 and SDXL, of the velocity
    for flow models. Both images of a pair share sigma and noise. beta is for means, so a published beta that multiplies
    summed errors is that many times larger; it stands for the paper's `beta T omega`.

    Args:
        prediction: [b, *latent] of the policy, with its graph.
        reference: [b, *latent] of the frozen policy at the same latents.
        target: [b, *latent] noise, or noise - clean.
        winner, loser: [p] indexes into the batch (`pairs_of_groups`).
        beta: Positive; 100 to 5000 in use.

    Returns the loss [p], and the metrics of `preference_loss`; the rewards are `-(beta / 2) (e - eref)`.
    """
    if not beta > 0:
        raise ValueError(f"beta of dpo must be positive, got {beta}: 100 to 5000 are usual for mean squared errors")
    error = mean_squared_error(prediction, target) - mean_squared_error(reference.detach(), target)
    return preference_loss(
        -0.5 * beta * error, winner, loser, dtype=torch.promote_types(prediction.dtype, torch.float32)
    )


def d3po(
    log_ratio: Float[Tensor, " b"],
    winner: Int[Tensor, " p"],
    loser: Int[Tensor, " p"],
    *,
    beta: float = 0.1,
    clip: float | None = 0.1,
) -> PairLoss:
    """D3PO: DPO at one denoising step of two chains (Yang et al., arXiv 2311.13231).

        z = beta [log q_w - log q_l],  q = clip(exp(log_ratio), 1 - clip, 1 + clip),  loss = -log sigmoid(z)

    Args:
        log_ratio: [b] log-density of the stored transition under the policy minus that under the frozen reference, mean
            over dimensions as published.
        clip: Distance below 1 at which the ratio is held, without gradient beyond; None for no clipping.

    Returns the loss [p], and the metrics of `preference_loss`.
    """
    if not beta > 0 or (clip is not None and not 0 <= clip < 1):
        raise ValueError(f"d3po needs beta > 0 and clip None or in [0, 1), got {beta} and {clip}")
    held = widened(log_ratio)
    if clip is not None:
        held = held.clamp(math.log1p(-clip), math.log1p(clip))
    return preference_loss(beta * held, winner, loser, dtype=torch.promote_types(log_ratio.dtype, torch.float32))


def group_gate(
    error: Float[Tensor, " b"],
    reference_error: Float[Tensor, " b"],
    advantage: Float[Tensor, " b"],
    group: Int[Tensor, " b"],
    *,
    beta: float,
) -> Float[Tensor, " b"]:
    """DGPO's gate of each image's group, `sigmoid(S)` with `S = (beta / K) sum_i A_i (d_i - dref_i)`, detached.

    d are mean squared errors of the velocity. Where a group does not fit into one call with gradient, find the errors
    of all its images without first.
    """
    check_columns(error=error, reference_error=reference_error, advantage=advantage, group=group)
    value = widened(advantage) * (widened(error.detach()) - widened(reference_error))
    return torch.sigmoid(beta * _group_weights(group) @ value)


def centred_distillation(
    implicit: Float[Tensor, " b"],
    target: Float[Tensor, " b"],
    group: Int[Tensor, " b"],
    *,
    beta: float,
    loss: Literal["square", "cross_entropy"] = "square",
    temperature: float | None = None,
) -> Float[Tensor, " b"]:
    """Squared distance of implicit and real reward, each about its group's centre (CRD, arXiv 2603.14128).

        (beta (rho_i - sg[sum_j w_j rho_j]) - (r_i - sum_j w_j r_j))^2

    or the cross-entropy of the first difference, as a logit, with the sigmoid of the second. w is uniform over the
    group; with a temperature the loss is the mean of two, one about the centre with `w = softmax(r / temperature)` and
    one with `softmax(-r / temperature)`. Without a temperature, adding a number to all rho or all r of a group changes
    nothing. The published code's temperature 0 centres by the sign of r, which lies in [0, 1] there and has none; it is
    not offered. It centres within a `group` [b], where the published code centres whatever is in the micro-batch; the
    temperature is positive, or None.
    """
    check_columns(implicit=implicit, target=target, group=group)
    if temperature is not None and not temperature > 0:
        raise ValueError(f"temperature of crd must be above 0, got {temperature:g}; null centres evenly")
    if loss not in ("square", "cross_entropy"):
        raise ValueError(f"loss of crd is square or cross_entropy, got {loss!r}")
    rho, r = widened(implicit), widened(target.detach())
    losses = []
    for sign in (1,) if temperature is None else (1, -1):
        weight = _group_weights(group, None if temperature is None else sign * r / temperature)
        score, wanted = beta * (rho - weight @ rho.detach()), r - weight @ r
        if loss == "square":
            losses.append((score - wanted).square())
        else:
            losses.append(binary_cross_entropy_with_logits(score, wanted.sigmoid(), reduction="none"))
    return torch.stack(losses).mean(0)


def reward_weights(
    reward: Float[Tensor, " b"],
    group: Int[Tensor, " b"],
    *,
    weights: Literal["raw", "softmax"] = "softmax",
    temperature: float = 1.0,
) -> Float[Tensor, " b"]:
    """Weight of each image in reward-weighted regression.

    raw: the reward itself (released Flow-GRPO code), which must not be negative. softmax: `K exp(r / temperature) / Z`
    over the K images of the group (Peters and Schaal 2007), with mean 1. Raises ValueError: a raw reward is negative,
    or weights is unknown.
    """
    check_columns(reward=reward, group=group)
    if weights not in ("raw", "softmax"):
        raise ValueError(f"weights is raw or softmax, got {weights!r}")
    if weights == "softmax":
        shared = _group_weights(group, widened(reward) / temperature)
        return (shared.diagonal() * _same_group(group).sum(1)).to(reward.dtype)
    if bool((reward < 0).any()):
        raise ValueError(f"raw weights push away from nothing: rewards must be >= 0, got {float(reward.min())}")
    return reward


def best_of_group(reward: Float[Tensor, " b"], group: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """1 for every image whose reward is the highest of its group, ties included, else 0."""
    check_columns(reward=reward, group=group)
    highest = torch.where(_same_group(group), reward, -torch.inf).amax(1)
    return (reward == highest).to(reward.dtype)


def _same_group(group: Tensor) -> Bool[Tensor, " b b"]:
    return group[:, None] == group[None, :]


def _group_weights(group: Tensor, logit: Tensor | None = None) -> Tensor:
    """[b, b] float64: row i holds the weights of the members of i's group, which add up to 1, and 0 for others.

    Uniform without logits, softmax(logit) with them.
    """
    same = _same_group(group)
    if logit is not None:
        return torch.softmax(torch.where(same, logit[None, :], -math.inf), 1)
    return widened(same) / same.sum(1, keepdim=True)
