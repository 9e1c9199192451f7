"""Ranks from paired differences: what is surely apart, which way round, and what nobody knows."""

from __future__ import annotations

import math

import pytest

from flowrl.statistics.bootstrap import Interval, point
from flowrl.statistics.means import SHARE_CHANGES, ScoreRow
from flowrl.statistics.ranking import paired_changes, rank_lines


def change(mean: float, arm: float = 0.05) -> Interval:
    return Interval(mean=mean, low=mean - arm, high=mean + arm)


def test_the_best_first_with_what_lies_between() -> None:
    scores = {"a": point(0.2), "b": point(0.5), "c": point(0.48)}
    changes = {("a", "b"): change(-0.3), ("a", "c"): change(-0.28), ("b", "c"): change(0.02)}
    lines = rank_lines(scores, changes, 1.0, ends=None)
    assert [(line.name, line.rank) for line in lines] == [("b", (1, 2)), ("c", (1, 2)), ("a", (3, 3))]
    assert lines[0].behind is None
    assert lines[1].behind is not None
    assert (lines[1].behind.low, lines[1].behind.high) == pytest.approx((-0.07, 0.03))
    assert rank_lines(scores, changes, 10.0, ends=None)[2].rank == (1, 3)  # so wide that nothing is surely apart


def test_where_less_is_better_the_lowest_is_first() -> None:
    scores = {"a": point(0.2), "b": point(0.5), "c": point(math.nan)}
    lines = rank_lines(scores, {("a", "b"): change(-0.3)}, 1.0, less_is_better=True, ends=None)
    assert [(line.name, line.rank) for line in lines] == [("a", (1, 2)), ("b", (2, 3)), ("c", (1, 3))]
    assert lines[1].behind == change(0.3)
    assert lines[2].behind is None


def rows(*values: float) -> list[ScoreRow]:
    return [ScoreRow(task="t", prompt=str(place), sample=0, value=value) for place, value in enumerate(values)]


def test_trainings_are_not_paired_by_their_order() -> None:
    one, two, three = [rows(1, 0, 1)], [rows(0, 0, 1), rows(0, 1, 1)], [rows(0, 0, 0), rows(1, 0, 1), rows(0, 1, 1)]
    changes, factor = paired_changes({"one": one, "two": two, "three": three}, by_task=False)
    assert set(changes) == {("one", "two"), ("one", "three"), ("two", "three")}  # whatever their numbers
    assert changes["one", "two"].mean == pytest.approx(1 / 6)
    assert factor >= 1
    for order in ([2, 0, 1], [1, 2, 0]):
        other, _ = paired_changes({"two": two, "three": [three[place] for place in order]}, by_task=False)
        assert other["two", "three"].low == pytest.approx(changes["two", "three"].low)
    assert math.isnan(paired_changes({"two": two}, by_task=False)[1])


def test_widened_differences_keep_to_what_there_can_be() -> None:
    scores = {"a": point(0.9), "b": point(0.1)}
    lines = rank_lines(scores, {("a", "b"): change(0.8, 0.15)}, 3.0, ends=SHARE_CHANGES)
    behind = lines[1].behind
    assert behind is not None
    assert (behind.mean, behind.low, behind.high) == pytest.approx((-0.8, -1.0, -0.35))
