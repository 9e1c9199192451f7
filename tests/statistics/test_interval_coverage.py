"""A short look at what `tests/trials/interval_coverage.py` measures in full: do intervals cover what they say?"""

from __future__ import annotations

import math
from itertools import cycle

import numpy as np
import pytest
from cost_coverage import COURSES, Course, cost_coverage
from interval_coverage import (
    WORLD,
    Design,
    comparison_rates,
    design,
    independent_rates,
    outside,
    points_coverage,
    reward_coverage,
    score_coverage,
    score_over_seeds_coverage,
    single_images,
    training_coverage,
    trust_coverage,
    weighted_coverage,
)

LOW, HIGH = 0.93, 0.97


def assert_covers(rate: float, repetitions: int, low: float = LOW, high: float = HIGH) -> None:
    """A rate between the bounds but for three of its standard errors."""
    slack = 3 * math.sqrt(0.05 * 0.95 / repetitions)
    assert low - slack <= rate <= high + slack


@pytest.mark.parametrize(
    "asked",
    [
        design(20, 4, 0.3), design(10, 4, 0.5), design(5, 4, 0.3), design(10, 1, 0.0, (0.98,) * 6),
        Design(name="world", layout=WORLD, icc=0.3),
    ],
    ids=lambda asked: asked.name,
)  # fmt: skip
def test_scores_cover_other_prompts_of_the_kind(asked: Design) -> None:
    rates = score_coverage(asked, 200, np.random.default_rng(1))
    for name in ("score", "mean over images"):
        assert_covers(rates[name], 200)
    # Shares of few images have steps, and changes of few verdicts: they may cover more, never less.
    assert_covers(rates["tasks"], 200, high=0.985)
    assert_covers(rates["change"], 200, high=1.0)
    assert rates["least task"] > 0.85


def test_the_images_of_single_prompts_cover_these_prompts() -> None:
    assert_covers(score_coverage(design(1, 40, 0.0), 200, np.random.default_rng(2))["score"], 200)


@pytest.mark.parametrize("tasks", [10, 20])
@pytest.mark.parametrize("mean", [0.5, 0.8])
def test_tasks_of_one_image_each_cover_together(tasks: int, mean: float) -> None:
    rates = score_coverage(single_images(tasks, mean), 300, np.random.default_rng(6))
    assert_covers(rates["score"], 300, high=0.99)
    assert_covers(rates["change"], 300, high=1.0)


def test_a_reward_covers_where_tasks_differ_and_prompts_are_of_unequal_size() -> None:
    assert_covers(reward_coverage(((5, 16), (40, 2)), 200, np.random.default_rng(3)), 200)


@pytest.mark.parametrize(("seeds", "run_sd"), [(3, 0.2), (5, 0.0)])
def test_methods_that_are_one_are_told_apart_in_5_of_100(seeds: int, run_sd: float) -> None:
    rates = comparison_rates(((5, 2),) * 6, seeds, run_sd, 150, np.random.default_rng(4))
    assert_covers(1 - rates["false positives"], 150)
    assert_covers(rates["over seeds"], 150)
    assert_covers(rates["over seeds and prompts"], 150, high=0.985)


@pytest.mark.parametrize("run_sd", [0.0, 0.1])
def test_two_seeds_that_agree_on_few_verdicts_are_no_proof(run_sd: float) -> None:
    rates = comparison_rates(((5, 1),) * 6, 2, run_sd, 400, np.random.default_rng(7))
    assert rates["false positives"] < 0.05
    assert_covers(rates["over seeds"], 400, high=1.0)


def test_scores_cover_other_seeds_and_prompts() -> None:
    assert_covers(score_over_seeds_coverage(((10, 2),) * 6, 3, 0.1, 100, np.random.default_rng(5)), 100)


@pytest.mark.parametrize(
    ("course", "seeds"), list(zip(COURSES, cycle((3, 5)))), ids=lambda given: getattr(given, "name", None)
)
def test_costs_to_a_score_cover_other_seeds(course: Course, seeds: int) -> None:
    """Below the plateau of the reference or where it still rises; an interval joined of two is rather too wide."""
    rates = cost_coverage(course, seeds, 0.024, 200, np.random.default_rng(8))
    assert_covers(rates["holds"], 200, high=1.0)


@pytest.mark.parametrize("counts", [(2, 2), (3, 5)])
def test_trainings_of_unlike_seeds_are_told_apart_in_5_of_100(counts: tuple[int, int]) -> None:
    rates = independent_rates(counts, 0.1, 60, np.random.default_rng(9))
    assert_covers(1 - rates["false positives"], 60, high=1.0)
    assert_covers(rates["over seeds and prompts"], 60, high=1.0)


def test_what_else_pages_print_covers() -> None:
    assert_covers(training_coverage(0.9, 3, 500, np.random.default_rng(10)), 500)
    assert_covers(weighted_coverage(100, np.random.default_rng(11)), 100, high=0.985)
    assert_covers(points_coverage(30, 20, np.random.default_rng(12))["overall"], 20, low=0.9)
    assert all(rate > 0.8 for rate in trust_coverage(24, 40, np.random.default_rng(13)).values())


def test_rates_that_cover_too_little_or_too_much_are_listed() -> None:
    found = {
        "origin": {"date": "x"},
        "costs": [{"course": "a", "seeds": 3, "holds": 0.99, "open": 0.5}],
        "rewards": {"b": {"holds": 0.95}},
        "evaluations": [{"name": "c", "score": 0.91, "change": 0.96}],
    }
    assert list(outside(found)) == ["costs, a, seeds 3, holds: 0.99", "evaluations, c, score: 0.91"]
