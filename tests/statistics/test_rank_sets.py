"""Ranks that scores may have: against Tukey's range, by simulation, and where order is certain or open."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import studentized_range

from flowrl.statistics.bootstrap import Interval
from flowrl.statistics.means import ScoreRow, stratified_score
from flowrl.statistics.rank_sets import factor_of_pairs, family_factor, rank_sets, widen

Z = 1.959963984540054


def rows_of(values: np.ndarray, task: str = "a") -> list[ScoreRow]:
    return [ScoreRow(task=task, prompt=prompt, sample=0, value=float(value)) for prompt, value in enumerate(values)]


def ranks_of(models: list[list[ScoreRow]]) -> list[tuple[int, int]]:
    factor = family_factor(models, by_task=True)
    return rank_sets(len(models), {
        (one, other): widen(stratified_score(models[one], base=models[other]), factor)
        for one in range(len(models)) for other in range(one + 1, len(models))
    })  # fmt: skip


@pytest.mark.parametrize("count", [3, 5, 8])
def test_independent_models_have_the_factor_of_tukeys_range(count: int) -> None:
    values = np.random.default_rng(1).normal(size=(count, 4000))
    expected = studentized_range.ppf(0.95, count, np.inf) / math.sqrt(2) / Z
    found = family_factor([rows_of(part) for part in values], by_task=True)
    assert found == pytest.approx(expected, rel=0.04)  # 2,000 resamples: their quantile has an error of 1 to 2 %
    assert found < factor_of_pairs(count * (count - 1) // 2)


def test_a_single_pair_needs_no_factor() -> None:
    values = np.random.default_rng(1).normal(size=(2, 30))
    assert family_factor([rows_of(part) for part in values], by_task=True) == 1.0
    assert factor_of_pairs(1) == pytest.approx(1.0)
    assert factor_of_pairs(10) == pytest.approx(2.807034 / Z, rel=1e-5)  # 1 - 0.05/20 of the normal


def test_strata_are_drawn_apart() -> None:
    """Two tasks with mirrored values: drawn together, no difference would ever move."""
    values = np.random.default_rng(2).normal(size=(3, 500))
    models = [[*rows_of(part, "a"), *rows_of(-part, "b")] for part in values]
    assert family_factor(models, by_task=True) == pytest.approx(2.344 / Z, rel=0.05)  # range of three over root two


def test_sets_of_ranks() -> None:
    def change(mean: float, half: float) -> Interval:
        return Interval(mean=mean, low=mean - half, high=mean + half)

    found = rank_sets(3, {(0, 1): change(0.1, 0.2), (0, 2): change(0.5, 0.1), (2, 1): change(-0.4, 0.1)})
    assert found == [(1, 2), (1, 2), (3, 3)]
    assert rank_sets(3, {}) == [(1, 3)] * 3
    unknown = Interval(mean=9.0, low=math.nan, high=math.nan)
    assert rank_sets(2, {(0, 1): unknown}) == [(1, 2)] * 2


@pytest.mark.slow
def test_equal_models_are_seldom_ranked_and_better_ones_are() -> None:
    """Of 150 tables of four equal models at most 5 % may name an order: 7.5, and three standard errors of 2.7."""
    rng, wrong = np.random.default_rng(3), 0
    for _ in range(150):
        shared = rng.normal(size=60)
        models = [rows_of(shared + rng.normal(size=60)) for _ in range(4)]
        wrong += ranks_of(models) != [(1, 4)] * 4
    assert wrong <= 15
    shared = rng.normal(size=60)
    models = [rows_of(shared + 2.0 * place + rng.normal(size=60)) for place in range(4)]
    assert ranks_of(models) == [(4, 4), (3, 3), (2, 2), (1, 1)]


def test_models_that_agree_stay_open() -> None:
    same = [rows_of(np.ones(12)) for _ in range(3)]
    assert family_factor(same, by_task=True) == 1.0
    assert ranks_of(same) == [(1, 3)] * 3
