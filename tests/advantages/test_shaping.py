"""Smoothing over visits, asymmetry, selection and averages against worked numbers, numpy and their invariants."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowrl.advantages.normalise import normalise
from flowrl.advantages.shaping import (
    AGrae,
    Real,
    RewardHistory,
    aggregation_weights,
    dcpo,
    dcpo_clip,
    select_best,
    set_means,
    update_history,
)

FIRST = torch.zeros(4, dtype=torch.long)


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def z(reward: Tensor, groups: Tensor) -> Tensor:
    return normalise(reward[None], groups, eps=0.0)[0]


def visit(history: RewardHistory, *rewards: float) -> RewardHistory:
    return update_history(history, column(*rewards), torch.zeros(len(rewards), dtype=torch.long))


@pytest.mark.parametrize(("merge", "wanted"), [("pooled", 0.387298), ("release", 0.363803)])
def test_dcpo_second_visit_without_spread(merge: Any, wanted: float) -> None:
    history = visit(visit(RewardHistory.start(1, merge), 1, 0, 0, 0), 1, 1, 1, 1)
    assert history.visits.tolist() == [2]
    assert float(history.mean[0]) == pytest.approx(0.625, abs=1e-12)
    std, whole = {"pooled": (0.484123, 0.774597), "release": (0.515388, 0.727607)}[merge]
    assert float(history.variance.sqrt()[0]) == pytest.approx(std, abs=6e-7)
    smooth = dcpo(torch.ones(4).double(), torch.zeros(4).double(), FIRST, history, eps=0.0)
    assert smooth.tolist() == pytest.approx([wanted] * 4, abs=6e-7)
    assert smooth.tolist() == pytest.approx([whole / 2] * 4, abs=6e-7)


def test_dcpo_takes_the_smaller_blend() -> None:
    """Mean 0.375 and population std 0.484123 put a reward of 1 at 1.290994 and one of 0 at -0.774597."""
    history = visit(visit(visit(RewardHistory.start(1), 1, 0, 0, 0), 1, 1, 0, 0), 0)
    history = RewardHistory(
        visits=torch.tensor([3]), count=history.count, mean=column(0.375), variance=column(0.375 * 0.625)
    )
    smooth = dcpo(column(1, 0), column(1, -1), FIRST[:2], history, eps=0.0)
    assert smooth.tolist() == pytest.approx([1.096998, -0.849731], abs=6e-7)


def test_dcpo_of_blends_of_one_size_takes_the_second() -> None:
    """At the third visit A = -1 and A' = 1 give S1 = -1/3 and S2 = 1/3."""
    history = RewardHistory(visits=torch.tensor([3]), count=column(6), mean=column(0), variance=column(1))
    assert dcpo(column(1), column(-1), FIRST[:1], history, eps=0.0).tolist() == [1 / 3]


def test_dcpo_first_visit_is_plain() -> None:
    reward, prompts = column(1, 0, 0, 0, 0.3, 0.7), torch.tensor([2, 2, 2, 2, 0, 0])
    history = update_history(RewardHistory.start(3), reward, prompts)
    advantage = z(reward, prompts)
    assert torch.equal(dcpo(reward, advantage, prompts, history, eps=0.0), advantage)
    assert history.visits.tolist() == [1, 0, 1]


def test_dcpo_of_equal_rewards_for_ever() -> None:
    history = RewardHistory.start(1)
    for members in (4, 7, 3):
        history = visit(history, *[0.1] * members)
    assert not dcpo(column(0.1, 0.1), column(0, 0), FIRST[:2], history, eps=0.0).any()


@given(st.lists(st.lists(st.floats(-3, 3), min_size=2, max_size=6), min_size=1, max_size=4))
@settings(max_examples=25, deadline=None)
def test_pooled_history_is_that_of_all_rewards(visits: list[list[float]]) -> None:
    start = history = RewardHistory.start(2)
    for rewards in visits:
        history = visit(history, *rewards, math.nan)
    everything = np.concatenate([np.array(rewards) for rewards in visits])
    assert float(history.count[0]) == len(everything)
    assert float(history.mean[0]) == pytest.approx(everything.mean(), abs=1e-10)
    assert float(history.variance[0]) == pytest.approx(everything.var(), abs=1e-10)
    assert (float(history.count[1]), int(history.visits[1])) == (0, 0)
    assert not start.count.any()  # a plain value
    assert not start.visits.any()


