"""Trees: their table, noise and windows; credit of leaves carried up, against worked examples and brute force."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from flowrl.credit.trees import BranchGrpo, DepthWindow, TreeGrpo, back_up, kept_by_width, tree_of
from flowrl.credit.values import Context
from flowrl.runtime.randomness import counter_normal, sample_normals
from flowrl.samplers import KERNELS, Velocity, build_schedule
from flowrl.samplers.tree import sample_tree, sibling_noise, window_law, window_start
from flowrl.trajectory import Credit, Sampled

LATENT = (3,)


def velocity_of(index: Tensor) -> Velocity:
    return lambda x, sigma, timestep: 0.5 * x - index.to(x.dtype).reshape(-1, 1)


def node_noise(step: int, nodes: range) -> Tensor:
    return sample_normals(LATENT, [("node", step, node) for node in nodes])


def grow(
    num_steps: int,
    splits: Sequence[int],
    stochastic: Sequence[int],
    *,
    children: int = 2,
    trees: int = 1,
    per_prompt: int = 1,
) -> Sampled:
    index = torch.arange(trees) // per_prompt
    return sample_tree(
        velocity_of, counter_normal((trees, *LATENT), "start"), index, index + 5,
        build_schedule({"shift": 1.0}, num_steps, grid="linspace"), replace(KERNELS["dance_sde"], noise_level=0.3),
        node_noise, splits=splits, children=children, stochastic=stochastic, batch_size=4,
    )  # fmt: skip


def example(log_prob: Sequence[float] = (0.0,) * 10) -> Sampled:
    """T = 3, splits at steps 0 and 1: the tree of the worked examples, with given log-densities."""
    return replace(grow(3, (0, 1), (0, 1, 2)), log_prob=torch.tensor(log_prob, dtype=torch.float64))


def standardised(raw: Tensor, norm: Tensor, ddof: int) -> np.ndarray:
    """The first channel relative to its normalisation set, over what is not NaN."""
    values, sets = raw[0].double().numpy().copy(), norm.numpy()
    for number in np.unique(sets):
        own = values[sets == number]
        values[sets == number] = (own - np.nanmean(own)) / np.nanstd(own, ddof=ddof)
    return values


def leaves_below(sampled: Sampled) -> list[dict[int, float]]:
    """For each transition: its leaves, and the log-density of the path that follows it to each."""
    below: list[dict[int, float]] = [{} for _ in range(len(sampled))]
    for leaf, end in enumerate(sampled.finished_after.tolist()):
        row, total = end, 0.0
        while row >= 0:
            below[row][leaf] = total
            total += float(sampled.log_prob[row])
            row = int(sampled.parent[row])
    return below


# ---- the table, noise, windows ---------------------------------------------------------------------------------------


def test_table_of_a_small_tree() -> None:
    sampled = grow(3, (0, 1), (0, 1, 2))
    assert sampled.step.tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert sampled.source.tolist() == [0, 0, 1, 1, 2, 2, 3, 4, 5, 6]
    assert sampled.produced.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert sampled.parent.tolist() == [-1, -1, 0, 0, 1, 1, 2, 3, 4, 5]
    assert sampled.sample.tolist() == [-1, -1, 0, 1, 2, 3, 0, 1, 2, 3]
    assert sampled.finished_after.tolist() == [6, 7, 8, 9]
    assert torch.equal(sampled.finished, sampled.states[7:])


def test_table_of_a_tree_with_ode_steps() -> None:
    """Steps 0, 2 and 4 are ODE steps; two trees of one prompt."""
    sampled = grow(5, (1,), (1, 3), trees=2, per_prompt=2)
    assert sampled.step.tolist() == [1] * 4 + [3] * 4
    assert sampled.source.tolist() == [0, 0, 1, 1, 6, 7, 8, 9]
    assert sampled.produced.tolist() == [2, 3, 4, 5, 10, 11, 12, 13]
    assert sampled.parent.tolist() == [-1] * 4 + [0, 1, 2, 3]
    assert sampled.sample.tolist() == [0, 1, 2, 3] * 2
    assert sampled.group.tolist() == [5] * 8
    assert sampled.finished_after.tolist() == [4, 5, 6, 7]
    assert tree_of(sampled).tolist() == [0, 0, 1, 1] * 2


def test_sibling_noise_keeps_each_marginal_and_correlates_siblings() -> None:
    n, scale = 20000, 4.0

    def own(step: int, nodes: range) -> Tensor:
        return counter_normal((nodes.stop, 1), "own", step)[nodes.start :]

    def shared(step: int, nodes: range) -> Tensor:
        return counter_normal((nodes.stop, 1), "shared", step)[nodes.start :]

    mixed = sibling_noise(own, shared, splits=(2,), children=2, scale=scale)
    assert torch.equal(mixed(1, range(6)), own(1, range(6)))
    assert torch.equal(mixed(2, range(2, 6)), mixed(2, range(6))[2:])
    first, second = mixed(2, range(2 * n)).reshape(n, 2).unbind(1)
    for child in (first, second):
        assert abs(float(child.mean())) < 4 / math.sqrt(n)
        assert abs(float(child.square().mean()) - 1) < 4 * math.sqrt(2 / n)
    assert abs(float((first * second).mean()) - 1 / (1 + scale**2)) < 4 / math.sqrt(n)
    equal = sibling_noise(own, shared, splits=(2,), children=3, scale=0.0)(2, range(6))
    assert torch.equal(equal, shared(2, range(2)).repeat_interleave(3, 0))


def test_window_law_of_the_worked_example() -> None:
    wanted = [0.503937, 0.251969, 0.125984, 0.062992, 0.031496, 0.015748, 0.007874]
    np.testing.assert_allclose(window_law(10, 3, 0.5), wanted, atol=5e-7)
    assert sum(window_law(10, 3, 0.5)) == pytest.approx(1, abs=1e-12)
    assert window_law(10, 3, 1.0) == pytest.approx([1 / 7] * 7)


def test_window_start_follows_the_law_and_the_counters() -> None:
    n, law = 2000, window_law(10, 3, 0.5)
    drawn = [window_start(10, 3, 0.5, 7, iteration) for iteration in range(n)]
    assert drawn == [window_start(10, 3, 0.5, 7, iteration) for iteration in range(n)]
    assert drawn != [window_start(10, 3, 0.5, 8, iteration) for iteration in range(n)]
    count = Counter(drawn)
    for start, p in enumerate(law):
        assert abs(count[start] / n - p) < 4 * math.sqrt(p * (1 - p) / n)
    assert set(count) <= set(range(7))


def test_sampling_refuses_what_is_not_a_tree() -> None:
    for splits, stochastic, children in [((0,), (1,), 2), ((0,), (0,), 1)]:
        with pytest.raises(ValueError, match=r"splits .* must be among the stochastic steps"):
            grow(3, splits, stochastic, children=children)
    with pytest.raises(ValueError, match=r"splits must be distinct.* 0 \.\. 2"):
        grow(3, (), (0,))
    with pytest.raises(ValueError, match=r"stochastic steps must be distinct.* 0 \.\. 2"):
        grow(3, (0,), (0, 3))
    with pytest.raises(ValueError, match="negative"):
        sibling_noise(node_noise, node_noise, splits=(0,), children=2, scale=-1.0)
    for size, ratio in [(0, 0.5), (10, 0.5), (3, 0.0), (3, 1.5)]:
        with pytest.raises(ValueError, match="0 < ratio <= 1"):
            window_law(10, size, ratio)


# ---- credit ----------------------------------------------------------------------------------------------------------

LEAVES = torch.tensor([[1.0, 3.0, 2.0, 6.0]], dtype=torch.float64)
CHILDREN = (0.0, 0.0, 0.0, math.log(3), *[0.0] * 6)  # log-densities of the children of nodes a and b


def test_branch_grpo_of_the_worked_example() -> None:
    credit = BranchGrpo()(example(), LEAVES)
    assert credit.raw.tolist() == [[2, 4, 1, 3, 2, 6, 1, 3, 2, 6]]
    late = [-0.925820, 0, -0.462910, 1.388730]
    np.testing.assert_allclose(standardised(credit.raw, credit.norm, 1), [-0.707107, 0.707107, *late, *late], atol=5e-7)
    assert credit.keep is None
    for weighting in ("edge", "path"):  # equal where only the children's own transitions differ
        weighted = BranchGrpo(weighting=weighting)(example(CHILDREN), LEAVES)  # type: ignore[arg-type]
        np.testing.assert_allclose(weighted.raw[0, :2], [2.5, 4], atol=1e-12)
        z = standardised(weighted.raw, weighted.norm, 1)
        np.testing.assert_allclose(z[:2], [-0.707107, 0.707107], atol=5e-7)
    mean = BranchGrpo(weighting="edge")(example([20 * value for value in CHILDREN]), LEAVES, Context(per_dim=20))
    np.testing.assert_allclose(mean.raw[0, :2], [2.5, 4], atol=1e-12)


def test_tree_grpo_of_the_worked_example() -> None:
    sampled = example(CHILDREN)
    credit = TreeGrpo()(sampled, LEAVES)
    assert credit.raw[0, :6].isnan().all()
    leaves = [-1.069045, 0, -0.534522, 1.603567]
    z = standardised(credit.raw, credit.norm, 0)
    np.testing.assert_allclose(z[6:], leaves, atol=5e-7)
    # What normalisation leaves at inner transitions does not matter.
    advantage = torch.tensor(z).nan_to_num(99.0)
    wanted = [-0.267261, 0.534522, *leaves, *leaves]
    np.testing.assert_allclose(back_up(sampled, advantage), wanted, atol=5e-7)
    scaled = replace(sampled, log_prob=sampled.log_prob * 8)
    np.testing.assert_allclose(back_up(scaled, advantage, per_dim=8), wanted, atol=5e-7)


@pytest.mark.parametrize("seed", range(3))
def test_uniform_node_means_keep_the_mean_of_the_leaves_at_every_depth(seed: int) -> None:
    sampled = grow(6, (1, 2, 4), (1, 2, 3, 4), children=3)
    reward = counter_normal((2, 27), "reward", seed).double()
    raw = BranchGrpo()(sampled, reward).raw
    for step in (1, 2, 3, 4):
        torch.testing.assert_close(raw[:, sampled.step == step].mean(1), reward.mean(1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_node_values_agree_with_brute_force(seed: int) -> None:
    """Random log-densities, two rewards, some leaves without one; two trees of a prompt and one of another."""
    sampled = grow(6, (0, 2, 3), (0, 2, 3, 5), trees=3, per_prompt=2)
    log_prob = counter_normal((len(sampled),), "log_prob", seed).double()
    sampled = replace(sampled, log_prob=log_prob)
    reward = counter_normal((2, 24), "reward", seed).double()
    reward[0, 3] = reward[1, 8:10] = reward[1, 0] = torch.nan  # leaves 8 and 9 are siblings: their parent has nothing
    below = leaves_below(sampled)
    children: dict[int, list[int]] = {}
    for row, parent in enumerate(sampled.parent.tolist()):
        children.setdefault(parent, []).append(row)

    def by_edges(row: int, k: int) -> float:
        if row not in children:
            return float(reward[k, next(iter(below[row]))])
        parts = [(math.exp(float(log_prob[c])), by_edges(c, k)) for c in children[row]]
        valid = [(w, v) for w, v in parts if not math.isnan(v)]
        return sum(w * v for w, v in valid) / sum(w for w, _ in valid) if valid else math.nan

    def by_paths(row: int, k: int, beta: float) -> float:
        valid = [(math.exp(beta * s), float(reward[k, f])) for f, s in below[row].items() if not reward[k, f].isnan()]
        return sum(w * v for w, v in valid) / sum(w for w, _ in valid) if valid else math.nan

    rows = range(len(sampled))
    cases: list[tuple[Credit, Callable[[int, int], float]]] = [
        (BranchGrpo()(sampled, reward), partial(by_paths, beta=0.0)),
        (BranchGrpo(weighting="path", beta=0.0)(sampled, reward), partial(by_paths, beta=0.0)),
        (BranchGrpo(weighting="path")(sampled, reward), partial(by_paths, beta=1.0)),
        (BranchGrpo(weighting="path", beta=3.0)(sampled, reward, Context(per_dim=2)), partial(by_paths, beta=1.5)),
        (BranchGrpo(weighting="edge")(sampled, reward), by_edges),
    ]
    for credit, oracle in cases:
        np.testing.assert_allclose(credit.raw, [[oracle(row, k) for row in rows] for k in (0, 1)], atol=1e-10)
        assert bool(credit.raw[1].isnan().any())
    # TreeGRPO's back-up is the edge-wise mean.
    backed = back_up(sampled, TreeGrpo()(sampled, reward).raw[1])
    np.testing.assert_allclose(backed, [by_edges(row, 1) for row in rows], atol=1e-10)


def test_sets_are_tree_and_depth_or_prompt() -> None:
    sampled = grow(4, (0, 1), (0, 1, 3), trees=4, per_prompt=2)
    reward = torch.zeros(1, 16)
    tree = torch.arange(4).repeat_interleave(2).tolist() + 2 * torch.arange(4).repeat_interleave(4).tolist()
    assert tree_of(sampled).tolist() == tree
    norm = BranchGrpo()(sampled, reward).norm.tolist()
    assert len(set(norm)) == len(set(zip(norm, tree, sampled.step.tolist(), strict=True))) == 12
    norm = TreeGrpo()(sampled, reward).norm.tolist()
    assert len(set(norm)) == len(set(zip(norm, sampled.group.tolist(), strict=True))) == 2


def test_equal_leaves_give_exactly_equal_nodes_in_the_dtype_of_the_rewards() -> None:
    sampled = grow(5, (0, 1, 2), (0, 1, 2, 3), children=3)
    for weighting in ("uniform", "path", "edge"):
        raw = BranchGrpo(weighting=weighting)(sampled, torch.full((1, 27), 0.1)).raw  # type: ignore[arg-type]
        assert raw.dtype == torch.float32
        assert torch.equal(raw, torch.full_like(raw, 0.1))


def test_very_different_log_densities_pick_one_leaf() -> None:
    """Sums over a latent are in the hundreds of thousands; a softmax over them must not overflow."""
    log_prob = [1e5, -1e5, 3e5, 2e5, -3e5, -2e5, 0.0, 0.0, 0.0, 0.0]
    raw = BranchGrpo(weighting="path")(example(log_prob), LEAVES).raw
    assert raw[0, :2].tolist() == [1, 6]


# ---- pruning ---------------------------------------------------------------------------------------------------------


def test_depth_window_slides_and_stays() -> None:
    paper = DepthWindow(first=9, last=12, size=4).depths
    assert [paper(i).start for i in (0, 29, 30, 60, 90, 5000)] == [9, 9, 10, 11, 12, 12]
    assert paper(0) == range(9, 13)
    release = DepthWindow(first=16, last=9, size=5).depths
    assert [release(i).start for i in (0, 30, 209, 210, 5000)] == [16, 15, 10, 9, 9]
    assert DepthWindow(first=3, last=3, every=1).depths(7) == range(3, 7)


def test_pruned_depths_of_the_default_tree() -> None:
    """Five of the leaves' own depths leave 13.625 - 5 = 8.625 trained transitions a leaf."""
    sampled = grow(20, (0, 3, 6, 9), range(20))
    credit = BranchGrpo(depth_window=DepthWindow(first=16, last=9, size=5))(sampled, torch.zeros(1, 16))
    assert credit.keep is not None
    assert int(credit.keep.sum()) / 16 == 8.625
    assert sampled.step[~credit.keep].unique().tolist() == [15, 16, 17, 18, 19]


