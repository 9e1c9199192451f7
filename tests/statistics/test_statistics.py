"""Intervals against closed forms, simulated coverage and the cases where they cannot be known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flowrl.statistics.bootstrap import (
    MIN_PROMPTS,
    Interval,
    ScoreRow,
    bootstrap_mean,
    over_seeds,
    paired_difference,
    paired_rows,
    stratified_score,
    student_quantile,
    task_scores,
)


def width(interval: Interval) -> float:
    return interval.high - interval.low


def rows_of(task: str, value_PS: np.ndarray) -> list[ScoreRow]:
    """Rows of a [prompts, samples] table."""
    return [
        ScoreRow(task=task, prompt=prompt, sample=sample, value=float(value))
        for (prompt, sample), value in np.ndenumerate(value_PS)
    ]


def assert_nominal(hits: int, repetitions: int, level: float, slack: float) -> None:
    """Coverage within three binomial standard errors, and `slack` for what a finite sample lacks."""
    tolerance = 3 * math.sqrt(level * (1 - level) / repetitions) + slack
    assert abs(hits / repetitions - level) < tolerance


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_interval_of_a_mean_covers_as_often_as_it_says(level: float) -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for seed in range(400):
        interval = bootstrap_mean(rng.normal(2.0, 3.0, size=40), level=level, num_resamples=400, seed=seed)
        hits += interval.low <= 2.0 <= interval.high
    assert_nominal(hits, 400, level, slack=0.01)


def test_interval_of_the_stratified_score_covers_when_prompts_differ() -> None:
    # Two tasks: 40 prompts of uneven difficulty (prompts resampled) and one prompt with 60 images (images resampled).
    rng = np.random.default_rng(2)
    truth = (0.5 + 0.3) / 2
    hits = 0
    for seed in range(300):
        difficulty_P = rng.beta(1.0, 1.0, size=(40, 1))
        rows = rows_of("position", rng.random((40, 4)) < difficulty_P) + rows_of("counting", rng.random((1, 60)) < 0.3)
        interval = stratified_score(rows, num_resamples=400, seed=seed)
        hits += interval.low <= truth <= interval.high
    assert_nominal(hits, 300, 0.95, slack=0.015)


def test_the_bounds_of_a_mean_agree_with_the_normal_closed_form() -> None:
    value_N = np.random.default_rng(3).normal(size=800)
    interval = bootstrap_mean(value_N, num_resamples=20_000)
    half = 1.959964 * value_N.std(ddof=1) / math.sqrt(800)
    assert interval.mean == pytest.approx(value_N.mean(), abs=1e-12)
    assert interval.low == pytest.approx(value_N.mean() - half, abs=0.05 * half)
    assert interval.high == pytest.approx(value_N.mean() + half, abs=0.05 * half)


def test_small_samples_are_widened_to_the_unbiased_spread() -> None:
    # The plain bootstrap of n = 4 has the spread s·sqrt((n-1)/n)/sqrt(n); ours must have s/sqrt(n).
    value_N = np.array([-3.0, -1.0, 1.0, 3.0])
    one_sigma = bootstrap_mean(value_N, level=0.6827, num_resamples=50_000)
    many = bootstrap_mean(value_N, level=0.99, num_resamples=50_000)
    assert width(one_sigma) / 2 == pytest.approx(value_N.std(ddof=1) / 2, rel=0.12)  # few distinct means: coarse
    assert value_N.min() <= many.low <= many.high <= value_N.max()


def test_clusters_widen_the_interval_by_the_design_effect() -> None:
    # Values equal within clusters of m: the variance of the mean is m times that of independent values.
    rng = np.random.default_rng(4)
    value_N = np.repeat(rng.normal(size=200), 9)
    label_N = np.repeat(np.arange(200), 9)
    ratio = width(bootstrap_mean(value_N, label_N)) / width(bootstrap_mean(value_N))
    assert ratio == pytest.approx(3.0, rel=0.1)


def test_a_cluster_for_each_value_is_no_cluster() -> None:
    value_N = np.random.default_rng(5).normal(size=50)
    assert bootstrap_mean(value_N, [f"p{i}" for i in range(50)]) == bootstrap_mean(value_N)


def test_score_is_the_macro_mean_and_tasks_stand_alone() -> None:
    rows = rows_of("a", np.array([[1.0, 0.0], [1.0, 1.0]])) + rows_of("b", np.array([[0.0]])) + rows_of("c", np.eye(3))
    assert stratified_score(rows).mean == pytest.approx((3 / 4 + 0 + 1 / 3) / 3)
    means = {task: interval.mean for task, interval in task_scores(rows).items()}
    assert means == pytest.approx({"a": 0.75, "b": 0, "c": 1 / 3})


def test_prompts_are_resampled_from_twenty_on_and_images_below() -> None:
    # Images of a prompt agree fully, so resampling prompts is twice as wide with four images each.
    def ratio(num_prompts: int) -> float:
        value_P = np.arange(num_prompts) % 2
        clustered = stratified_score(rows_of("t", np.repeat(value_P[:, None], 4, axis=1)))
        return width(clustered) / width(bootstrap_mean(np.repeat(value_P, 4)))

    # Twenty prompts have few distinct means, so the bounds are coarse.
    assert ratio(MIN_PROMPTS) > 1.7
    assert ratio(MIN_PROMPTS - 1) == pytest.approx(1.0, rel=0.15)


def test_pairing_narrows_the_interval_of_correlated_scores() -> None:
    rng = np.random.default_rng(6)
    shared = rng.normal(size=(60, 4))
    before = rows_of("t", shared)
    after = rows_of("t", shared + 0.1 + 0.1 * rng.normal(size=(60, 4)))
    difference = paired_difference(before, after)
    unpaired = math.hypot(width(stratified_score(before)), width(stratified_score(after)))
    assert width(difference) < unpaired / 4
    assert difference.mean == pytest.approx(stratified_score(after).mean - stratified_score(before).mean, abs=1e-12)
    assert difference.excludes(0.0)


def test_order_of_rows_and_of_calls_changes_nothing() -> None:
    rng = np.random.default_rng(7)
    rows = rows_of("b", rng.random((25, 2))) + rows_of("a", rng.random((3, 5)))
    shuffled = [rows[i] for i in rng.permutation(len(rows))]
    assert stratified_score(rows) == stratified_score(shuffled)
    assert stratified_score(rows) != stratified_score(rows, seed=1)
    partner = [ScoreRow(task=r.task, prompt=r.prompt, sample=r.sample, value=1 - r.value) for r in rows]
    assert paired_difference(rows, partner) == paired_difference(shuffled, partner)


def test_chunked_draws_equal_one_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    value_N = np.random.default_rng(8).normal(size=31)
    whole = bootstrap_mean(value_N, num_resamples=300)
    monkeypatch.setattr("flowrl.statistics.bootstrap.MAX_DRAWS", 100)
    assert bootstrap_mean(value_N, num_resamples=300) == whole


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1])
def test_equal_values_have_no_width(value: float) -> None:
    interval = stratified_score(rows_of("t", np.full((7, 3), value)))
    assert interval.low == pytest.approx(value, abs=1e-15)
    assert interval.low <= interval.mean <= interval.high
    assert width(interval) < 1e-15


def test_one_prompt_falls_back_to_images_and_one_image_stays_unknown() -> None:
    one_prompt = rows_of("t", np.array([[0.0, 1.0, 1.0, 0.0, 1.0, 0.0]]))
    assert stratified_score(one_prompt).known
    single = stratified_score(rows_of("t", np.array([[1.0]])))
    assert single.mean == 1.0
    assert math.isnan(single.low)
    assert not single.known
    assert not single.excludes(0.0)
    assert not bootstrap_mean([1.0, 2.0], ["same", "same"]).known


@pytest.mark.parametrize(
    ("level", "degrees", "expected"),
    [(0.95, 1, 12.7062), (0.95, 2, 4.30265), (0.95, 4, 2.77645), (0.99, 9, 3.24984), (0.95, 1000, 1.96234)],
)
def test_student_quantiles_agree_with_the_tables(level: float, degrees: int, expected: float) -> None:
    assert student_quantile(level, degrees) == pytest.approx(expected, rel=1e-5)


def test_over_seeds_is_students_interval_and_covers_with_three_seeds() -> None:
    assert over_seeds([1.0, 2.0, 3.0]).high == pytest.approx(2 + 4.30265 / math.sqrt(3), rel=1e-5)
    assert not over_seeds([0.4]).known
    rng = np.random.default_rng(9)
    intervals = [over_seeds(rng.normal(size=3)) for _ in range(300)]
    assert_nominal(sum(interval.low <= 0 <= interval.high for interval in intervals), 300, 0.95, slack=0.0)


def test_errors_teach() -> None:
    rows = rows_of("t", np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"1 rows have no partner.*\('t', 1, 1\).*before only"):
        paired_rows(rows, rows[:-1])
    with pytest.raises(ValueError, match="appears twice"):
        stratified_score([*rows, rows[0]])
    with pytest.raises(ValueError, match="no rows to score"):
        stratified_score([])
    with pytest.raises(ValueError, match="number 1 is nan"):
        bootstrap_mean([1.0, math.nan])
    with pytest.raises(ValueError, match="at least one number"):
        bootstrap_mean([])
    with pytest.raises(ValueError, match="3 labels for 2 values"):
        bootstrap_mean([1.0, 2.0], ["a", "b", "c"])
    with pytest.raises(ValueError, match=r"got 95.*0\.95"):
        bootstrap_mean([1.0, 2.0], level=95)