def test_history_prompts_do_not_mix() -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.tensor([0, 1, 0, 1, 0, 1])
    rewards = [torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(3)]
    both = alone = RewardHistory.start(2)
    for reward in rewards:
        both = update_history(both, reward, prompts)
        alone = update_history(alone, reward[1::2], prompts[1::2])
    for name in ("visits", "count", "mean", "variance"):
        assert float(getattr(both, name)[1]) == pytest.approx(float(getattr(alone, name)[1]), abs=1e-12)
    advantage = z(rewards[-1], prompts)
    smooth = dcpo(rewards[-1], advantage, prompts, both)
    torch.testing.assert_close(smooth[1::2], dcpo(rewards[-1][1::2], advantage[1::2], prompts[1::2], alone))
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    permuted = dcpo(rewards[-1][order], advantage[order], prompts[order], both)
    assert torch.equal(permuted, smooth[order])


def test_history_leaves_a_failed_visit_out() -> None:
    history = visit(RewardHistory.start(1), 1, 0)
    failed = visit(history, math.nan, math.nan)
    for name in ("visits", "count", "mean", "variance"):
        assert torch.equal(getattr(failed, name), getattr(history, name))
    smooth = dcpo(column(math.nan, 1), column(math.nan, 1), FIRST[:2], history)
    assert smooth.isnan().tolist() == [True, False]


@pytest.mark.parametrize(
    ("q", "low", "high"), [(0.9, 0.768742, 1.187184), (0.5, 0.5, 1.306226), (0.01, 0.5, 5.0), (1e-4, 0.5, 10.0)]
)
def test_dcpo_clip(q: float, low: float, high: float) -> None:
    found = dcpo_clip(column(q), eps_low=0.16, eps_high=0.20)
    assert [float(bound[0]) for bound in found] == pytest.approx([low, high], abs=6e-7)


def test_a_grae_worked() -> None:
    reward = column(1, 0, 0, 0)
    advantage, p = z(reward, FIRST), set_means(reward, FIRST)
    assert p.tolist() == [0.25] * 4
    assert advantage.tolist() == pytest.approx([1.732051] + [-0.577350] * 3, abs=6e-7)
    assert AGrae()(advantage, p, 0.4).tolist() == pytest.approx([0.517128] + [-0.430940] * 3, abs=6e-7)
    # alpha = omega leaves the praise whole.
    assert AGrae(alpha=0.4)(advantage, p, 0.4).tolist() == pytest.approx([1.292820] + [-0.430940] * 3, abs=6e-7)
    published = AGrae(published=True)(advantage, p, 0.4)
    assert published[1:].tolist() == pytest.approx([-0.577350] * 3, abs=6e-7)
    assert float(published[0]) == pytest.approx(0.4 * 1.732051, abs=1e-6)


@pytest.mark.parametrize(("successes", "group_size"), [(1, 4), (3, 4), (5, 8), (1, 24)])
def test_a_grae_identity(successes: int, group_size: int) -> None:
    """In a group of successes and failures, population std: sum |A| = 2 G sqrt(p (1 - p))."""
    reward = (torch.arange(group_size) < successes).double()
    groups = torch.zeros(group_size, dtype=torch.long)
    p = successes / group_size
    total = 2 * group_size * math.sqrt(p * (1 - p))
    advantage = z(reward, groups)
    assert float(advantage.abs().sum()) == pytest.approx(total, abs=1e-10)
    # So omega 1 leaves G sqrt(1 - p), which grows with difficulty, and omega 0 leaves G sqrt(p), without praise.
    rate = set_means(reward, groups)
    assert float(AGrae()(advantage, rate, 1.0).abs().sum()) == pytest.approx(group_size * math.sqrt(1 - p), abs=1e-10)
    held_back = AGrae()(advantage, rate, 0.0)
    assert float(-held_back.sum()) == pytest.approx(group_size * math.sqrt(p) / 2, abs=1e-10)
    assert float(held_back.max()) == 0


def test_a_grae_of_certain_groups() -> None:
    advantage = torch.zeros(2).double()
    for published in (False, True):
        assert torch.equal(AGrae(published=published)(advantage, column(0, 1), 0.5), advantage)


def one_group(advantage: Tensor) -> Tensor:
    return torch.zeros_like(advantage, dtype=torch.long)


def test_select_best_per_group_and_over_the_batch() -> None:
    advantage = column(0.1, -2, 0.3, 3, 10, 11, 12, 13, -0.5, 0)
    groups = torch.tensor([5, 5, 5, 5, 2, 2, 2, 2, 5, 5])
    assert select_best(advantage, groups, 2).nonzero().flatten().tolist() == [1, 3, 4, 7]
    assert select_best(advantage, groups, 4).nonzero().flatten().tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert select_best(advantage, one_group(advantage), 4).nonzero().flatten().tolist() == [1, 6, 7, 8]
    order = torch.randperm(10, generator=torch.Generator().manual_seed(3))
    assert torch.equal(select_best(advantage[order], groups[order], 2), select_best(advantage, groups, 2)[order])


