"""Credit of trees: rewards of leaves carried up to the transitions that lead to them (BranchGRPO, TreeGRPO).

Letters: K rewards, M transitions, F leaves. A transition and the node it leads to share their value. Small tables of
numbers: computed in float64 on the CPU, returned on the device and in the dtype of the rewards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.credit.values import ALONE, Context, check_rewards, norm_within
from flowrl.runtime.shapes import Bool, Float, Int
from flowrl.trajectory import Credit, Sampled

Width = Literal["better_half", "extremes"]


def _check(sampled: Sampled) -> None:
    ends = sampled.finished_after
    if len(ends) == 0 or bool((ends < 0).any()) or len(ends.unique()) != len(ends):
        raise ValueError(
            "credit of trees needs leaves that each end a path of their own, as sample_tree leaves them, got finished "
            f"latents after transitions {ends.tolist()}"
        )


def _at_leaves(sampled: Sampled, reward_KF: Tensor) -> Float[Tensor, " K M"]:
    """Rewards at the transitions that end in a leaf, NaN at the others; checked."""
    _check(sampled)
    check_rewards(sampled, reward_KF)
    raw = torch.full((len(reward_KF), len(sampled)), torch.nan, dtype=reward_KF.dtype, device=reward_KF.device)
    raw[:, sampled.finished_after.to(raw.device)] = reward_KF
    return raw


def _carry_up(sampled: Sampled, leaf_KM: Tensor, edge_logit_M: Tensor, *, whole_paths: bool) -> Float[Tensor, " K M"]:
    """Value of every transition: the weighted mean over the transitions that follow it, from the leaves up.

    The weight of a child is exp(its edge's logit), times the summed weight of the paths below it for `whole_paths`.
    NaN leaves have no weight; a transition without a valid leaf is NaN.
    """
    value = leaf_KM.double().cpu().clone()
    step, parent, edge_logit = sampled.step.cpu(), sampled.parent.cpu(), edge_logit_M.double().cpu()
    log_mass = torch.where(value.isnan(), -torch.inf, 0.0).double()  # of the paths below, of nothing where NaN
    for level in step.unique().flip(0).tolist():
        child = torch.nonzero((step == level) & (parent >= 0)).flatten()
        if len(child) == 0:
            continue
        above, place = parent[child].unique(return_inverse=True)
        index, empty = place.expand(len(value), -1), torch.full((len(value), len(above)), -torch.inf).double()
        logit = edge_logit[child] + log_mass[:, child]
        valid = logit > -torch.inf
        top = empty.scatter_reduce(1, index, logit, "amax")
        weight = torch.where(valid, (logit - top.gather(1, index)).exp(), 0.0)
        # Means are taken as offsets from the best child, so that equal children give exactly their value.
        best = empty.scatter_reduce(1, index, torch.where(valid, value[:, child], -torch.inf), "amax")
        offset = torch.where(valid, value[:, child] - best.gather(1, index), 0.0)
        total = torch.zeros_like(empty).scatter_add(1, index, weight)
        mean = best + torch.zeros_like(empty).scatter_add(1, index, weight * offset) / total
        value[:, above] = torch.where(total > 0, mean, torch.nan)
        mass = top + total.log() if whole_paths else torch.zeros_like(total)
        log_mass[:, above] = torch.where(total > 0, mass, -torch.inf)
    return value


def tree_of(sampled: Sampled) -> Int[Tensor, " M"]:
    """A number for the tree of each transition: the pool index of the latent at which its first transitions start."""
    root, parent = sampled.source.tolist(), sampled.parent.tolist()
    for row in torch.argsort(sampled.step, stable=True).tolist():  # parents come first
        if parent[row] >= 0:
            root[row] = root[parent[row]]
    return torch.tensor(root, device=sampled.source.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthWindow:
    """Depths that BranchGRPO leaves out of the update: a window that slides over the run, then stays.

    It starts at depth `first` and moves by one every `every` iterations until it starts at `last`. The paper moves it
    from the last split towards later steps, the release from late steps towards the last split. Depth is step + 1.
    """

    first: int
    """Depth at which it starts at first."""
    last: int
    """Depth at which it starts in the end."""
    size: int = 4
    """Depths that it covers."""
    every: int = 30
    """Iterations before it moves by one."""

    def __post_init__(self) -> None:
        if min(self.first, self.last, self.size, self.every) < 1:
            raise ValueError(
                "first, last, size and every of a depth window are at least 1 (depth 1 is the first step's), got "
                f"{self.first}, {self.last}, {self.size} and {self.every}"
            )

    def depths(self, iteration: int) -> range:
        """The depths of an iteration."""
        moved = min(iteration // self.every, abs(self.last - self.first))
        start = self.first + moved if self.last >= self.first else self.first - moved
        return range(start, start + self.size)


@dataclass(frozen=True, kw_only=True, slots=True)
class BranchGrpo:
    """Credit of BranchGRPO (arXiv 2509.06040): a transition is worth the weighted mean of the leaves below it.

    | weighting | weights |
    |---|---|
    | uniform | the same for every leaf |
    | path | the paper's: softmax over the leaves below a node of beta * log-density of the path from it |
    | edge | the release's option: softmax over a node's children of the log-density of their edge, level by level |

    Normalise per tree and depth; the release takes the sample std (correction 1, eps 1e-8, min_std 1e-6), so that a
    depth of one node or of equal nodes gets 0, and clips to +-5. In a depth of two nodes advantages are +-0.7071.
    """

    weighting: Literal["uniform", "path", "edge"] = "uniform"
    """See above."""
    beta: float = 1.0
    """Sharpness of "path"; 0 is uniform."""
    pruned_depths: tuple[int, ...] = ()
    """Depths that are never trained; depth = step + 1."""
    depth_window: DepthWindow | None = None
    """Depths that are not trained for a while: `{first: 9, last: 12, size: 4, every: 30}`."""
    pruned_width: Width | None = None
    """Leaves that are not trained, see `kept_by_width`, by the sum of their rewards."""

    def __post_init__(self) -> None:
        if not self.beta >= 0:
            raise ValueError(f"beta must not be negative, got {self.beta}")

    def pruned(self, iteration: int) -> frozenset[int]:
        """Depths that are not trained in an iteration."""
        sliding = () if self.depth_window is None else self.depth_window.depths(iteration)
        return frozenset({*self.pruned_depths, *sliding})

    def __call__(self, sampled: Sampled, reward_KF: Float[Tensor, " K F"], context: Context = ALONE) -> Credit:
        """Credit of trees (`sample_tree`): raw [K, M], NaN above invalid leaves alone; norm by (group, tree, step).
        Raises ValueError: the table is not one of trees, or the rewards do not fit it."""
        factor = {"uniform": 0.0, "path": self.beta, "edge": 1.0}[self.weighting] / context.per_dim
        logit = sampled.log_prob.double() * factor
        value = _carry_up(sampled, _at_leaves(sampled, reward_KF), logit, whole_paths=self.weighting != "edge")
        raw = value.to(device=reward_KF.device, dtype=reward_KF.dtype)
        pruned = torch.tensor(sorted(self.pruned(context.iteration)), device=sampled.step.device)
        keep = ~torch.isin(sampled.step + 1, pruned) if len(pruned) else None
        if self.pruned_width is not None:
            kept = kept_by_width(sampled, raw.sum(0), self.pruned_width)
            keep = kept if keep is None else keep & kept
        within = tree_of(sampled) * (sampled.step.max() + 1) + sampled.step
        return Credit(raw=raw, norm=norm_within(sampled, within), keep=keep)


def kept_by_width(sampled: Sampled, value_M: Float[Tensor, " M"], rule: Width) -> Bool[Tensor, " M"]:
    """Transitions left by BranchGRPO's width pruning: paths of single leaves are dropped from the last split on.

    "better_half" keeps the better half of the children of each node of the last split (rounded up), "extremes" the best
    and the worst quarter of each tree's leaves (at least one each). Leaves without a value are dropped, of equal ones
    the first is kept. Transitions shared by several leaves stay.

    Args:
        value_M: [M] rewards or advantages that leaves are ranked by, read at the transitions that end in a leaf.
        rule: "better_half" or "extremes".

    Raises ValueError: the table is not one of trees, value_M is not [M], or the rule is unknown.
    """
    _check(sampled)
    if value_M.shape != sampled.step.shape or rule not in ("better_half", "extremes"):
        raise ValueError(
            f"value_M must be [{len(sampled)}] and rule better_half or extremes, got {tuple(value_M.shape)}, {rule!r}"
        )
    trees, value, ends = tree_of(sampled).tolist(), value_M.tolist(), sampled.finished_after.tolist()
    own, source = sampled.sample.tolist(), sampled.source.tolist()
    stem = {leaf: row for row, leaf in sorted(enumerate(own), reverse=True) if leaf >= 0}  # first transition of a leaf
    rivals: dict[int, list[int]] = {}
    for leaf, end in enumerate(ends):
        rivals.setdefault(source[stem[leaf]] if rule == "better_half" else trees[end], []).append(leaf)
    kept = {-1}
    for leaves in rivals.values():
        valid = [leaf for leaf in leaves if value[ends[leaf]] == value[ends[leaf]]]
        ranked = sorted(valid, key=lambda leaf: -value[ends[leaf]])
        quarter = max(1, len(ranked) // 4)
        kept |= set(ranked[: (len(ranked) + 1) // 2] if rule == "better_half" else ranked[:quarter] + ranked[-quarter:])
    return torch.tensor([leaf in kept for leaf in own], device=sampled.step.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeGrpo:
    """Credit of TreeGRPO (OpenReview 3rZdp4TmUb), first half: leaves are normalised over their prompt.

    The other transitions are NaN and take no part; `back_up` gives them their value after normalisation. Which std and
    eps the paper takes is not established.
    """

    def __call__(self, sampled: Sampled, reward_KF: Float[Tensor, " K F"], context: Context = ALONE) -> Credit:
        """Credit of trees (`sample_tree`): raw [K, M], NaN but at the last transition of each leaf; norm by group.
        Raises ValueError: the table is not one of trees, or the rewards do not fit it."""
        return Credit(raw=_at_leaves(sampled, reward_KF), norm=sampled.group.clone())


def back_up(sampled: Sampled, advantage_M: Float[Tensor, " M"], *, per_dim: int = 1) -> Float[Tensor, " M"]:
    """Advantages of TreeGRPO's inner transitions, from those of the leaves; not normalised again.

    `A(edge to u) = sum_c softmax_c(log p(edge to c)) A(edge to c)` over the children c of u. Summed over a real latent,
    log-densities differ by hundreds and the softmax picks one child; published code takes their means, see per_dim.
    Averaging makes the advantages of upper transitions smaller.

    Args:
        advantage_M: [M], read at the transitions that end in a leaf; NaN if a leaf has no valid reward.

    Returns [M]; NaN if no valid leaf follows. Raises ValueError: not a table of trees, or advantages not [M].
    """
    if advantage_M.shape != sampled.step.shape:
        raise ValueError(f"advantages must be [{len(sampled)}], one per transition, got {tuple(advantage_M.shape)}")
    leaves = _at_leaves(sampled, advantage_M[sampled.finished_after.to(advantage_M.device)][None])
    value = _carry_up(sampled, leaves, sampled.log_prob.double() / per_dim, whole_paths=False)[0]
    return value.to(device=advantage_M.device, dtype=advantage_M.dtype)
