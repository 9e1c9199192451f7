"""Turning points, their balance, and the credit made of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import torch
from credit_tables import TABLE, advantages, close, columns, table_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowrl.credit.tp_grpo import TpGrpo, balance, turning_points
from flowrl.credit.values import Context

VALUES = torch.tensor(TABLE, dtype=torch.float64)


def flagged(values: Sequence[Sequence[float]] | Tensor, constrained: bool = True, **variant: bool) -> list[list[int]]:
    """(trajectory, step) of the flags."""
    table = torch.as_tensor(values, dtype=torch.float64)
    return turning_points(table, constrained, **variant).nonzero().tolist()


def test_turning_point_oracles() -> None:
    assert flagged(VALUES) == [[0, 1], [2, 0]]
    assert flagged(VALUES, False) == [[0, 1], [1, 1], [2, 0]]
    assert flagged([(0, 1, 1, 0, 2)]) == [[0, 0]]
    assert flagged([(0, 1, 1, 0, 2)], False) == [[0, 0], [0, 3]]
    assert flagged([(0, -1, -1, 1)]) == flagged([(0, -1, -1, 1)], False) == []  # a gain of 0 loses the flip
    assert flagged([(0, 2, 1, 1.2, 0.5)]) == []
    assert flagged([(0, 2, 1, 1.2, 0.5)], False) == [[0, 0], [0, 2]]


def test_turning_points_at_the_edges() -> None:
    assert flagged([(0, 1, -1, 0)], False) == []  # ends where it began
    assert flagged([(0, 1)]) == []
    assert flagged([(0, 1)], False) == [[0, 0]]
    assert flagged([(1, 1)], False) == []


def test_variants() -> None:
    falling = [(0.0, 1.0, -1.0, -2.0), (0.0, -1.0, 1.0, 2.0)]
    assert flagged(falling) == [[0, 1], [1, 1]]
    assert flagged(falling, positive_only=True) == [[1, 1]]
    down = [(0.0, -1.0, -2.0, -3.0), (0.0, -1.0, -0.5, -2.0)]  # the first step is flagged whatever the trend
    for constrained in (True, False):
        assert flagged(down, constrained, positive_only=True) == [[0, 0], [1, 0]]
    assert flagged(down, False) == [[0, 0], [1, 0], [1, 2]]
    # A flip against the trend counts for the local rule, and under the constraint only where the rest goes along.
    assert flagged([(0, 2, 1, 3, 2.5)], local_flip=True) == [[0, 0]]
    assert flagged([(0, 2, 1, 3, 2.5)], False, local_flip=True) == [[0, 0], [0, 1], [0, 2], [0, 3]]
    assert flagged([(0, 3, 2, 1, 4)], local_flip=True) == [[0, 0]]
    assert flagged([(0, 5, 4, 3, 4)], local_flip=True) == []
    assert flagged([(0, -1, 5, 4, 3.5)], False, local_flip=True) == [[0, 1], [0, 2]]
    assert flagged([(0, -1, 5, 4, 3.5)], local_flip=True) == [[0, 2]]
    assert flagged([(0, -1, 5, 4, 3.5)], False) == [[0, 1]]


def test_all_paths_on_a_grid() -> None:
    """All 3125 paths V in {-2 .. 2}^5: 942 constrained flags, and what the constraint promises holds at each."""
    value = torch.tensor(list(product(range(-2, 3), repeat=5)), dtype=torch.float64)
    flags = turning_points(value)
    assert len(value) == 3125
    assert int(flags.sum()) == 942
    gain, rest = value.diff(dim=1)[flags], (value[:, -1:] - value[:, :-1])[flags]
    trend = (value[:, -1:] - value[:, :1]).expand_as(flags)[flags]
    assert bool((rest.sign() == gain.sign()).all())
    assert bool((rest.sign() == trend.sign()).all())
    assert bool((rest.abs() > gain.abs()).all())
    assert not bool(flags[:, -1].any())
    assert not bool((flags & ~turning_points(value, False)).any())


def test_credit_oracles() -> None:
    sampled, reward = table_of(TABLE)
    constrained = TpGrpo()(sampled, reward)
    close(constrained.raw.reshape(4, 3).numpy(), [[-0.2, 0.6, 0.3], [0.2, -0.6, 0.1], [0.2, 0.2, -0.1], [-0.1, 0, 0.1]])
    first, second = [-1.260252, 0.980196, 0.980196, -0.700140], [1.270171, -1.501111, 0.346410, -0.115470]
    close(advantages(constrained, 3), columns(first, second, [1.414214, 0, -1.414214, 0]))
    first, second = [-1.259547, 0.979647, 0.979647, -0.699748], [1.269877, -1.500764, 0.346330, -0.115443]
    close(advantages(constrained, 3, eps=1e-4), columns(first, second, [1.413214, 0, -1.413214, 0]))

    free = TpGrpo(constrained=False)(sampled, reward)
    close(free.raw.reshape(4, 3).numpy(), [[-0.2, 0.6, 0.3], [0.2, -0.5, 0.1], [0.1, 0.2, -0.1], [-0.1, 0, 0.1]])
    first, second = [-1.264911, 1.264911, 0.632456, -0.632456], [1.325508, -1.451747, 0.315597, -0.189358]
    close(advantages(free, 3), columns(first, second, [1.414214, 0, -1.414214, 0]))
    unbalanced = TpGrpo(constrained=False, balance=False)(sampled, reward)
    assert unbalanced.raw.reshape(4, 3)[2].tolist() == pytest.approx([0.2, 0.2, -0.1])


def test_balance_keeps_the_largest_trends_and_earlier_cells_first() -> None:
    trend = torch.tensor([1.0, 3.0, -2.0, 3.0, 2.0, 0.0])
    value = torch.stack([torch.zeros(6), torch.full((6,), 9.0), trend], 1)
    flags = torch.tensor([[True, True], [False, True], [True, True], [True, False], [True, True], [True, False]])
    kept = balance(flags, value)
    assert kept.nonzero().tolist() == [[1, 1], [2, 0], [2, 1], [3, 0], [5, 0]]
    rising = flags & (trend > 0)[:, None]
    assert torch.equal(balance(rising, value), rising)
    assert torch.equal(balance(rising & False, value), rising & False)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.booleans(), st.integers(0, 2**31))
def test_only_flagged_cells_differ_from_the_gain(n: int, steps: int, constrained: bool, seed: int) -> None:
    value = np.random.default_rng(seed).integers(-3, 4, (n, steps + 1)).astype(float)
    flags = turning_points(torch.from_numpy(value), constrained)
    kept = balance(flags, torch.from_numpy(value))
    assert not bool((kept & ~flags).any())
    trend = np.broadcast_to(value[:, -1:] - value[:, :1], flags.shape)[kept.numpy()]
    if len(set(np.sign(np.broadcast_to(value[:, -1:] - value[:, :1], flags.shape)[flags.numpy()]))) == 2:
        assert np.sign(trend).sum() == 0
    else:
        assert torch.equal(kept, flags)
    gain, rest = np.diff(value), value[:, -1:] - value[:, :-1]
    wanted = np.where(kept.numpy() & (rest != 0), rest, gain)
    got = TpGrpo(constrained=constrained)(*table_of(value.tolist())).raw.reshape(n, steps)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("missing", range(5))
@pytest.mark.parametrize("local_flip", [False, True])
def test_a_missing_value_takes_its_gains_and_flags_nothing(missing: int, local_flip: bool) -> None:
    value = [0.0, -1.0, 1.0, 0.5, 2.0]
    value[missing] = float("nan")
    sampled, reward = table_of([value])
    credit = TpGrpo(constrained=False, local_flip=local_flip)(sampled, reward)
    touched = [missing in (j, j + 1) for j in range(4)]
    assert credit.raw[0].isnan().tolist() == touched
    flags = turning_points(torch.tensor([value]), False, local_flip=local_flip)[0].tolist()
    usable: dict[int, list[int]] = {0: [], 1: [3], 2: [], 3: [1], 4: []}  # the whole path turns at 1 and 3
    assert [j for j in range(4) if flags[j]] == usable[missing]


def test_what_is_refused() -> None:
    sampled, reward = table_of(TABLE)
    with pytest.raises(ValueError, match="merge the rewards"):
        TpGrpo()(sampled, reward.expand(2, -1))
    for wrong in (VALUES[0], VALUES[:, :1], VALUES.long()):
        with pytest.raises(ValueError, match=r"\[N, T\+1\]"):
            turning_points(wrong)
    with pytest.raises(ValueError, match="one column less"):
        balance(torch.ones(4, 4, dtype=torch.bool), VALUES)


def test_a_turning_point_with_nothing_left_keeps_its_gain() -> None:
    """Step 1 turns down from where the trajectory ends too: all that came from there on is 0."""
    method = TpGrpo(constrained=False, local_flip=True, balance=False)
    assert method(*table_of([(0.0, 1.0, 0.5, 1.0)])).raw.tolist() == [[1.0, -0.5, 0.5]]


def test_each_process_balances_over_all_and_keeps_its_own() -> None:
    """Two processes with the halves of eight trajectories: together the credit of one process with all of them."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(8, 5, generator=generator, dtype=torch.float64).cumsum(1)
    whole = TpGrpo()(*table_of(values.tolist())).raw.reshape(8, -1)
    flags, halves = turning_points(values), values.split(4)

    def gather(mine: Tensor) -> Tensor:
        return flags if mine.dtype == torch.bool else values

    own = [TpGrpo()(*table_of(half.tolist()), Context(rank=rank, gather=gather)) for rank, half in enumerate(halves)]
    assert torch.equal(torch.cat([credit.raw.reshape(4, -1) for credit in own]), whole)
    alone = [TpGrpo()(*table_of(half.tolist())).raw.reshape(4, -1) for half in halves]
    assert not torch.equal(torch.cat(alone), whole)
