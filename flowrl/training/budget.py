"""What a run has spent, when its budget ends it, and when it is evaluated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def evaluations(counters: Mapping[str, Any]) -> int:
    """All network evaluations in a run's counters."""
    return sum(int(value) for key, value in counters.items() if key.startswith("nfe/"))


def share_spent(limits: Mapping[str, float], counters: Mapping[str, Any]) -> float:
    """Share of a budget, by what its limits count, that is used up by what a run's counters hold; 0 without limits."""
    used = {"nfe": evaluations(counters), "images": counters["images"], "seconds": counters["seconds"]}
    return max((used[name] / limit for name, limit in limits.items()), default=0.0)


class Budget:
    """The counters of a run against its limits; checkpoints keep the counters."""

    def __init__(
        self, limits: Mapping[str, float], counters: dict[str, Any], *, evals: int, num_iterations: int, eval_every: int
    ) -> None:
        """Counts on from `counters`, which need `images`, `seconds`, `evals`, and `evaluated`, the last time it was.

        Args:
            counters: also changed by others: what was counted up to the last joined row.
            evals: evaluations that are spread over the budget; 0 leaves them to `eval_every`.
            num_iterations: after which the run ends.
            eval_every: iterations between evaluations, unless the budget spreads them; 0 switches them off.
        """
        self.limits, self.counters, self.evals = limits, counters, evals
        self.num_iterations, self.eval_every = num_iterations, eval_every

    @property
    def evaluates(self) -> bool:
        """Whether the run is evaluated at all."""
        return bool(self.eval_every or self.evals)

    def spent(self) -> float:
        """Used share of the budget; 0 without one."""
        return share_spent(self.limits, self.counters)

    def evaluation_due(self, done: int, *, last: bool) -> bool:
        """Whether to evaluate after `done` iterations, unless that was done. The budget's due ones are then made."""
        if parts := self.evals:
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
