"""What a run has spent of its budget, and when it is evaluated."""

from __future__ import annotations

from typing import Any

import pytest

from flowrl.config.methods import BudgetConfig
from flowrl.training.budget import Budget

SPENT: dict[str, Any] = {
    "nfe/rollout": 60,
    "nfe/backward": 40,
    "images": 30,
    "seconds": 5.0,
    "evals": 0,
    "evaluated": -1,
}


def budget(limits: BudgetConfig, *, eval_every: int = 0, **counters: float) -> Budget:
    counted = SPENT | counters
    return Budget(limits.limits, counted, evals=limits.evals, num_iterations=12, eval_every=eval_every)


@pytest.mark.parametrize(
    ("limits", "share"),
    [
        (BudgetConfig(), 0.0),
        (BudgetConfig(nfe=400), 0.25),  # all kinds of evaluations count
        (BudgetConfig(images=60), 0.5),
        (BudgetConfig(seconds=4.0), 1.25),
        (BudgetConfig(nfe=400, images=60, seconds=50.0), 0.5),  # the first limit that is reached
    ],
)
def test_the_share_that_is_spent(limits: BudgetConfig, share: float) -> None:
    assert budget(limits).spent() == share


def test_what_was_spent_is_logged() -> None:
    assert budget(BudgetConfig(), seconds=1.23456).row() == {"nfe/total": 100, "images": 30, "seconds/total": 1.2346}


def test_evaluations_at_a_fixed_distance() -> None:
    every_five = budget(BudgetConfig(), eval_every=5)
    assert every_five.evaluates
    assert [done for done in range(1, 13) if every_five.evaluation_due(done, last=done == 12)] == [5, 10, 12]
    every_five.counters["evaluated"] = 10  # a run that goes on after 10 was evaluated there before it ended
    assert not every_five.evaluation_due(10, last=False)
    never = budget(BudgetConfig())
    assert not never.evaluates
    assert not never.evaluation_due(12, last=True)


def test_evaluations_spread_over_the_budget_or_the_iterations() -> None:
    by_iterations = budget(BudgetConfig(evals=3))
    assert by_iterations.evaluates
    assert [done for done in range(1, 13) if by_iterations.evaluation_due(done, last=done == 12)] == [4, 8, 12]
    by_images = budget(BudgetConfig(evals=4, images=100), images=0)
    due = []
    for done in range(1, 6):
        by_images.counters["images"] += 20
        due.append(by_images.evaluation_due(done, last=by_images.spent() >= 1))
    assert due == [False, True, True, True, True]  # 20, 40, 60, 80 and 100 of 100: a quarter, a half, ...