def test_pruned_width() -> None:
    sampled = grow(5, (0, 1, 2), (0, 1, 2, 4), trees=2)
    reward = torch.tensor([[3.0, 1, 4, 1, 5, 9, 2, 6, 1, 1, 2, 2, math.nan, 3, 4, math.nan]])
    own = sampled.sample.tolist()

    def left(keep: Tensor | None) -> list[int]:
        assert keep is not None
        kept = {leaf for leaf, flag in zip(own, keep.tolist(), strict=True) if flag}
        # A leaf keeps all of the transitions that are its alone, or none.
        assert keep.tolist() == [leaf in kept for leaf in own]
        assert -1 in kept
        return sorted(kept - {-1})

    better = BranchGrpo(pruned_width="better_half")(sampled, reward)
    assert left(better.keep) == [0, 2, 5, 7, 8, 10, 13, 14]
    # Tree 0: quarters of 8 leaves, 1s at 1 and 3 (the later one ranks last), 9 and 6. Tree 1: of 6 valid leaves.
    assert left(BranchGrpo(pruned_width="extremes")(sampled, reward).keep) == [1, 3, 5, 7, 9, 14]
    both = BranchGrpo(pruned_width="better_half", pruned_depths=(5,))(sampled, reward).keep
    assert better.keep is not None
    assert both is not None
    assert torch.equal(both, better.keep & (sampled.step != 4))
    # By an advantage: the same, whatever stands at inner transitions.
    value = TreeGrpo()(sampled, reward).raw[0]
    assert torch.equal(kept_by_width(sampled, value, "better_half"), better.keep)
    three = kept_by_width(grow(3, (0,), (0,), children=3), torch.tensor([1.0, 2.0, 3.0]), "better_half")
    assert three.tolist() == [False, True, True]  # half of three, rounded up


def test_credit_of_trees_refuses_other_tables() -> None:
    sampled = example()
    with pytest.raises(ValueError, match=r"\[K, 4\]"):
        BranchGrpo()(sampled, torch.zeros(1, 5))
    with pytest.raises(ValueError, match=r"\[K, 4\]"):
        TreeGrpo()(sampled, torch.zeros(4))
    for bad in (torch.tensor([6, 7, 8, -1]), torch.tensor([6, 7, 8, 8])):
        with pytest.raises(ValueError, match="as sample_tree leaves them"):
            TreeGrpo()(replace(sampled, finished_after=bad), LEAVES)
    with pytest.raises(ValueError, match="beta"):
        BranchGrpo(weighting="path", beta=-1.0)(sampled, LEAVES)
    with pytest.raises(ValueError, match="per_dim"):
        BranchGrpo()(sampled, LEAVES, Context(per_dim=0))
    with pytest.raises(ValueError, match="better_half or extremes"):
        BranchGrpo(pruned_width="half")(sampled, LEAVES)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="depth window"):
        DepthWindow(first=0, last=3)
    with pytest.raises(ValueError, match=r"must be \[10\]"):
        back_up(sampled, torch.zeros(4))
