"""A plan as an object; a file of its own, so that a plan from Python does not load what draws and compares."""

from __future__ import annotations

from flowrl.commands.plan.run import Planned
from flowrl.interface.call_results import RunPlan
from flowrl.planning.plan_text import as_text
from flowrl.planning.verdict import verdict
from flowrl.runtime.failures import FlowrlError


def plan_of(made: Planned) -> RunPlan:
    """A plan.

    Raises:
        FlowrlError: there is none, since the run would be refused.
    """
    if made.plan is None:
        raise FlowrlError("; ".join(made.found.refused))
    plan = made.plan
    return RunPlan(
        name=plan.name, text=as_text(plan, made.found, made.card), verdict=" ".join(
            " ".join(line.split()) for line in verdict(plan, made.card)
        ),
        peak_bytes=None if plan.memory is None else plan.memory.peak,
        flops=None if plan.cost is None else plan.cost.total, iterations=plan.run.iterations,
        missing=(*made.found.absent, *made.found.device),
    )  # fmt: skip
