"""Which prompts are sampled: filters, replay, the Gaussian curriculum and its draws."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations

import pytest
import torch
from torch import Tensor

from flowrl.prompts.curriculum import (
    ReplayBuffer,
    ReplayEntry,
    accuracy_scaled_kl,
    draw_prompts,
    gaussian_weights,
    informative_groups,
    remember,
    replay,
    update_pass_rates,
)

A, B, C, D, E = range(5)
RATES = [0.5, 0.25, 0.8, 0.75, 0.0]


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_dynamic_sampling_keeps_mixed_groups() -> None:
    reward = column(0, 0, 0, 0, 1, 0, 1, 0, 1, 1, 1, 1)
    for kind in ("success", "std"):
        assert informative_groups(reward, 4, kind).tolist() == [False, True, False]  # type: ignore[arg-type]
    shuffled = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    ids = (9 - torch.arange(12) // 4)[shuffled]  # descending, so the answer is turned round: the middle stays
    assert informative_groups(reward[shuffled], ids, "success").tolist() == [False, True, False]
    three_of_four = column(1, 1, 1, 0, 1, 1, 0, 0)
    assert informative_groups(three_of_four, 4, "success", tol=0.25).tolist() == [False, True]


def test_continuous_rewards_are_judged_by_their_spread() -> None:
    reward = column(0.6, 0.7, 0.8, 0.9, 0.1, 0.1, 0.1, 0.1, 0.49, 0.5, 0.51, 0.5)
    assert informative_groups(reward, 4).tolist() == [True, False, True]
    assert informative_groups(reward, 4, tol=0.05).tolist() == [True, False, False]
    assert informative_groups(reward, 4, "success").tolist() == [False, False, True]
    assert informative_groups(reward, 4, "success", success_at=0.75).tolist() == [True, False, False]


def test_groups_without_two_valid_rewards_are_not_informative() -> None:
    reward = column(1, math.nan, math.nan, 0, math.nan, 1)
    assert informative_groups(reward, 3, "std").tolist() == [False, True]
    assert informative_groups(reward, 3, "success").tolist() == [False, True]
    assert informative_groups(column(math.nan, 1), torch.tensor([0, 1])).tolist() == [False, False]


def test_replay_worked() -> None:
    buffer = remember(ReplayBuffer(), [E, D, C, B, A], RATES[::-1], 0)
    assert [entry.prompt for entry in buffer.entries] == [A, B, D]
    assert replay(buffer, 4, 10) == (A, B, D)  # B and D are equally near: the lower number first
    assert replay(buffer, 3, 10) == (A, B)  # at most 75 %
    assert replay(buffer, 1, 10) == ()
    assert replay(buffer, 4, 9) == ()  # still cooling down
    # Of equally near ones, the longest unused.
    later = remember(remember(ReplayBuffer(), [B], [0.25], 5), [D], [0.75], 3)
    assert replay(later, 4, 20) == (D, B)


def test_replay_counts_uses_and_forgets() -> None:
    buffer = ReplayBuffer(cooldown=1, max_reuse=2)
    for iteration in range(5):
        fresh_or_replayed = [A] if iteration == 0 else list(replay(buffer, 4, iteration))
        buffer = remember(buffer, fresh_or_replayed, [0.5] * len(fresh_or_replayed), iteration)
    assert buffer.entries == (ReplayEntry(A, 0.5, 2, 2),)  # replayed twice, then never again
    assert remember(buffer, [A], [0.5], 9).entries[0].reuses == 3  # met again by chance: still used up
    assert remember(buffer, [A], [0.9], 9).entries == ()  # learnt
    assert remember(buffer, [A], [math.nan], 9) == buffer
    changed = remember(buffer, [B], [0.25], 9)
    assert replace(changed, entries=buffer.entries) == buffer  # the options stay


def test_replay_prefers_a_half() -> None:
    rates = [0.3, 0.45, 0.72, 0.52, 0.6]
    for order in list(permutations(range(5)))[::17]:
        buffer = remember(ReplayBuffer(), order, [rates[prompt] for prompt in order], 0)
        assert replay(buffer, 8, 10) == (3, 1, 4, 0, 2)


def test_gaussian_weights_worked() -> None:
    weights = gaussian_weights(column(0.5, 0.25, 0.75, 1, 0.55))
    assert weights.tolist() == pytest.approx([1, 0.774837, 0.774837, 0.360448, 0.989848], abs=6e-7)


def test_pass_rates_move_slowly() -> None:
    rates = torch.full((3,), 0.5, dtype=torch.float64)
    updated = update_pass_rates(rates, [2, 0], [1.0, math.nan])
    assert updated.tolist() == pytest.approx([0.5, 0.5, 0.55], abs=1e-12)
    assert rates.tolist() == [0.5] * 3  # a plain value
    assert update_pass_rates(rates, [1], [0.25], momentum=0.0).tolist() == [0.5, 0.25, 0.5]


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
    with pytest.raises(ValueError, match="do not divide"):
        informative_groups(column(1, 0, 1), 2)
    with pytest.raises(ValueError, match="needs its group"):
        informative_groups(column(1, 0, 1), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match="success or std"):
        informative_groups(column(1, 0), 2, "range")  # type: ignore[arg-type]
    for kind, tol in (("success", 0.5), ("std", -0.1), ("success", math.nan)):
        with pytest.raises(ValueError, match="tol"):
            informative_groups(column(1, 0), 2, kind, tol=tol)  # type: ignore[arg-type]


def test_replay_refuses() -> None:
    with pytest.raises(ValueError, match="every prompt once"):
        remember(ReplayBuffer(), [A, A], [0.5, 0.5], 0)
    with pytest.raises(ValueError, match="every prompt once"):
        remember(ReplayBuffer(), [A], [0.5, 0.5], 0)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        remember(ReplayBuffer(), [A], [1.5], 0)
    with pytest.raises(ValueError, match="hold -1"):
        replay(ReplayBuffer(), -1, 0)
    for wrong in (ReplayBuffer, lambda band: replace(ReplayBuffer(), band=band)):
        with pytest.raises(ValueError, match="band"):
            wrong((0.8, 0.2))
    with pytest.raises(ValueError, match="share"):
        ReplayBuffer(share=1.5)


def test_curriculum_refuses() -> None:
    with pytest.raises(ValueError, match="width"):
        gaussian_weights(column(0.5), width=0.0)
    with pytest.raises(ValueError, match="pass rates"):
        gaussian_weights(column(1.5))
    for prompts, observed in (([3], [0.5]), ([0, 0], [0.5, 0.5]), ([0], [])):
        with pytest.raises(ValueError, match="every prompt once"):
            update_pass_rates(torch.zeros(3), prompts, observed)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="momentum"):
        update_pass_rates(torch.zeros(3), [0], [0.5], momentum=1.0)
    with pytest.raises(ValueError, match="cannot draw 2"):
        draw_prompts(column(1, 0, 0), 2, 0)
    for weight in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="finite"):
            draw_prompts(column(1, weight), 1, 0)
    for beta, accuracy in ((-1.0, 0.5), (0.02, 1.5)):
        with pytest.raises(ValueError, match="accuracy"):
            accuracy_scaled_kl(beta, accuracy)