def test_select_best_of_equal_and_missing() -> None:
    assert select_best(column(1, 1, 1, 1, 1), one_group(column(1, 1, 1, 1, 1)), 2).tolist() == [
        True,
        False,
        False,
        False,
        True,
    ]
    some = column(1, math.nan, 3, 2, math.nan, 5)
    assert select_best(some, one_group(some), 2).nonzero().flatten().tolist() == [0, 5]
    assert torch.equal(select_best(some, one_group(some), 4), ~some.isnan())
    assert torch.equal(select_best(some, one_group(some), 6), ~some.isnan())


SAMPLE = torch.tensor([0, 1, 1, 1, 2, 2, 3, 3])
ADVANTAGE = column(1, -1, -1, -1, 0.5, 0.5, -0.5, -0.5)
ALL = torch.ones(8, dtype=torch.bool)


@pytest.mark.parametrize(
    ("kind", "wanted"), [("rows", 0.25), ("samples", 0.0), ("sum_of_samples", 0.0), ("balanced", 0.066667)]
)
def test_averages_worked(kind: Any, wanted: float) -> None:
    """Rows at ratio 1, so a row's loss is minus its advantage."""
    weight = aggregation_weights(SAMPLE, ADVANTAGE, ALL, kind)
    assert float((weight * -ADVANTAGE).sum()) == pytest.approx(wanted, abs=6e-7)
    assert float(weight.sum()) == pytest.approx(4 if kind == "sum_of_samples" else 1, abs=1e-12)


@pytest.mark.parametrize("kind", ["rows", "samples", "sum_of_samples", "balanced"])
def test_averages_of_kept_rows_only(kind: Any) -> None:
    loss = torch.randn(8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    keep = torch.tensor([1, 0, 1, 1, 0, 0, 0, 1], dtype=torch.bool)
    weight = aggregation_weights(SAMPLE, torch.where(keep, ADVANTAGE, math.nan), keep, kind)
    a, b, d = loss[0], loss[2:4].mean(), loss[7]  # sample 2 keeps nothing
    wanted = {
        "rows": loss[keep].mean(),
        "samples": (a + b + d) / 3,
        "sum_of_samples": a + b + d,
        "balanced": a / 3 + 2 / 3 * loss[[2, 3, 7]].mean(),
    }[kind]
    assert float((weight * loss).sum()) == pytest.approx(float(wanted), abs=1e-12)
    assert not weight[~keep].any()
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    permuted = aggregation_weights(SAMPLE[order], torch.where(keep, ADVANTAGE, math.nan)[order], keep[order], kind)
    torch.testing.assert_close(permuted, weight[order], rtol=0, atol=1e-15)
    assert not aggregation_weights(SAMPLE, ADVANTAGE, ~ALL, kind).any()


def test_a_sample_of_mean_advantage_0_is_not_good() -> None:
    weight = aggregation_weights(torch.tensor([0, 1, 1, 2]), column(1, 1, -1, -1), ALL[:4], "balanced")
    assert weight.tolist() == pytest.approx([1 / 3, 2 / 9, 2 / 9, 2 / 9], abs=1e-12)  # one good sample of three


def test_balanced_within_groups() -> None:
    group = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    weight = aggregation_weights(SAMPLE, ADVANTAGE, ALL, "balanced", group_M=group)
    # One good and one bad sample a group: each of the four has a quarter.
    assert weight.tolist() == pytest.approx([1 / 4] + [1 / 12] * 3 + [1 / 8] * 4, abs=1e-12)


@given(
    advantages=st.lists(st.integers(-3, 3), min_size=2, max_size=8),
    rows=st.integers(1, 4),
    split=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_equal_rows_a_sample_make_all_means_the_same(advantages: list[int], rows: int, split: bool) -> None:
    sample = torch.arange(len(advantages)).repeat_interleave(rows)
    advantage = column(*advantages).repeat_interleave(rows)
    group = sample % 2 if split else None
    keep = torch.ones(len(sample), dtype=torch.bool)
    plain = torch.full_like(advantage, 1 / len(sample))
    for kind in ("rows", "samples", "balanced"):
        weight = aggregation_weights(sample, advantage, keep, kind, group_M=group)  # type: ignore[arg-type]
        torch.testing.assert_close(weight, plain, rtol=1e-12, atol=0)


def test_shared_rows() -> None:
    shared = torch.tensor([-1, 0, 1])
    keep = torch.ones(3, dtype=torch.bool)
    assert aggregation_weights(shared, ADVANTAGE[:3], keep).tolist() == pytest.approx([1 / 3] * 3)
    weight = aggregation_weights(shared, ADVANTAGE[:3], torch.tensor([False, True, True]), "samples")
    assert weight.tolist() == [0, 0.5, 0.5]


def test_averages_refuse() -> None:
    keep = torch.ones(3, dtype=torch.bool)
    for kind in ("samples", "sum_of_samples", "balanced"):
        with pytest.raises(ValueError, match="sample -1"):
            aggregation_weights(torch.tensor([-1, 0, 1]), ADVANTAGE[:3], keep, kind)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="NaN"):
        aggregation_weights(SAMPLE[:3], column(1, math.nan, 1), keep, "balanced")
    with pytest.raises(ValueError, match="averaged by"):
        aggregation_weights(SAMPLE, ADVANTAGE, ALL, "tokens")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="broadcasting"):
        aggregation_weights(SAMPLE, ADVANTAGE[:1], ALL)


