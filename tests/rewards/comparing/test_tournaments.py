"""Tournaments against published examples, brute force and an independent optimiser."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from scipy.optimize import minimize

from flowrl.rewards.comparing.tournaments import (
    Keys,
    Matches,
    Play,
    Scores,
    all_pairs,
    anchor,
    bracket,
    bradley_terry,
    hold,
    rank_reward,
    ring_pairs,
    round_robin,
    single_elimination,
    swiss,
    win_rate,
)

NAN = np.nan
SCHEMES: dict[str, Callable[[int], Play]] = {
    "anchor": anchor,
    "round_robin": round_robin,
    "single_elimination": single_elimination,
    "swiss": swiss,
}


def play(tournament: Play, strengths: list[float], failing: frozenset[int] = frozenset()) -> tuple[Keys, Matches]:
    """The keys and all matches of one tournament whose judge returns strengths, NaN for matches with a failing one."""
    value = np.array([NAN if i in failing else float(s) for i, s in enumerate(strengths)])
    seen: list[Matches] = []

    def judge(rounds: list[Matches]) -> list[Scores]:
        seen.append(rounds[0])
        scores = value[rounds[0]]
        scores[np.isnan(scores).any(1)] = NAN
        return [scores]

    (keys,) = hold([tournament], judge)
    return keys, np.concatenate(seen)


def close(got: Keys, wanted: list[float]) -> None:
    np.testing.assert_allclose(got, wanted, rtol=0, atol=5e-5)


def matrix(count: int, verdicts: dict[tuple[int, int], float]) -> np.ndarray:
    wins = np.full((count, count), NAN)
    for pair, verdict in verdicts.items():
        wins[pair] = verdict
    return wins


# ---- win rates ---------------------------------------------------------------------------------------------------

FOUR = {(0, 1): 1.0, (0, 2): 0.0, (0, 3): 1.0, (1, 2): 0.0, (2, 3): 1.0}


def test_win_rate_of_the_published_example_with_an_unreadable_pair_as_a_tie() -> None:
    close(win_rate(matrix(4, FOUR | {(1, 3): 0.5})), [2 / 3, 1 / 6, 1.0, 1 / 6])


def test_win_rate_leaves_a_failed_pair_out() -> None:
    close(win_rate(matrix(4, FOUR)), [2 / 3, 0.0, 1.0, 0.0])
    close(win_rate(matrix(4, FOUR), min_comparisons=3), [2 / 3, NAN, 1.0, NAN])
    close(win_rate(matrix(3, {(0, 1): 1.0})), [1.0, 0.0, NAN])


@pytest.mark.parametrize("count", [2, 3, 7, 12])
def test_win_rates_of_all_pairs_sum_to_half_the_group(count: int) -> None:
    verdicts = np.random.default_rng(count).choice([0.0, 0.5, 1.0, 0.3], (count, count))
    one_order = np.where(np.triu(np.ones((count, count)), 1) > 0, verdicts, NAN)
    for wins in (verdicts, one_order):  # the diagonal of the full matrix must not count
        assert win_rate(wins).sum() == pytest.approx(count / 2, abs=1e-12)


def test_first_image_always_wins() -> None:
    """In one order the rates say the position alone; in both they say nothing."""
    single = np.where(np.triu(np.ones((5, 5)), 1) > 0, 1.0, NAN)
    close(win_rate(single), [1.0, 0.75, 0.5, 0.25, 0.0])
    close(win_rate(np.ones((5, 5))), [0.5] * 5)


def test_both_orders_are_averaged_and_one_alone_is_taken() -> None:
    close(win_rate(matrix(2, {(0, 1): 1.0, (1, 0): 0.5})), [0.75, 0.25])
    close(win_rate(matrix(2, {(1, 0): 0.9})), [0.1, 0.9])


# ---- ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ties", "denominator", "wanted"),
    [
        ("order", "n-1", [1, 0, 0.3333, 0.6667]),
        ("order", "n", [0.75, 0, 0.25, 0.5]),
        ("average", "n-1", [1, 0, 0.5, 0.5]),
        ("average", "n", [0.75, 0, 0.375, 0.375]),
        ("best", "n-1", [1, 0, 0.6667, 0.6667]),
    ],
)
def test_ranks(ties: str, denominator: str, wanted: list[float]) -> None:
    got = rank_reward(np.array([0.3, 0.1, 0.2, 0.2]), ties=ties, denominator=denominator)  # type: ignore[arg-type]
    np.testing.assert_allclose(got, wanted, rtol=0, atol=5e-5)
    with_failures = rank_reward(
        np.array([NAN, 0.3, 0.1, NAN, 0.2, 0.2]),
        ties=ties,  # type: ignore[arg-type]
        denominator=denominator,  # type: ignore[arg-type]
    )
    np.testing.assert_allclose(with_failures, [NAN, *wanted[:2], NAN, *wanted[2:]], rtol=0, atol=5e-5)


def test_ranks_of_equal_values_and_of_one() -> None:
    close(rank_reward(np.ones(3)), [0.5] * 3)
    close(rank_reward(np.ones(3), ties="best"), [0.0] * 3)
    close(rank_reward(np.array([1.0, 1.0, 2.0]), ties="best"), [0.0, 0.0, 1.0])
    close(rank_reward(np.array([NAN, 4.0])), [NAN, NAN])


# ---- tournaments -------------------------------------------------------------------------------------------------


def test_bracket_slots() -> None:
    assert bracket(2) == [0, 1]
    assert bracket(4) == [0, 3, 1, 2]
    assert bracket(8) == bracket(5) == [0, 7, 3, 4, 1, 6, 2, 5]
    assert all(a + b == 15 for a, b in zip(bracket(16)[::2], bracket(16)[1::2], strict=True))


def test_single_elimination_of_the_published_examples() -> None:
    keys, matches = play(single_elimination(4), [3, 1, 4, 2])
    reward = rank_reward(keys)
    close(reward, [0.6667, 0, 1, 0.3333])
    assert len(matches) == 6
    close((reward - reward.mean()) / (reward.std(ddof=1) + 1e-6), [0.3873, -1.1619, 1.1619, -0.3873])
    keys, matches = play(single_elimination(6, byes="published"), [5, 3, 8, 1, 9, 2])
    close(rank_reward(keys), [0.8, 0.4, 0.6, 0, 1, 0.2])
    assert len(matches) == 10


def test_byes_go_to_the_top_seeds() -> None:
    """Seeds by strength are 4, 2, 0, 1, 5, 3: the first two skip a round, and the second strongest comes second."""
    keys, matches = play(single_elimination(6), [5, 3, 8, 1, 9, 2])
    close(rank_reward(keys), [0.6, 0.4, 0.8, 0, 1, 0.2])
    assert matches[5:].tolist() == [[1, 5], [0, 3], [4, 1], [2, 0], [4, 2]]


@pytest.mark.parametrize("count", range(2, 14))
def test_single_elimination_crowns_the_strongest_and_always_takes_as_many_matches(count: int) -> None:
    strengths = np.random.default_rng(count).permutation(count).astype(float).tolist()
    for byes in ("top_seeds", "published"):
        keys, matches = play(single_elimination(count, byes=byes), strengths)  # type: ignore[arg-type]
        assert len(matches) == 2 * (count - 1)
        assert int(np.argmax(keys)) == int(np.argmax(strengths))
        assert sorted(rank_reward(keys).tolist()) == pytest.approx([k / (count - 1) for k in range(count)])
    second = int(np.argsort(strengths)[-2])
    keys, _ = play(single_elimination(count), strengths)
    assert rank_reward(keys)[second] == pytest.approx((count - 2) / (count - 1)), "the best two meet last"


def test_a_tie_lets_the_first_slot_on_and_equal_losers_share_their_place() -> None:
    keys, matches = play(single_elimination(4), [1, 1, 1, 1])
    assert matches[3:].tolist() == [[0, 3], [1, 2], [0, 1]]
    close(rank_reward(keys), [1, 2 / 3, 1 / 6, 1 / 6])


def test_round_robin_and_anchor_of_the_published_examples() -> None:
    keys, matches = play(round_robin(4), [1, 2, 2, 3])
    close(keys * 3, [0, 1.5, 1.5, 3])
    close(rank_reward(keys, ties="best"), [0, 0.6667, 0.6667, 1])
    assert len(matches) == 6
    keys, matches = play(anchor(4), [3, 1, 4, 3])
    close(rank_reward(keys, ties="best"), [0.6667, 0, 1, 0.6667])
    assert matches.tolist() == [[0, 1], [0, 2], [0, 3]]


def test_swiss_of_four_by_hand() -> None:
    """Round 1: 0 beats 1, 2 beats 3. Round 2: 2 beats 0, 1 beats 3. Points 1 1 2 0; Buchholz of 0: 1+2, of 1: 1+0."""
    keys, matches = play(swiss(4), [3, 2, 4, 1])
    assert matches.tolist() == [[0, 1], [2, 3], [0, 2], [1, 3]]
    close(rank_reward(keys), [2 / 3, 1 / 3, 1, 0])


def test_swiss_bye_counts_a_point_and_ties_share_their_place() -> None:
    """All draws of three: one sits out in each of two rounds and has 1 + 1/2; the other, with 1, is last."""
    keys, matches = play(swiss(3), [5, 5, 5])
    assert matches.tolist() == [[0, 1], [2, 0]]
    close(rank_reward(keys), [0, 0.75, 0.75])


@pytest.mark.parametrize("count", range(2, 26))
def test_swiss_never_repeats_a_match(count: int) -> None:
    for seed in range(8):
        strengths = np.random.default_rng(seed).integers(0, 5, count).astype(float).tolist()
        keys, matches = play(swiss(count), strengths)
        assert len(matches) == int(np.ceil(np.log2(count))) * (count // 2)
        assert len({frozenset(pair) for pair in matches.tolist()}) == len(matches)
        assert rank_reward(keys).sum() == pytest.approx(count / 2)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_nobody_loses_by_a_failure(scheme: str) -> None:
    """Member 2 never gets a verdict: it has no place, and the others rank as they are."""
    keys, _ = play(SCHEMES[scheme](5), [5, 4, 0, 2, 1], failing=frozenset({2}))
    assert np.isnan(keys).tolist() == [False, False, True, False, False]
    reward = rank_reward(keys)
    assert reward[0] == 1
    assert reward[4] == 0
    assert np.nanmean(reward) == pytest.approx(0.5)
    keys, _ = play(SCHEMES[scheme](4), [1, 2, 3, 4], failing=frozenset(range(4)))
    assert np.isnan(keys).all()


@pytest.mark.parametrize("scheme", ["round_robin", "single_elimination", "swiss"])
def test_a_failing_anchor_takes_nobody_with_it(scheme: str) -> None:
    keys, _ = play(SCHEMES[scheme](5), [0, 4, 3, 2, 1], failing=frozenset({0}))
    assert np.isnan(keys).tolist() == [True, False, False, False, False]
    assert int(np.nanargmax(keys)) == 1


def test_rounds_of_several_tournaments_are_asked_together() -> None:
    calls: list[list[int]] = []
    strengths = [np.arange(4.0), np.arange(8.0), np.arange(3.0)]

    def judge(rounds: list[Matches]) -> list[Scores]:
        calls.append([len(matches) for matches in rounds])
        return [own[matches] for own, matches in zip(strengths, rounds, strict=True)]

    keys = hold([single_elimination(4), single_elimination(8), round_robin(3)], judge)
    assert calls == [[3, 7, 3], [2, 4, 0], [1, 2, 0], [0, 1, 0]]
    for own, key in zip(strengths, keys, strict=True):
        assert int(np.argmax(key)) == len(own) - 1
    assert hold([], judge) == []


# ---- pairs and the Bradley-Terry model ---------------------------------------------------------------------------


def test_pairs() -> None:
    assert all_pairs(4).tolist() == [list(pair) for pair in itertools.combinations(range(4), 2)]
    assert all_pairs(1).shape == (0, 2)
    assert ring_pairs(range(3), 2).tolist() == all_pairs(3).tolist()
    assert ring_pairs([2, 0, 3, 1], 2).tolist() == [[0, 2], [0, 3], [1, 3], [1, 2]]


@pytest.mark.parametrize(("count", "opponents"), [(5, 2), (8, 4), (9, 6), (24, 4)])
def test_a_ring_gives_everyone_as_many_opponents(count: int, opponents: int) -> None:
    order = np.random.default_rng(0).permutation(count).tolist()
    pairs = ring_pairs(order, opponents)
    assert len({tuple(pair) for pair in pairs.tolist()}) == count * opponents // 2
    assert np.bincount(pairs.ravel()).tolist() == [opponents] * count
    assert (pairs[:, 0] < pairs[:, 1]).all()


def test_bradley_terry_of_two_in_closed_form() -> None:
    """A draw: equal. One win of two orders, one tie: the root of w (1 - s) - (1 - w) s = penalty theta, w = 3/4."""
    close(bradley_terry(matrix(2, {(0, 1): 0.5})), [0, 0])
    theta = bradley_terry(matrix(2, {(0, 1): 1.0, (1, 0): 0.5}), penalty=1e-9)
    close(theta, [np.log(3) / 2, -np.log(3) / 2])
    theta = bradley_terry(matrix(2, {(0, 1): 1.0}))
    assert 1 / (1 + np.exp(theta[0] - theta[1])) == pytest.approx(0.01 * theta[0], abs=1e-10)


@pytest.mark.parametrize("penalty", [0.01, 1.0])
def test_bradley_terry_against_an_independent_optimiser(penalty: float) -> None:
    rng = np.random.default_rng(0)
    verdicts = {(i, j): float(rng.random()) for i, j in ring_pairs(range(7), 4).tolist()}

    def loss(theta: np.ndarray) -> float:
        total = penalty / 2 * float((theta**2).sum())
        for (i, j), p in verdicts.items():
            total += p * np.log1p(np.exp(theta[j] - theta[i])) + (1 - p) * np.log1p(np.exp(theta[i] - theta[j]))
        return float(total)

    best = minimize(loss, np.zeros(7), method="BFGS", options={"gtol": 1e-9})
    theta = bradley_terry(matrix(7, verdicts), penalty=penalty)
    np.testing.assert_allclose(theta, best.x, atol=1e-5)
    assert theta.sum() == pytest.approx(0, abs=1e-9)


def test_bradley_terry_recovers_strengths_from_a_part_of_the_pairs() -> None:
    strengths = np.array([0.0, 1.0, -0.5, 2.0, 0.3, -1.0])
    strengths -= strengths.mean()
    pairs = ring_pairs([3, 0, 5, 1, 4, 2], 2)
    verdicts = {(i, j): float(1 / (1 + np.exp(strengths[j] - strengths[i]))) for i, j in pairs.tolist()}
    np.testing.assert_allclose(bradley_terry(matrix(6, verdicts), penalty=1e-10), strengths, atol=1e-6)


def test_bradley_terry_keeps_to_the_largest_connected_part() -> None:
    theta = bradley_terry(matrix(6, {(0, 1): 1.0, (2, 3): 1.0, (3, 4): 1.0}))
    assert np.isnan(theta).tolist() == [True, True, False, False, False, True]
    assert theta[2] > theta[3] > theta[4]
    theta = bradley_terry(matrix(6, {(0, 1): 1.0, (2, 3): 1.0, (3, 4): 1.0}), min_comparisons=2)
    assert np.isnan(theta).tolist() == [True, True, True, False, True, True]
    assert np.isnan(bradley_terry(matrix(3, {}))).all()
