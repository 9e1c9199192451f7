"""Normalisation of arbitrary sets of rows and of several rewards: worked numbers, numpy and invariants."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowrl.advantages.normalise import (
    aggregate,
    combine,
    normalise,
    set_ranks,
    set_statistics,
    sets_of,
    whiten,
)
from flowrl.advantages.reward_maps import log_tame

# Rewards of four samples along three steps, and the changes of their values from state to state.
VALUE = torch.tensor([[0.5, 0.3, 0.6, 0.9], [0.5, 0.7, 0.1, 0.2], [0.5, 0.6, 0.8, 0.7], [0.5, 0.4, 0.4, 0.5]]).double()
FOUR, TWO = torch.zeros(4, dtype=torch.long), torch.tensor([0, 0, 1, 1])
ONE = torch.ones(1, dtype=torch.float64)
EVERY_HOW = ("sum", "each", "gdpo")


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def row(*values: float) -> Tensor:
    return column(*values)[None]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(got: Tensor, wanted: Any, tolerance: float = 6e-7) -> None:
    """Six printed decimals."""
    np.testing.assert_allclose(got.numpy(), np.asarray(wanted, dtype=float), rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("eps", "wanted"),
    [(0.0, [1.256757, -1.450105, 0.483368, -0.290021]), (1e-4, [1.256272, -1.449544, 0.483181, -0.289909])],
)
def test_outcome(eps: float, wanted: list[float]) -> None:
    close(normalise(VALUE[None, :, 3], FOUR, eps=eps)[0], wanted)


def test_differences_by_step_and_jointly() -> None:
    change = VALUE.diff(dim=1)  # sample by step
    step = torch.arange(3).repeat(4)
    by_step = normalise(change.reshape(1, -1), step, eps=0.0).reshape(4, 3)
    close(by_step[:, 0], [-1.264911, 1.264911, 0.632456, -0.632456])
    close(by_step[:, 1], [0.930949, -1.647064, 0.644503, 0.071611])
    close(by_step[:, 2], [1.414214, 0, -1.414214, 0])
    joint = normalise(change.reshape(1, -1), torch.zeros(12, dtype=torch.long), eps=0.0).reshape(4, 3)
    close(joint[0], [-0.929929, 1.136580, 1.136580])
    close(joint[1], [0.723278, -2.583137, 0.309976])
    close(joint[2], [0.309976, 0.723278, -0.516627])
    close(joint[3], [-0.516627, -0.103325, 0.309976])
    # All start from one seed, so the first column is that of the values themselves.
    close(by_step[:, 0], normalise(VALUE[None, :, 1], FOUR, eps=0.0)[0].numpy(), 1e-10)


def test_channels_are_normalised_apart_and_summed() -> None:
    raw = torch.tensor([[0.2, 0.5, 0.8], [0.1, 0.1, 0.4]], dtype=torch.float64)
    z = normalise(raw, FOUR[:3], eps=1e-8, correction=1)
    close(z, [[-1, 0, 1], [-0.577350, -0.577350, 1.154701]])
    close(combine(z, torch.ones(2).double()), [-1.577350, -0.577350, 2.154701])


def test_seed_groups_and_prompt_groups_disagree() -> None:
    raw = row(0.6, 0.4, 0.9, 0.7)
    close(normalise(raw, TWO)[0], [0.999001, -0.999001, 0.999001, -0.999001])
    close(normalise(raw, FOUR, eps=1e-4)[0], [-0.277196, -1.385982, 1.385982, 0.277196])
    close(normalise(row(0.5, 0.7, 0.3, 0.3), TWO)[0], [-0.999001, 0.999001, 0, 0])


def test_virtual_member() -> None:
    options: dict[str, Any] = {"eps": 0.0, "correction": 1, "virtual_max": 1.0}
    close(normalise(row(0, 0, 0, 0), FOUR, **options)[0], [-0.447214] * 4)
    close(normalise(row(0.2, 0.4, 0.6), FOUR[:3], **options)[0], [-1.024695, -0.439155, 0.146385])
    close(normalise(row(0.2, 0.4, 0.6), FOUR[:3], eps=0.0, correction=1)[0], [-1, 0, 1])
    for group_size in (1, 2, 7):
        failed = normalise(torch.zeros(1, group_size).double(), torch.zeros(group_size, dtype=torch.long), **options)
        close(failed[0], [-1 / math.sqrt(group_size + 1)] * group_size, 1e-10)
    # All at the bound: nothing to learn, also where a weighted sum misses it by rounding.
    assert not normalise(row(1, 1, 1, 1), FOUR, **options).any()
    assert not normalise(row(1, 1 + 2**-51, 1, 1), FOUR, **options).any()
    mixed = normalise(row(1, 1, 0.5, 0.5), TWO, **options)[0]
    assert mixed[:2].tolist() == [0, 0]
    assert bool((mixed[2:] < 0).all())
    close(normalise(row(0.2, 0.4), TWO[:2], scope="none", virtual_max=0.9)[0], [-0.3, -0.1], 1e-10)


def test_gdpo_tells_apart_what_the_sum_does_not() -> None:
    raw = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 1]], dtype=torch.float64)
    weights = torch.ones(2).double()
    half = [-0.707107, 0.707107]
    close(aggregate(raw, TWO, weights, "sum", eps=0.0, correction=1), half + half)
    close(aggregate(raw, TWO, weights, "each", eps=0.0, correction=1), [*half, -1.414214, 1.414214])
    close(aggregate(raw, TWO, weights, "gdpo", eps=0.0, correction=1), [-0.547723, 0.547723, -1.095445, 1.095445])
    close(aggregate(raw, TWO, weights, "gdpo", eps=0.0), [-0.632456, 0.632456, -1.264911, 1.264911])


def test_gdpo_of_eight() -> None:
    raw = torch.tensor([[1, 2, 3, 4, 0, 0, 1, 0], [10, 10, 30, 20, 5, 7, 6, 9]], dtype=torch.float64)
    groups, weights = torch.tensor([0] * 4 + [1] * 4), torch.tensor([1.0, 0.5]).double()
    before = [-1.793908, -0.899481, 1.200992, 1.492396, -1.168958, -0.492835, 1.478505, 0.183289]
    each = aggregate(raw, groups, weights, "each", eps=0.0)
    close(each, before)
    assert float(each.std(correction=0)) == pytest.approx(1.2002978, abs=5e-8)
    wanted = [-1.494552, -0.749381, 1.000578, 1.243355, -0.973890, -0.410594, 1.231781, 0.152703]
    close(aggregate(raw, groups, weights, "gdpo", eps=0.0), wanted)
    close(whiten(torch.tensor(before).double(), correction=0, eps=0.0), wanted, 2e-6)


def test_rewards_that_log_taming_replaced() -> None:
    raw = torch.tensor([[0, 1, 3, 4], [0.8, 1, 1, 1.2]], dtype=torch.float64)
    weights = torch.ones(2).double()
    close(aggregate(log_tame(raw), FOUR, weights, eps=0.0), [-1.475337, -0.301153, 0.610100, 1.166390])
    close(aggregate(raw, FOUR, weights, eps=0.0), [-1.287453, -0.585206, 0.585206, 1.287453])


@pytest.mark.parametrize("scope", ["group", "global", "none"])
@pytest.mark.parametrize("options", [{}, {"baseline": "leave_one_out"}, {"correction": 1}])
def test_missing_credit_takes_no_part(scope: Any, options: dict[str, Any]) -> None:
    raw, groups = normal(1, 12), torch.tensor([3, 3, 3, 3, 8, 8, 8, 8, 8, 1, 2, 2])
    raw[0, [1, 6, 11]] = math.nan
    z = normalise(raw, groups, scope=scope, **options)
    seen = ~raw[0].isnan()
    assert torch.equal(z[0].isnan(), ~seen)
    close(z[0, seen], normalise(raw[:, seen], groups[seen], scope=scope, **options)[0].numpy(), 1e-12)
    assert z[0, 9:11].tolist() == [0, 0]  # alone in their sets
    other = normalise(torch.cat([raw, normal(1, 12, seed=2)]), groups, scope=scope, **options)
    assert torch.equal(other[0, seen], z[0, seen])  # a hole in one channel is no hole in the next
    assert not other[1].isnan().any()


@given(
    values=st.lists(st.integers(-20, 20), min_size=8, max_size=8),
    sets=st.lists(st.integers(-3, 3), min_size=8, max_size=8),
    order=st.permutations(range(8)),
    factor=st.floats(0.1, 10),
    shift=st.floats(-5, 5),
    baseline=st.sampled_from(["mean", "leave_one_out"]),
)
@settings(max_examples=40, deadline=None)
def test_invariants_of_one_set(
    values: list[int], sets: list[int], order: list[int], factor: float, shift: float, baseline: Any
) -> None:
    raw, norm = row(*values), torch.tensor(sets)
    z = normalise(raw, norm, eps=0.0, baseline=baseline)
    for number in set(sets):
        assert abs(float(z[0, norm == number].sum())) < 1e-10
    # Affine with a factor and a shift of its own for every set.
    moved = raw * (factor + (norm % 2)) + shift * norm
    close(normalise(moved, norm, eps=0.0, baseline=baseline), z.numpy(), 1e-6)
    close(normalise(raw[:, order], norm[order], eps=0.0, baseline=baseline), z[:, order].numpy(), 1e-12)
    close(normalise(raw, 5 - 2 * norm, eps=0.0, baseline=baseline), z.numpy(), 1e-12)
    left = norm != sets[0]
    if bool(left.any()):  # other prompts do not matter
        close(normalise(raw[:, left], norm[left], eps=0.0, baseline=baseline), z[:, left].numpy(), 1e-12)


@pytest.mark.parametrize("how", EVERY_HOW)
@pytest.mark.parametrize("scope", ["group", "global"])
def test_only_whitening_and_global_std_couple_prompts(how: Any, scope: Any) -> None:
    raw, groups = normal(2, 12).exp(), torch.arange(12) // 4
    raw[0] = torch.cat([column(0, 0, 0, 50), raw[0, 4:] ** 0.1])  # without the first prompt the other reward is tamed
    weights = column(0.7, 0.4)
    advantage = aggregate(raw, groups, weights, how, scope=scope)
    order = torch.tensor([8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 6, 7])
    close(aggregate(raw[:, order], groups[order], weights, how, scope=scope), advantage[order].numpy(), 1e-12)
    without = aggregate(raw[:, 4:], groups[4:], weights, how, scope=scope)
    coupled = how == "gdpo" or scope == "global"
    assert torch.allclose(without, advantage[4:], rtol=0, atol=1e-12) != coupled


@pytest.mark.parametrize("how", EVERY_HOW)
def test_channels_of_weight_zero_take_no_part(how: Any) -> None:
    raw, groups, weights = normal(2, 8).exp(), torch.arange(8) // 4, torch.tensor([0.5, 2.0]).double()
    advantage = aggregate(raw, groups, weights, how)
    monitored = torch.cat([raw[:1], torch.full((1, 8), -7.0).double(), raw[1:]])
    monitored[1, ::2] = math.nan
    assert torch.equal(aggregate(monitored, groups, torch.tensor([0.5, 0.0, 2.0]).double(), how), advantage)
    raw[1, 3] = math.nan
    assert aggregate(raw, groups, weights, how).isnan().nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtype_and_constant_sets(dtype: torch.dtype) -> None:
    raw = torch.cat([torch.full((1, 24), 0.1), torch.linspace(0, 1, 24)[None]], 1).to(dtype)
    groups = torch.arange(48) // 24
    for how in EVERY_HOW:
        advantage = aggregate(raw, groups, ONE, how, eps=0.0)  # type: ignore[arg-type]
        assert advantage.dtype == dtype
        assert advantage[:24].abs().max() < 1e-7
        assert bool((advantage[24:] != 0).any())
    assert normalise(raw, groups).dtype == whiten(raw[0]).dtype == dtype
    assert not normalise(raw, groups, eps=0.0)[0, :24].any()
    assert not normalise(row(0, 1e-200), FOUR[:2], eps=0.0).any()  # its std underflows to 0


def test_set_statistics_and_ranks_are_numpys() -> None:
    value, sets = normal(3, 20), torch.arange(20) * 7 % 4
    value[1, 5] = math.nan
    value[2] = value[2].round()  # ties
    found = set_statistics(value, sets, 5, correction=1)
    rank = set_ranks(value, sets, 5)
    for channel in range(3):
        for number in range(4):
            members = value[channel, sets == number].numpy()
            seen = members[~np.isnan(members)]
            assert float(found.count[channel, number]) == len(seen)
            assert float(found.mean[channel, number]) == pytest.approx(seen.mean(), abs=1e-12)
            assert float(found.std[channel, number]) == pytest.approx(seen.std(ddof=1), abs=1e-12)
            order = np.argsort(members, kind="stable")  # numpy puts NaN last too
            assert rank[channel, sets == number].numpy()[order].tolist() == list(range(len(members)))
    assert found.constant.tolist() == [[False] * 4 + [True]] * 3
    index, num_sets = sets_of(torch.tensor([9, -1, 9, 4]))
    assert (index.tolist(), num_sets) == ([2, 0, 2, 1], 3)


def test_credit_of_no_rows() -> None:
    assert normalise(torch.zeros(2, 0), torch.zeros(0, dtype=torch.long)).shape == (2, 0)


def test_refuses_tables() -> None:
    for raw, norm in ((VALUE[0], FOUR), (VALUE.long(), FOUR), (VALUE, FOUR[:3])):
        with pytest.raises(ValueError, match=r"\[K, M\]"):
            normalise(raw, norm)
    with pytest.raises(ValueError, match="integer"):
        normalise(VALUE, FOUR.double())
    with pytest.raises(ValueError, match="infinite"):
        normalise(row(0, math.inf), TWO[:2])


def test_refuses_options() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"scope": "batch"}, "scope is"),
        ({"eps": -1.0}, "negative"),
        ({"correction": 2}, "correction"),
        ({"virtual_max": math.inf}, "virtual_max"),
        ({"virtual_max": 1.0, "scope": "global"}, "virtual_max"),
        ({"virtual_max": 0.5}, "from above"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            normalise(VALUE, FOUR, **options)


def test_a_channel_of_weight_0_takes_no_part() -> None:
    z = torch.tensor([[1.0, 2.0], [math.nan, 3.0]])
    assert combine(z, torch.tensor([2.0, 0.0])).tolist() == [2.0, 4.0]
    assert combine(z, torch.tensor([2.0, 1.0])).isnan().tolist() == [True, False]


def test_refuses_weights() -> None:
    for weights in (torch.ones(3), torch.tensor([1.0, 1.0, 1.0, math.nan])):
        with pytest.raises(ValueError, match="weights"):
            combine(VALUE, weights)
        with pytest.raises(ValueError, match="weights"):
            aggregate(VALUE, FOUR, weights)
    with pytest.raises(ValueError, match="all weights are 0"):
        aggregate(VALUE, FOUR, torch.zeros(4))
    with pytest.raises(ValueError, match="aggregated by"):
        aggregate(VALUE, FOUR, torch.ones(4), "product")  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_gdpo_leaves_sets_without_a_signal_at_exactly_zero(seed: int, baseline: Any) -> None:
    """Whitening takes a mean off that is not quite 0; a set of equal rewards must not see it."""
    draw = np.random.default_rng(seed)
    groups = torch.arange(8).repeat_interleave(6)
    raw = torch.from_numpy(draw.random((3, 48)))
    dead = torch.from_numpy(draw.permutation(8) < 3)
    level = torch.from_numpy(draw.random((3, 8)))
    raw = torch.where(dead[groups], level[:, groups], raw)
    raw[1, groups == int(torch.nonzero(~dead)[0])] = 0.25  # one channel of a live set is constant
    raw[2] = torch.from_numpy(draw.random(48))  # of weight 0: says nothing about who teaches
    raw[0, 5] = math.nan
    weights = torch.tensor([1.0, 0.3, 0.0]).double()
    options: dict[str, Any] = {"baseline": baseline, "correction": 1}
    got = aggregate(raw, groups, weights, "gdpo", **options)
    seen = ~raw[0].isnan()
    assert torch.equal(got.isnan(), ~seen)
    assert torch.equal(got[seen] == 0, dead[groups][seen])
    # The others are what whitening over the whole batch makes of them.
    white = whiten(aggregate(raw, groups, weights, "each", **options), correction=1)
    alive = seen & ~dead[groups]
    assert torch.equal(got[alive], white[alive])


@pytest.mark.parametrize("how", EVERY_HOW)
def test_a_set_that_differs_by_rounding_alone_counts_as_constant(how: Any) -> None:
    """BranchGRPO's code: a std below 1e-6 gives 0; without the bound, rounding gets advantages like any other."""
    raw = torch.tensor([[0.3000001, 0.3, 0.3, 0.3, 0.1, 0.2, 0.3, 0.4]] * 2)
    groups, weights = torch.tensor([0] * 4 + [1] * 4), torch.ones(2).double()
    options: dict[str, Any] = {"eps": 1e-8, "correction": 1}
    assert float(aggregate(raw, groups, weights, how, **options)[0]) > 1
    got = aggregate(raw, groups, weights, how, **options, min_std=1e-6)
    assert got[:4].tolist() == [0] * 4
    assert bool((got[4:] != 0).all())
    if how != "gdpo":  # which whitens over both sets
        assert torch.equal(got[4:], aggregate(raw, groups, weights, how, **options)[4:])
    sets = set_statistics(raw, groups, 2, correction=1, min_std=1e-6)
    assert sets.constant.tolist() == [[True, False]] * 2
    assert sets.std[:, 0].tolist() == [0, 0]
