"""Which prompts are sampled: groups that disagree, replay, the Gaussian curriculum and its draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl.prompts.curriculum import (
    Gaussian,
    Replay,
    ReplayEntry,
    accuracy_scaled_kl,
    draw_prompts,
    informative_groups,
)

A, B, C, D, E = range(5)
RATES = [0.5, 0.25, 0.8, 0.75, 0.0]


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_groups_that_disagree_are_informative() -> None:
    reward, groups = column(0.6, 0.7, 0.1, 0.1, 0.5, 0.49, 0.1), torch.tensor([0, 0, 1, 1, 2, 2, 1])
    assert informative_groups(reward, groups).tolist() == [True, False, True]
    shuffled = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    assert informative_groups(reward[shuffled], 9 - groups[shuffled]).tolist() == [True, False, True]


def test_groups_without_two_valid_rewards_are_not_informative() -> None:
    reward = column(1, math.nan, math.nan, 0, math.nan, 1)
    assert informative_groups(reward, torch.arange(6) // 3).tolist() == [False, True]
    assert informative_groups(column(math.nan, 1), torch.tensor([0, 1])).tolist() == [False, False]


def remember(replay: Replay, state: Any, prompts: Sequence[int], rates: Sequence[float], iteration: int) -> Any:
    return replay.remembered(state, prompts, rates, iteration=iteration, total=5)


def again(replay: Replay, state: Any, batch_size: int, iteration: int) -> tuple[int, ...]:
    return replay.again([ReplayEntry(*entry) for entry in state], batch_size, iteration)


def test_replay_worked() -> None:
    replay = Replay()
    state = remember(replay, None, [E, D, C, B, A], RATES[::-1], 0)
    assert [entry[0] for entry in state] == [A, B, D]
    assert again(replay, state, 4, 10) == (A, B, D)  # B and D are equally near: the lower number first
    assert again(replay, state, 3, 10) == (A, B)  # at most 75 %
    assert again(replay, state, 1, 10) == ()
    assert again(replay, state, 4, 9) == ()  # still cooling down
    # Of equally near ones, the longest unused.
    later = remember(replay, remember(replay, None, [B], [0.25], 5), [D], [0.75], 3)
    assert again(replay, later, 4, 20) == (D, B)


def test_replay_counts_uses_and_forgets() -> None:
    replay, state = Replay(cooldown=1, max_reuse=2), None
    for iteration in range(5):
        fresh_or_replayed = [A] if state is None else list(again(replay, state, 4, iteration))
        state = remember(replay, state, fresh_or_replayed, [0.5] * len(fresh_or_replayed), iteration)
    assert state == [[A, 0.5, 2, 2]]  # replayed twice, then never again
    assert remember(replay, state, [A], [0.5], 9) == [[A, 0.5, 9, 3]]  # met again by chance: still used up
    assert remember(replay, state, [A], [0.9], 9) == []  # learnt
    assert remember(replay, state, [A], [math.nan], 9) == state


def test_replay_prefers_a_half() -> None:
    rates, replay = [0.3, 0.45, 0.72, 0.52, 0.6], Replay()
    for order in list(permutations(range(5)))[::17]:
        state = remember(replay, None, order, [rates[prompt] for prompt in order], 0)
        assert again(replay, state, 8, 10) == (3, 1, 4, 0, 2)


def test_gaussian_weights_worked() -> None:
    weights = Gaussian().weights(column(0.5, 0.25, 0.75, 1, 0.55))
    assert weights.tolist() == pytest.approx([1, 0.774837, 0.774837, 0.360448, 0.989848], abs=6e-7)


def test_pass_rates_move_slowly() -> None:
    updated = Gaussian().remembered(None, [2, 0], [1.0, math.nan], iteration=0, total=3)
    assert updated.tolist() == pytest.approx([0.5, 0.5, 0.55], abs=1e-12)
    moved = Gaussian(momentum=0.0).remembered(updated, [1], [0.25], iteration=1, total=3)
    assert moved.tolist() == pytest.approx([0.5, 0.25, 0.55], abs=1e-12)
    assert float(updated[1]) == 0.5  # a plain value


def test_draws_are_distinct_and_repeatable() -> None:
    weights = column(1, 0, 2, 0.5, 0, 3)
    drawn = draw_prompts(weights, 4, 7, "prompts", 0)
    assert sorted(drawn) == [0, 2, 3, 5]
    assert drawn == draw_prompts(weights, 4, 7, "prompts", 0)
    assert all(draw_prompts(weights, n, 7, "prompts", 0) == drawn[:n] for n in range(4))
    assert len({draw_prompts(weights, 4, 7, "prompts", iteration) for iteration in range(20)}) > 5
    assert weights.tolist() == [1, 0, 2, 0.5, 0, 3]
    assert draw_prompts(column(0, 1e-300, 0), 1, 0) == (1,)


def test_draws_follow_the_weights() -> None:
    """First draws by weight; the second by weight among those left. Five standard errors."""
    weights, draws = [0.2, 0.5, 0.3], 2000
    pairs = [draw_prompts(column(*weights), 2, 11, iteration) for iteration in range(draws)]
    for first in range(3):
        for second in {0, 1, 2} - {first}:
            wanted = weights[first] * weights[second] / (1 - weights[first])
            share = sum(pair == (first, second) for pair in pairs) / draws
            assert abs(share - wanted) < 5 * math.sqrt(wanted * (1 - wanted) / draws)


@pytest.mark.parametrize(("accuracy", "wanted"), [(0.0, 0.01), (0.25, 0.012449), (0.5, 0.014621), (1.0, 0.017616)])
def test_kl_tightens_with_accuracy(accuracy: float, wanted: float) -> None:
    assert accuracy_scaled_kl(0.02, accuracy) == pytest.approx(wanted, abs=6e-7)


def test_groups_refuse() -> None:
    with pytest.raises(ValueError, match="needs its group"):
        informative_groups(column(1, 0, 1), torch.zeros(2, dtype=torch.long))


def test_curricula_refuse() -> None:
    for one in (Replay(), Gaussian()):
        for prompts, rates in (([A, A], [0.5, 0.5]), ([A], [0.5, 0.5])):
            with pytest.raises(ValueError, match="every prompt once"):
                one.remembered(None, prompts, rates, iteration=0, total=5)
        for prompts, rates in (([A], [1.5]), ([5], [0.5])):
            with pytest.raises(ValueError, match=r"\[0, 1\]"):
                one.remembered(None, prompts, rates, iteration=0, total=5)
    with pytest.raises(ValueError, match="band"):
        Replay(band=(0.8, 0.2))
    with pytest.raises(ValueError, match="share"):
        Replay(share=1.5)
    with pytest.raises(ValueError, match="width"):
        Gaussian(width=0.0)
    with pytest.raises(ValueError, match="momentum"):
        Gaussian(momentum=1.0)


def test_draws_refuse() -> None:
    with pytest.raises(ValueError, match="cannot draw 2"):
        draw_prompts(column(1, 0, 0), 2, 0)
    for weight in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="finite"):
            draw_prompts(column(1, weight), 1, 0)
    for beta, accuracy in ((-1.0, 0.5), (0.02, 1.5)):
        with pytest.raises(ValueError, match="accuracy"):
            accuracy_scaled_kl(beta, accuracy)
