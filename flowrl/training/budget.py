"""What a run has spent, when its budget ends it, and when it is evaluated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowrl.config.methods import BudgetConfig


def evaluations(counters: Mapping[str, Any]) -> int:
    """All network evaluations in a run's counters."""
    return sum(int(value) for key, value in counters.items() if key.startswith("nfe/"))


def share_spent(budget: BudgetConfig, counters: Mapping[str, Any]) -> float:
    """Share of a budget that a run's counters have used up; 0 without a budget."""
    used = {"nfe": evaluations(counters), "images": counters["images"], "seconds": counters["seconds"]}
    return max((used[name] / limit for name, limit in budget.limits.items()), default=0.0)


class Budget:
    """The counters of a run against its limits; checkpoints keep the counters."""

    def __init__(self, limits: BudgetConfig, counters: dict[str, Any], *, num_iterations: int, eval_every: int) -> None:
        """Counts on from `counters`, which need `images`, `seconds`, `evals` and `evaluated`, the last time.

        Args:
            counters: also changed by others: what was counted up to the last joined row.
            num_iterations: after which the run ends.
            eval_every: iterations between evaluations, unless the budget spreads them; 0 switches them off.
        """
        self.limits, self.counters = limits, counters
        self.num_iterations, self.eval_every = num_iterations, eval_every

    @property
    def evaluates(self) -> bool:
        """Whether the run is evaluated at all."""
        return bool(self.eval_every or self.limits.evals)

    def spent(self) -> float:
        """Used share of the budget; 0 without one."""
        return share_spent(self.limits, self.counters)

    def evaluation_due(self, done: int, *, last: bool) -> bool:
        """Whether to evaluate after `done` iterations, unless that was done. The budget's due evaluations then count as
        made."""
        parts = self.limits.evals
        if parts:
            reached = min(parts, max(int(self.spent() * parts), done * parts // self.num_iterations))
            due = last or reached > self.counters["evals"]
            self.counters["evals"] = max(reached, self.counters["evals"])
        else:
            due = bool(self.eval_every) and (last or done % self.eval_every == 0)
        return due and self.counters["evaluated"] != done

    def row(self) -> dict[str, Any]:
        """What was spent, for the log."""
        seconds = round(self.counters["seconds"], 4)
        return {"nfe/total": evaluations(self.counters), "images": self.counters["images"], "seconds/total": seconds}
