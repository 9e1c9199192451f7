"""Intervals of means against closed forms and textbook numbers, and the cases where they cannot be known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from flowrl.statistics.bootstrap import Interval, resample, student_quantile
from flowrl.statistics.means import (
    CHANGES,
    SHARE_CHANGES,
    SHARES,
    VERDICTS,
    ScoreRow,
    claim,
    ends_of,
    mean_interval,
    over_seeds,
    paired_rows,
    partners,
    pooled,
    range_of,
    stratified_score,
    task_scores,
    unknown_because,
    wilson,
)
from flowrl.statistics.reliability import retest


def width(interval: Interval) -> float:
    return interval.high - interval.low


def rows_of(task: str, value_PS: np.ndarray) -> list[ScoreRow]:
    """Rows of a [prompts, samples] table."""
    return [
        ScoreRow(task=task, prompt=prompt, sample=sample, value=float(value))
        for (prompt, sample), value in np.ndenumerate(value_PS)
    ]


def test_the_interval_of_a_mean_is_students() -> None:
    value_N = np.random.default_rng(3).normal(size=9)
    for level in (0.8, 0.95):
        low, high = stats.t.interval(level, 8, value_N.mean(), stats.sem(value_N))
        found = mean_interval(value_N, level=level)
        assert (found.mean, found.low, found.high) == pytest.approx((value_N.mean(), low, high), abs=1e-12)


def test_images_of_a_prompt_count_once() -> None:
    # Five prompts of four images each: Student's interval of five prompt means, 4 degrees of freedom.
    value_PS = np.random.default_rng(4).normal(size=(5, 1)) + 0.1 * np.random.default_rng(5).normal(size=(5, 4))
    low, high = stats.t.interval(0.95, 4, value_PS.mean(), stats.sem(value_PS.mean(axis=1)))
    for found in (stratified_score(rows_of("t", value_PS)), mean_interval(value_PS.ravel(), np.repeat(range(5), 4))):
        assert (found.low, found.high) == pytest.approx((low, high), abs=1e-12)


def test_few_prompts_are_drawn_as_many_are() -> None:
    # Images of a prompt agree fully: prompts give twice the width of images, however few there are.
    for prompts in (5, 19, 20):
        value_P = np.random.default_rng(prompts).normal(size=prompts)
        by_prompt = stratified_score(rows_of("t", np.repeat(value_P[:, None], 4, axis=1)))
        assert width(by_prompt) == pytest.approx(width(mean_interval(value_P)), rel=1e-12)


def test_prompts_of_unequal_size_weigh_by_their_images() -> None:
    # Independent images of one variance, of which one prompt has most: 1.9 degrees of freedom (Bell and McCaffrey).
    share_U = np.array([3, 2, 9, 4, 8]) / 26
    middle = np.eye(5) - np.outer(share_U, np.ones(5))
    scale = np.diag(share_U**2 / (1 - 2 * share_U + (share_U**2).sum()))
    quadratic = middle @ scale @ middle.T
    value_U = np.array([0.3, -1.0, 0.5, 2.0, 0.1])
    variance = value_U @ quadratic @ value_U
    degrees = np.trace(quadratic) ** 2 / np.trace(quadratic @ quadratic)
    found = mean_interval(np.repeat(value_U, [3, 2, 9, 4, 8]), np.repeat(range(5), [3, 2, 9, 4, 8]))
    assert degrees == pytest.approx(1.878, abs=1e-3)
    assert found.mean == pytest.approx(share_U @ value_U, abs=1e-12)
    assert width(found) / 2 == pytest.approx(stats.t.ppf(0.975, degrees) * math.sqrt(variance), rel=1e-9)


def test_tasks_add_up_with_satterthwaites_degrees() -> None:
    tasks = [np.random.default_rng(k).normal(k, 1 + k, size=(size, 1)) for k, size in enumerate((4, 11, 7))]
    rows = [row for k, values in enumerate(tasks) for row in rows_of(str(k), values)]
    variances = np.array([values.var(ddof=1) / len(values) / 9 for values in tasks])
    degrees = variances.sum() ** 2 / sum(v**2 / (len(values) - 1) for v, values in zip(variances, tasks, strict=True))
    found = stratified_score(rows)
    assert found.mean == pytest.approx(np.mean([values.mean() for values in tasks]), abs=1e-12)
    assert width(found) / 2 == pytest.approx(stats.t.ppf(0.975, degrees) * math.sqrt(variances.sum()), rel=1e-9)


def test_of_two_tasks_of_verdicts_the_images_are_added_by_hand() -> None:
    # 8 of 10 and 10 of 10 right, one image a prompt: one right and one wrong image more in each of two tasks.
    rows = rows_of("a", np.array([[1.0]] * 8 + [[0.0]] * 2)) + rows_of("b", np.ones((10, 1)))
    shares = np.array([9 / 12, 11 / 12])
    variances = shares * (1 - shares) / 12 / 4
    degrees = variances.sum() ** 2 / (variances**2 / 11).sum()
    half = stats.t.ppf(0.975, degrees) * math.sqrt(variances.sum())
    found = stratified_score(rows)
    assert found.mean == pytest.approx(0.9)
    assert (found.low, found.high) == pytest.approx((shares.mean() - half, min(1.0, shares.mean() + half)), rel=1e-9)


@pytest.mark.parametrize(("right", "count"), [(9, 10), (10, 10), (0, 4), (81, 263)])
def test_a_share_of_single_images_has_wilsons_interval(right: int, count: int) -> None:
    wanted = stats.binomtest(right, count).proportion_ci(method="wilson")
    found = mean_interval([1.0] * right + [0.0] * (count - right))
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), abs=1e-12)
    (task,) = task_scores(rows_of("t", np.array([[1.0] * right + [0.0] * (count - right)]))).values()
    assert (task.low, task.high) == (found.low, found.high)  # the images of one prompt


def test_wilsons_bounds_of_a_textbook() -> None:
    # 81 of 263: 0.2553 to 0.3662 (Newcombe 1998, table I).
    assert wilson(81 / 263, 263, 1.959964) == pytest.approx((0.2553, 0.3662), abs=5e-5)


def test_a_task_that_is_all_right_has_a_width() -> None:
    # Ten prompts of four images: 40 / (40 + t²) with t of 9 degrees and the half that speaks for no design effect.
    found = task_scores(rows_of("t", np.ones((10, 4))))["t"]
    quantile = stats.t.ppf(0.975, 9.5)
    assert (found.mean, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx(40 / (40 + quantile**2), rel=1e-9)
    whole = stratified_score(rows_of("a", np.ones((10, 1))) + rows_of("b", np.ones((10, 1))))
    assert 0.7 < whole.low < 0.95


def test_prompts_that_agree_by_chance_keep_a_width() -> None:
    # Five prompts, each half right: no variance between them. Half a degree beside four leaves a ninth of the variance
    # of independent images, so that 20 images count for 180.
    found = task_scores(rows_of("t", np.tile([1.0, 0.0], (5, 2))))["t"]
    quantile = stats.t.ppf(0.975, 4.5)
    half = quantile * math.sqrt(0.25 / 180 + quantile**2 / (4 * 180**2)) / (1 + quantile**2 / 180)
    assert (found.low, found.high) == pytest.approx((0.5 - half, 0.5 + half), rel=1e-9)


def test_alike_images_of_a_prompt_widen_a_share() -> None:
    right_P = np.arange(40) % 2
    agree = task_scores(rows_of("t", np.repeat(right_P[:, None], 4, axis=1)))["t"]
    alone = mean_interval(right_P)
    assert width(agree) == pytest.approx(width(alone), rel=0.06)  # Student's t for the design effect, and the prior
    assert width(agree) > 1.8 * width(mean_interval(np.repeat(right_P, 4)))


def test_score_is_the_macro_mean_and_tasks_stand_alone() -> None:
    rows = rows_of("a", np.array([[1.0, 0.0], [1.0, 1.0]])) + rows_of("b", np.array([[0.0]])) + rows_of("c", np.eye(3))
    assert stratified_score(rows).mean == pytest.approx((3 / 4 + 0 + 1 / 3) / 3)
    assert pooled(rows).mean == pytest.approx(6 / 14)
    means = {task: interval.mean for task, interval in task_scores(rows).items()}
    assert means == pytest.approx({"a": 0.75, "b": 0, "c": 1 / 3})


def test_what_tasks_differ_by_is_no_spread_of_the_mean_over_images() -> None:
    # Two tasks of one level each: nothing varies within them, so other prompts of these tasks would give the same.
    rows = rows_of("a", np.full((4, 2), 0.25)) + rows_of("b", np.full((9, 2), 0.75))
    assert not pooled(rows).known
    assert unknown_because(rows) == "all values of a task agree, which leaves their spread unknown"
    assert pooled(rows).mean == pytest.approx((8 * 0.25 + 18 * 0.75) / 26)


def test_pairing_narrows_the_interval_of_correlated_scores() -> None:
    rng = np.random.default_rng(6)
    shared = rng.normal(size=(60, 4))
    before = rows_of("t", shared)
    after = rows_of("t", shared + 0.1 + 0.1 * rng.normal(size=(60, 4)))
    difference = stratified_score(after, base=before)
    unpaired = math.hypot(width(stratified_score(before)), width(stratified_score(after)))
    assert width(difference) < unpaired / 4
    assert difference.mean == pytest.approx(stratified_score(after).mean - stratified_score(before).mean, abs=1e-12)
    assert difference.excludes(0.0)


def test_verdicts_that_all_agree_leave_room_for_a_change() -> None:
    same = rows_of("a", np.ones((3, 1))) + rows_of("b", np.zeros((3, 1)))
    assert stratified_score(same, base=same).mean == 0
    assert width(stratified_score(same, base=same)) > 0.1
    right = [ScoreRow(task=row.task, prompt=row.prompt, sample=row.sample, value=1.0) for row in same]
    jump = stratified_score(right, base=same)  # three prompts of one task agree: no proof
    assert jump.mean == 0.5
    assert jump.low < 0.5


def test_order_of_rows_changes_nothing() -> None:
    rng = np.random.default_rng(7)
    rows = rows_of("b", rng.random((25, 2))) + rows_of("a", rng.random((3, 5)))
    shuffled = [rows[i] for i in rng.permutation(len(rows))]
    assert stratified_score(rows) == stratified_score(shuffled)
    partner = [ScoreRow(task=r.task, prompt=r.prompt, sample=r.sample, value=1 - r.value) for r in rows]
    assert stratified_score(partner, base=rows) == stratified_score(partner, base=shuffled)


@pytest.mark.parametrize("value", [-2.0, 0.1])
def test_equal_numbers_leave_their_spread_unknown(value: float) -> None:
    interval = stratified_score(rows_of("t", np.full((7, 3), value)))
    assert interval.mean == pytest.approx(value)
    assert not interval.known
    assert not interval.excludes(0.0)


def test_one_prompt_has_its_images_as_units_and_says_so() -> None:
    one = rows_of("counting", np.array([[0.3, 1.2, 0.5]]))
    low, high = stats.t.interval(0.95, 2, 2 / 3, stats.sem([0.3, 1.2, 0.5]))
    assert (stratified_score(one).low, stratified_score(one).high) == pytest.approx((low, high), abs=1e-12)
    many = rows_of("colors", np.random.default_rng(0).random((4, 2)))
    assert claim(many) == "prompts of this kind"
    assert claim(one) == "these prompts"
    assert claim(one + many) == "prompts of this kind; for counting, its only prompt"


def test_a_single_image_leaves_its_spread_unknown_and_the_reason_is_told() -> None:
    single = rows_of("t", np.array([[1.0]]))
    assert stratified_score(single).mean == 1.0
    assert not stratified_score(single).known
    assert not stratified_score(single).excludes(0.0)
    assert unknown_because(single) == "there is a single image"
    assert not mean_interval([1.0]).known
    mixed = single + rows_of("u", np.eye(3))
    assert not stratified_score(mixed).known
    assert unknown_because(mixed) == "one task has a single image, whose spread is unknown"
    assert unknown_because(rows_of("u", np.eye(3))) == ""


def test_tasks_of_single_images_are_taken_together() -> None:
    # Four tasks with one image each: their spread holds that between tasks, which is too much rather than too little.
    value_T = np.array([0.1, 0.7, 0.4, 0.9])
    rows = [row for k, value in enumerate(value_T) for row in rows_of(f"t{k}", np.array([[value]]))]
    low, high = stats.t.interval(0.95, 3, value_T.mean(), stats.sem(value_T))
    for found in (stratified_score(rows), pooled(rows)):
        assert (found.low, found.high) == pytest.approx((low, high), abs=1e-12)
    assert unknown_because(rows) == ""
    assert not task_scores(rows)["t0"].known


def test_tasks_of_single_verdicts_add_two_images_at_each_end_together() -> None:
    # 50 tasks of one image each, all right: 52 of 54, in all four images more as one task of 50 images would have.
    rows = [row for k in range(50) for row in rows_of(f"t{k}", np.array([[1.0]]))]
    share = 52 / 54
    half = stats.t.ppf(0.975, 53) * math.sqrt(share * (1 - share) / 54)
    found = stratified_score(rows)
    assert (found.mean, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx(share - half, rel=1e-9)
    change = stratified_score(rows, base=rows)  # half an image more at either end of the 50 that stay
    assert width(change) / 2 == pytest.approx(stats.t.ppf(0.975, 50) / 51, rel=1e-9)


def test_a_task_may_have_any_name() -> None:
    rows = rows_of("single images", np.eye(2)) + rows_of("a", np.ones((1, 1))) + rows_of("b", np.zeros((1, 1)))
    assert stratified_score(rows).mean == pytest.approx(0.5)
    assert pooled(rows).mean == pytest.approx(3 / 6)


def test_labels_that_are_all_one_have_no_spread_and_images_without_labels_have() -> None:
    found = mean_interval([0.1, 0.2, 0.3], ["g"] * 3)
    assert found.mean == pytest.approx(0.2)
    assert not found.known
    assert mean_interval([0.1, 0.2, 0.3]).known
    assert not retest([0.1, 0.2, 0.3], [0.2, 0.2, 0.1], [0, 0, 0]).mean.known


def test_changes_of_verdicts_have_one_rule_whatever_their_shape() -> None:
    before, after = np.zeros(8), np.array([0.0] * 6 + [1.0] * 2)
    rows = [rows_of("t", values[:, None]) for values in (before, after)]
    for level in (0.0, 1.0):
        found = mean_interval(level * (after - before), range(8), ends=ends_of(before, after, changes=True))
        wanted = stratified_score(rows[int(level)], base=rows[0])
        assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), abs=1e-12)
        assert width(found) > 0.1
    assert ends_of([0.0, math.nan], [1.0, 1.0], changes=True) == CHANGES
    assert ends_of([True, False], changes=False) == VERDICTS
    assert ends_of([0.1, 0.5], [0.0, 0.5], changes=True) is None
    assert not mean_interval([0.5] * 4, ends=CHANGES).known  # no changes of verdicts


@pytest.mark.parametrize(
    ("level", "degrees", "expected"),
    [(0.95, 1, 12.7062), (0.95, 2, 4.30265), (0.95, 4, 2.77645), (0.99, 9, 3.24984), (0.95, math.inf, 1.959964)],
)
def test_student_quantiles_agree_with_the_tables(level: float, degrees: float, expected: float) -> None:
    assert student_quantile(level, degrees) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.999])
def test_student_quantiles_are_those_of_closed_forms_and_of_scipy(level: float) -> None:
    assert student_quantile(level, 1) == pytest.approx(math.tan(math.pi * level / 2), rel=1e-13)
    assert student_quantile(level, 2) == pytest.approx(level * math.sqrt(2 / (1 - level**2)), rel=1e-13)
    for degrees in (1.5, 4.7, 29, 99.9, 100.1, 3000.0):
        assert student_quantile(level, degrees) == pytest.approx(stats.t.ppf((1 + level) / 2, degrees), rel=1e-11)


def test_over_seeds_is_students_interval() -> None:
    assert over_seeds([1.0, 2.0, 3.0]).high == pytest.approx(2 + 4.30265 / math.sqrt(3), rel=1e-5)
    assert not over_seeds([0.4]).known
    assert not over_seeds([1.0, 1.0, 1.0]).known  # three of three is no certainty
    assert over_seeds([0.9, 1.0], shares=True).high == 1.0
    assert over_seeds([0.0, 0.1], shares=True).low == 0.0
    assert over_seeds([-1.0, 0.1], shares=True).low < -1.0
    assert over_seeds([0.9, 1.0]).high > 1.0


def test_bounds_are_cut_where_all_values_lie_from_0_to_1() -> None:
    assert range_of([0.0, 0.3, 1.0]) == SHARES
    assert range_of([0.0, 1.01]) is None
    assert range_of([-0.1, 1.0]) is None
    assert ends_of([0.0, 0.3], [1.0], changes=False) == SHARES
    assert ends_of([0.0, 0.3], [1.0], changes=True) == SHARE_CHANGES
    assert ends_of([0.0, 0.3], changes=False) == (0.0, math.inf, False)  # a distance may go on
    assert ends_of([0.2, 0.3], changes=False) is None
    graded = rows_of("t", np.array([[1.0], [0.9], [1.0], [0.8]]))
    for found in (stratified_score(graded), mean_interval([row.value for row in graded])):
        low, high = stats.t.interval(0.95, 3, 0.925, stats.sem([1.0, 0.9, 1.0, 0.8]))
        assert high > 1.0
        assert (found.low, found.high) == pytest.approx((low, 1.0))


def test_partners_are_what_all_sides_have() -> None:
    rows = rows_of("t", np.arange(6.0).reshape(3, 2))
    found = partners(rows, rows[1:], rows[:-1])
    assert [[row.value for row in side] for side in found] == [[1, 2, 3, 4]] * 3


def test_errors_teach() -> None:
    rows = rows_of("t", np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"1 rows have no partner.*\('t', 1, 1\).*before only"):
        paired_rows(rows, rows[:-1])
    with pytest.raises(ValueError, match="appears twice"):
        stratified_score([*rows, rows[0]])
    with pytest.raises(ValueError, match="no rows to score"):
        stratified_score([])
    with pytest.raises(ValueError, match="number 1 is nan"):
        mean_interval([1.0, math.nan])
    with pytest.raises(ValueError, match="at least one number"):
        mean_interval([])
    with pytest.raises(ValueError, match="3 labels for 2 values"):
        mean_interval([1.0, 2.0], ["a", "b", "c"])
    with pytest.raises(ValueError, match=r"got 95.*0\.95"):
        mean_interval([1.0, 2.0], level=95)


def test_resamples_of_few_units_are_widened_about_the_estimate() -> None:
    """Two units of 0 and 1 have means of 0, 1/2 and 1, whose offsets from 1/2 grow by sqrt(2 / 1)."""
    given: dict[str, Any] = {"num_resamples": 50, "rng": np.random.default_rng(0)}
    sums = np.array([[0.0, 1.0], [1.0, 1.0]])
    found = resample(sums, lambda s: s[0] / s[1], 0.5, **given)
    assert np.unique(found).tolist() == pytest.approx([0.5 - 0.5**0.5, 0.5, 0.5 + 0.5**0.5])
    held = resample(sums, lambda s: s[0] / s[1], 0.5, bounds=(0.0, 1.0), **given)
    assert np.unique(held).tolist() == [0.0, 0.5, 1.0]
