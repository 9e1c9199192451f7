"""The numbers of a comparison's tables as one JSON object, for programs that read them: `results.json`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from flowrl.comparing.comparison_result import Results
from flowrl.statistics.bootstrap import Interval
from flowrl.statistics.crossed import Estimate


def numbers(results: Results, provenance: Sequence[str] = ()) -> dict[str, Any]:
    """Everything that the tables show, unrounded; what is not known is null.

    `provenance`, the lines given; `metric`, `baseline`, `budget`, `overrides`; `before`, an estimate of the model
    before training; `missing`, runs that are not finished; `methods`, name -> `score`, `gain` and `difference` as
    estimates, `each_seed`, `holm`, `spent`, `curve` (a list of [network evaluations, score]), `speed`, `distance` and
    `diversity`. An estimate holds `mean`, `interval` over seeds and prompts, `seeds` over seeds alone, `p` of the
    latter, and `detectable`.
    """
    question = results.question
    return {
        "provenance": list(provenance),
        "metric": results.metric,
        "baseline": results.baseline,
        "budget": {question.budget: question.limit},
        "overrides": list(question.overrides),
        "intervals": results.claim,
        "before": _estimate(results.base),
        "missing": [name for name, _ in results.missing],
        "methods": {
            row.name: {
                "score": _estimate(row.score),
                "each_seed": {run.seed: value for run, value in zip(row.runs, row.seed_scores, strict=True)},
                "gain": _estimate(row.gain),
                "difference": _estimate(row.difference),
                "holm": _known(row.holm),
                "spent": {name: _known(value) for name, value in row.spent.items()},
                "curve": [[float(x), float(y)] for x, y in zip(*row.curves["nfe"], strict=True)],
                "speed": {cost: ratio_numbers(found) for cost, found in row.speed.items()},
                "distance": _known(row.kl),
                "diversity": _known(row.diversity),
            }
            for row in sorted(results.methods, key=lambda row: row.name)
        },
    }


def ratio_numbers(found: Interval) -> dict[str, Any]:
    """`mean` and `interval`, each null where it is not known, as is an upper bound that is infinite."""
    return {"mean": _known(found.mean), "interval": None if math.isnan(found.low) else [found.low, _known(found.high)]}


def _estimate(found: Estimate | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "mean": found.mean,
        "interval": _bounds(found.interval),
        "seeds": _bounds(found.seeds),
        "p": _known(found.p),
        "detectable": _known(found.detectable),
    }


def _bounds(found: Interval) -> list[float] | None:
    return [found.low, found.high] if found.known else None


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