def test_selection_refuses() -> None:
    for n, message in ((3, "even"), (0, "even"), (10, "group of 8")):
        with pytest.raises(ValueError, match=message):
            select_best(ADVANTAGE, one_group(ADVANTAGE), n)
    with pytest.raises(ValueError, match="group of 1"):
        select_best(ADVANTAGE, SAMPLE, 2)
    with pytest.raises(ValueError, match="broadcasting"):
        select_best(ADVANTAGE, FIRST, 2)


def test_dcpo_refuses() -> None:
    history = visit(RewardHistory.start(2), 1, 0)
    with pytest.raises(ValueError, match="has not seen"):
        dcpo(column(1), column(0), torch.tensor([1]), history)
    with pytest.raises(ValueError, match=r"0 \.\. 1"):
        update_history(history, column(1), torch.tensor([2]))
    with pytest.raises(ValueError, match="broadcasting"):
        dcpo(column(1), column(0, 0), torch.tensor([0, 0]), history)
    with pytest.raises(ValueError, match="negative"):
        dcpo(column(1), column(0), torch.tensor([0]), history, eps=-1.0)
    for num_prompts, merge in ((0, "pooled"), (2, "mean")):
        with pytest.raises(ValueError, match="history needs"):
            RewardHistory.start(num_prompts, merge)  # type: ignore[arg-type]
    for q in (0.0, 1.5):
        with pytest.raises(ValueError, match="densities"):
            dcpo_clip(column(q), eps_low=0.16, eps_high=0.20)
    with pytest.raises(ValueError, match="negative"):
        dcpo_clip(column(0.5), eps_low=-0.1, eps_high=0.1)


def test_a_grae_refuses() -> None:
    wrong: list[tuple[float, float, float]] = [(1.2, 0.5, 1), (-0.1, 0.5, 1), (0.5, 1.5, 1), (0.5, 0.5, 0)]
    for p, omega, alpha in wrong:
        with pytest.raises(ValueError, match=r"success rate|alpha"):
            AGrae(alpha=alpha)(column(1), column(p), omega)
    with pytest.raises(ValueError, match="broadcasting"):
        AGrae()(column(1, 2), column(0.5), 0.5)


@pytest.mark.parametrize("tau", [0.5, 2.0])
def test_real_has_the_gradient_of_its_loss_on_policy(tau: float) -> None:
    reward = torch.tensor([1.0, 0, 0, 1, 1, 1, torch.nan, 0, 0], dtype=torch.float64)
    group = torch.tensor([4, 4, 4, 4, 7, 7, 7, 9, 9])
    shaped = Real(tau=tau)(reward, group)
    log_ratio = torch.zeros(9, dtype=torch.float64, requires_grad=True)
    for name in (4, 7, 9):
        right, wrong = (log_ratio[(group == name) & (reward == label)] for label in (1, 0))
        loss = (1 + (-right / tau).exp().sum()).log() + (1 + (wrong / tau).exp().sum()).log()
        loss.backward()
        ours = shaped[(group == name) & ~reward.isnan()]
        assert log_ratio.grad is not None
        theirs = -log_ratio.grad[(group == name) & ~reward.isnan()] * len(ours)
        torch.testing.assert_close(ours, theirs)
    assert shaped.isnan().tolist() == reward.isnan().tolist()
    assert shaped[0].item() == pytest.approx(4 / (3 * tau))  # two right of four


def test_real_takes_verdicts_alone() -> None:
    with pytest.raises(ValueError, match="takes verdicts, 0 or 1"):
        Real()(torch.tensor([0.5, 1]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="tau divides log-ratios"):
        Real(tau=0.0)
