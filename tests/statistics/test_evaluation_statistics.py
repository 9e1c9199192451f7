"""Intervals, paired comparison, detectable differences, and several trainings."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flowrl.benchmarks.geneval.metadata import TASKS
from flowrl.statistics.bootstrap import Interval
from flowrl.statistics.means import ScoreRow, mean_interval, pooled
from flowrl.statistics.paired import (
    best_of_prompt,
    compare,
    detectable,
    over_runs,
    summarise,
)


def rows(task: str, correct: int, total: int, samples: int = 4) -> list[ScoreRow]:
    return [
        ScoreRow(task=task, prompt=f"{task} {i // samples}", sample=i % samples, value=float(i < correct))
        for i in range(total)
    ]


def test_the_two_overall_numbers_of_a_published_log() -> None:
    counts = [(289, 320), (214, 396), (120, 320), (303, 376), (32, 400), (60, 364)]
    listed = [row for task, (right, total) in zip(TASKS, counts, strict=True) for row in rows(task, right, total)]
    found = summarise(listed, order=TASKS)
    assert found.macro.mean == pytest.approx(0.478203, abs=5e-7)
    assert found.micro.mean == pytest.approx(0.467831, abs=5e-7)
    assert list(found.tasks) == list(TASKS)
    expected = [0.903125, 0.540404, 0.375, 0.805851, 0.08, 0.164835]
    assert [interval.mean for interval in found.tasks.values()] == pytest.approx(expected, abs=5e-7)
    assert found.macro.low < found.macro.mean < found.macro.high
    # Images stand sorted, so all but one prompt of a task are wholly right or wholly wrong.
    prompts = [-(-right // 4) for right, _ in counts]
    assert found.any_correct.mean == pytest.approx(sum(prompts) / sum(total // 4 for _, total in counts))


def test_pass_at_n_counts_prompts() -> None:
    values = {"a": [0, 0, 1, 0], "b": [0, 0, 0, 0], "c": [1, 1, 1, 1]}
    listed = [ScoreRow(task="t", prompt=p, sample=s, value=v) for p, vs in values.items() for s, v in enumerate(vs)]
    assert {row.prompt: row.value for row in best_of_prompt(listed)} == {"a": 1, "b": 0, "c": 1}
    below = [ScoreRow(task="t", prompt="a", sample=sample, value=value) for sample, value in enumerate((-2.0, -1.0))]
    assert [row.value for row in best_of_prompt(below)] == [-1.0]
    found = summarise(listed)
    assert found.any_correct.mean == pytest.approx(2 / 3)
    assert found.micro.mean == pytest.approx(5 / 12)


def test_tasks_that_were_not_named_come_last_by_name() -> None:
    listed = [*rows("zebra", 1, 2), *rows("colors", 1, 2), *rows("apple", 1, 2), *rows("counting", 1, 2)]
    assert list(summarise(listed, order=TASKS).tasks) == ["counting", "colors", "apple", "zebra"]


def test_prompts_are_the_units_of_the_micro_interval() -> None:
    whole = [ScoreRow(task="t", prompt=p, sample=s, value=float(p % 2)) for p in range(40) for s in range(4)]
    by_prompt = mean_interval([float(p % 2) for p in range(40)])
    found = pooled(whole)
    assert found.mean == 0.5
    # Four equal images of a prompt say no more than one.
    assert found.high - found.low == pytest.approx(by_prompt.high - by_prompt.low, rel=0.1)
    free = mean_interval([row.value for row in whole])
    assert found.high - found.low > 1.7 * (free.high - free.low)


def test_pairs_give_a_narrower_interval_than_two_models_apart() -> None:
    rng = np.random.default_rng(0)
    hard = rng.random(60) < 0.5
    before = [ScoreRow(task="t", prompt=p, sample=s, value=float(hard[p])) for p in range(60) for s in range(2)]
    gains = {p for p in range(60) if not hard[p]} - {min(p for p in range(60) if not hard[p])}
    chosen = sorted(gains)[:9]
    after = [
        ScoreRow(task="t", prompt=row.prompt, sample=row.sample, value=1.0 if row.prompt in chosen else row.value)
        for row in before
    ]
    found = compare(before, after, order=["t"])
    assert found.micro.mean == found.macro.mean == pytest.approx(9 / 60)
    assert (found.gained, found.lost, found.pairs) == (18, 0, 120)
    assert found.any_correct.mean == pytest.approx(9 / 60)
    assert found.tasks["t"].low > 0
    alone = summarise(after).micro
    assert found.micro.high - found.micro.low < 0.8 * (alone.high - alone.low)
    back = compare(after, before)
    assert (back.gained, back.lost) == (0, 18)
    assert back.macro.mean == -found.macro.mean


def test_a_comparison_without_partners_is_refused() -> None:
    with pytest.raises(ValueError, match="have no partner"):
        compare(rows("a", 2, 8), rows("a", 2, 12))


def test_the_detectable_difference_is_a_multiple_of_the_standard_error() -> None:
    error = 0.02
    interval = Interval(mean=0.5, low=0.5 - 1.959964 * error, high=0.5 + 1.959964 * error)
    assert detectable(interval, paired=True) == pytest.approx(2.801585 * error, rel=1e-6)
    assert detectable(interval, paired=False) == pytest.approx(2.801585 * error * math.sqrt(2), rel=1e-6)
    assert math.isnan(detectable(Interval(mean=0.5, low=math.nan, high=math.nan), paired=True))


def test_a_difference_of_that_size_is_found_in_four_of_five() -> None:
    rng = np.random.default_rng(3)
    size = detectable(mean_interval(rng.normal(size=80)), paired=True)
    size *= 1 / 0.98  # this draw's own deviation is of no interest; 2.8 / sqrt(80) is 0.313
    assert size == pytest.approx(2.8016 / math.sqrt(80), rel=0.15)
    found = [mean_interval(rng.normal(2.8016 / math.sqrt(80), size=80)).low > 0 for _ in range(300)]
    assert np.mean(found) == pytest.approx(0.8, abs=0.08)  # three standard errors of 300 draws


def test_several_trainings_have_students_interval() -> None:
    rows = [{"a": 0.5, "b": 1.0, "c": 2.0}, {"a": 0.7, "b": math.nan, "d": 1.0}]
    found = over_runs(rows, shares=True)
    assert list(found) == ["a"]
    assert found["a"].mean == pytest.approx(0.6)
    # t(0.95, 1 degree) = 12.7062, s = 0.141421
    assert (found["a"].low, found["a"].high) == (0.0, 1.0)  # as shares are
    change = over_runs(rows)["a"]  # of a scorer, or a change
    assert change.high - 0.6 == pytest.approx(12.7062 * 0.141421 / math.sqrt(2), rel=1e-4)
    assert not over_runs([{"a": 0.5}])["a"].known
