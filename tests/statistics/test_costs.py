"""Costs at which curves reach a score, and how many times less a method costs: closed forms and edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from flowrl.statistics.crossed import cost_interval, cost_ratio, cost_to_reach, mean_curve


@pytest.mark.parametrize(
    ("target", "wanted"), [(0.3, 0.0), (0.4, 0.0), (0.5, 50.0), (0.6, 100.0), (0.65, 150.0), (0.7, 200.0)]
)
def test_the_cost_of_a_score_is_interpolated(target: float, wanted: float) -> None:
    assert cost_to_reach([0, 100, 200], [0.4, 0.6, 0.7], target) == pytest.approx(wanted)


def test_the_first_crossing_counts_and_some_scores_are_never_reached() -> None:
    assert cost_to_reach([0, 10, 20, 30], [0.0, 1.0, 0.0, 1.0], 0.5) == pytest.approx(5.0)
    assert cost_to_reach([0, 10], [0.0, 1.0], 1.1) == math.inf


def straight(*ends: float) -> list[tuple[list[float], list[float]]]:
    """Curves from 0 at no cost to these scores at cost 10, one for each seed."""
    return [([0.0, 10.0], [0.0, end]) for end in ends]


def test_costs_that_differ_between_seeds_are_part_of_the_spread() -> None:
    curves = [([0.0, pace, 6 * pace], [0.0, 0.6, 0.9]) for pace in (83.0, 167.0, 250.0)]
    found = cost_interval(curves, 0.6)
    assert found.low < 83
    assert found.high > 160
    ratio = cost_ratio(curves, curves, 0.5)
    assert ratio.low < 0.7
    assert ratio.high > 1.4


def test_a_score_that_was_passed_ends_the_interval_of_its_cost() -> None:
    falling = [([0.0, 1.0, 2.0, 3.0], [0.0, peak, peak, 0.6]) for peak in (0.79, 0.80, 0.81)]
    assert cost_interval(falling, 0.6).high < 1.0


def test_the_cost_of_a_score_has_every_cost_at_which_it_is_not_told_apart() -> None:
    """Of straight curves y = s x / 10 the bounds solve |m x / 10 - T| = q sd x / 10 / sqrt(S): x = 10 T / (m ± h)."""
    slopes = np.array([0.5, 0.6, 0.55])
    half = stats.t.ppf(0.975, 2) * stats.sem(slopes)
    found = cost_interval(straight(*slopes), 0.2)
    assert found.mean == pytest.approx(2 / 0.55)
    assert (found.low, found.high) == pytest.approx((2 / (0.55 + half), 2 / (0.55 - half)), abs=10 / 256)
    late = cost_interval(straight(*slopes), 0.5)  # told from 0.55 at the end by no seed's spread
    assert late.high == math.inf
    assert late.low < late.mean < 10
    assert not cost_interval(straight(0.5), 0.2).known
    assert cost_interval(straight(*slopes), 0.6).mean == math.inf
    same = cost_interval(straight(0.5, 0.5), 0.2)
    assert same.mean == pytest.approx(4)
    assert math.isnan(same.low), "seeds that agree are no certainty"


def test_how_many_times_less_a_method_costs() -> None:
    reference, method = straight(0.30, 0.32, 0.34), straight(0.92, 0.96, 1.00)
    sides = [cost_interval(curves, 0.2) for curves in (reference, method)]
    found = cost_ratio(reference, method, 0.2)
    assert found.mean == pytest.approx(3)
    (t, t_low, t_high), (u, u_low, u_high) = ([side.mean, side.low, side.high] for side in sides)
    assert found.low == pytest.approx(3 * math.exp(-math.hypot(math.log(t / t_low), math.log(u_high / u))))
    assert found.high == pytest.approx(3 * math.exp(math.hypot(math.log(t_high / t), math.log(u / u_low))))
    assert not cost_ratio(straight(0.2), method, 0.1).known
    assert math.isnan(cost_ratio(straight(0.2, 0.3), straight(0.1, 0.1), 0.2).mean), "never reached"
    assert math.isnan(cost_ratio(reference, method, 0.0).mean), "nothing to reach"
    fragile = cost_ratio(straight(0.26, 0.30, 0.34), straight(0.80, 0.85, 0.90), 0.25)
    assert (fragile.high, fragile.low > 0) == (math.inf, True), "other seeds of the reference might not get there"
    assert cost_ratio(straight(0.80, 0.85, 0.90), straight(0.26, 0.30, 0.34), 0.25).low == 0.0


def test_curves_are_averaged_point_by_point_or_on_a_common_grid() -> None:
    cost, score = mean_curve([([0, 10], [0.0, 1.0]), ([0, 12], [0.0, 0.5])])
    assert cost.tolist() == [0, 10]  # as far as both go
    assert score.tolist() == pytest.approx([0, (1 + 5 / 12) / 2])
    cost, score = mean_curve([([0, 10], [0.0, 1.0]), ([0, 5, 10], [0.0, 1.0, 1.0])])
    assert cost.tolist() == [0, 5, 10]
    assert score.tolist() == [0, 0.75, 1]
