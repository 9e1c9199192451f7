"""Compares methods on the same prompts, seeds and budget: trains missing runs, then writes a table and a page.

Folder: `compare.json` (the question and the state of every run), a run folder `<method>-s<seed>` for each pair,
`logs/`, `compare.md`, `compare.html` and `results.json`.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flowrl import __version__
from flowrl.comparing.comparison_result import Results, read_results
from flowrl.comparing.comparison_table import amount_text, markdown, text
from flowrl.comparing.measure import measure
from flowrl.comparing.question import (
    JOURNAL,
    ComparisonQuestion,
    ask,
    command,
    evaluated_rewards,
    is_finished,
    read_journal,
    run_name,
    settings_of,
)
from flowrl.comparing.trainings import ComparisonRuns
from flowrl.config.bounds import check_counts
from flowrl.config.building import setting_words
from flowrl.config.options import unknown_name
from flowrl.generation.models import Words, several
from flowrl.rendering.markup import bounds, number, plural, signed
from flowrl.rendering.notebook import heading, rows_table
from flowrl.runs.evaluation_rows import GENEVAL, REWARD
from flowrl.runtime.files import refuse_unwritable, write_atomically
from flowrl.runtime.progress import progress
from flowrl.runtime.public import public
from flowrl.session.preflight import preflight
from flowrl.statistics.bootstrap import UNKNOWN, Interval
from flowrl.statistics.crossed import Estimate


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodScore:
    """One method of a comparison."""

    name: str
    """The name of its configuration."""
    score: Interval
    """The score at the end, over seeds and prompts."""
    seed_scores: tuple[float, ...]
    difference: Interval = UNKNOWN
    """The difference to the baseline; unknown for the baseline itself."""
    p: float = math.nan
    """p of the difference over seeds, after Holm's correction; NaN if it cannot be tested."""
    spent: Mapping[str, float]
    """Mean "nfe", "images", "seconds" and "iterations"."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MethodComparison:
    """Methods compared at one budget, from the highest score to the lowest.

    Attributes:
        metric: the compared metric.
        baseline: the method that all others are compared to.
        methods: methods with a finished run.
        missing: run without a result -> why.
        failed: runs whose training failed in this call.
        notes: what the numbers leave out.
        folder: holds `compare.html`, `compare.md`, `results.json` and the run folders.
        text: all tables, as `flowrl compare` prints them.
    """

    metric: str
    baseline: str
    methods: tuple[MethodScore, ...]
    missing: Mapping[str, str]
    failed: tuple[str, ...] = ()
    notes: tuple[str, ...]
    folder: Path
    text: str = field(repr=False)

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        rows = [
            (row.name, number(row.score.mean), bounds(row.score), signed(row.difference.mean),
             bounds(row.difference, sign=True), number(row.p))
            for row in self.methods
        ]  # fmt: skip
        missing = rows_table(("no result", "why"), list(self.missing.items()))
        return (
            heading(f"{self.metric}, differences to {self.baseline}", f"page: {self.folder / 'compare.html'}")
            + rows_table(("", "score", "95 %", "difference", "95 %", "p"), rows)
            + missing
        )


@public
def compare(
    configs: Words = (),
    *,
    out: str | Path,
    budget: str | None = None,
    num_seeds: int | None = None,
    evals: int | None = None,
    jobs: int = 1,
    baseline: str | None = None,
    metric: str | None = None,
    targets: str | Sequence[float] | None = None,
    report_only: bool = False,
    show: bool = True,
    page: Callable[..., object] | None = None,
    **settings: Any,
) -> MethodComparison:
    """Trains several methods to one budget and compares them.

    Each run is a separate process, so configurations must be files or names of shipped ones, not mappings. Call this
    again to continue where it stopped; you may add methods and seeds.

    Args:
        configs: YAML files, or names of those that ship; `key=value` texts among them are settings. Without any, the
            comparison in the folder continues.
        out: folder of the comparison.
        budget: what each run may spend, such as "nfe=200000", "seconds=600" or "images=5000".
        num_seeds: training seeds of each method; None is 5.
        evals: evaluations spread over the budget; None is 2.
        jobs: trainings side by side.
        baseline: the method that the others are compared to; None is the first.
        metric: a metric of the evaluations; None is the GenEval score, else the first reward.
        targets: scores whose cost is tabulated, such as "0.6,0.7"; None takes 1/3, 2/3 and 9/10 of the baseline's gain.
        report_only: write the report of the finished runs; train and measure nothing.
        show: show notes and the state of the trainings.
        page: writes `compare.html`; see `flowrl.pages.comparison_page.write_page`.
        **settings: replace those of every configuration, as in `train`.

    Raises:
        ValueError: an argument is wrong, or the folder holds another comparison.
        NothingFinishedError: no run has finished.
        KeyboardInterrupt: you stopped it; the trainings are saved, and the same call continues them.
    """
    if any(isinstance(one, Mapping) for one in several(configs)):
        raise ValueError("compare trains in processes of their own: give files or names of configurations")
    check_counts(1_000, num_seeds=num_seeds)
    check_counts(evals=evals, jobs=jobs)
    folder = Path(out)
    known = read_journal(folder)
    if report_only and not known:
        raise ValueError(f"{folder} holds no comparison ({JOURNAL}): leave `report_only` out to start one")
    words = [*map(str, several(configs)), *setting_words(settings)]
    question = ask(words, known, budget=budget, num_seeds=num_seeds, evals=evals)
    if targets is not None and not isinstance(targets, str):
        targets = ",".join(map(str, targets))
    given = {"baseline": baseline, "metric": metric, "targets": targets}
    view = {**known.get("view", {}), **{key: value for key, value in given.items() if value is not None}}
    if view.get("baseline") not in (None, *question.methods):
        raise ValueError(f"`baseline`: {unknown_name('method', view['baseline'], question.methods)}")
    failed: tuple[str, ...] = ()
    if not report_only:
        refuse_unwritable(folder)
        check_same_metric(question, view.get("metric"))
        check_methods(folder, question)
        journal = known or {
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "flowrl": __version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "cpu_count": os.cpu_count(),
            "runs": {},
        }
        journal["jobs"] = jobs
        journal |= {"question": asdict(question), "view": view, "command": command(question, folder, jobs)}
        failed = ComparisonRuns(folder, question, journal).run(jobs)
        measure_new(folder, question)
    results = read_results(folder, question, failed=failed, **view)
    asked, facts = command(question, folder, int(results.journal.get("jobs", 1))), provenance(results)
    write_atomically(folder / "compare.md", markdown(results, command=asked, provenance=facts))
    write_atomically(folder / "results.json", json.dumps(numbers(results, facts), indent=1) + "\n")
    if page is not None:
        page(folder, results, command=asked, provenance=facts)
    methods = tuple(
        MethodScore(
            name=row.name,
            score=row.score.interval,
            seed_scores=row.seed_scores,
            difference=UNKNOWN if row.difference is None else row.difference.interval,
            p=row.holm,
            spent=dict(row.spent),
        )
        for row in results.methods
    )
    return MethodComparison(
        metric=results.metric, baseline=results.baseline, methods=methods, missing=dict(results.missing), failed=failed,
        notes=results.notes, folder=folder, text=text(results),
    )  # fmt: skip


def check_same_metric(question: ComparisonQuestion, metric: str | None) -> None:
    """Refuses methods whose evaluations share no number to compare, before they are trained; `metric` None is GenEval's
    score if the first method has it, else its first reward. Raises ValueError: they share none."""
    measured = {method: evaluated_rewards(settings_of(question, method, 0)) for method in question.methods}
    first, *_ = measured.values()
    if metric is None:
        wanted = next((name for name in ("geneval", *first) if name in first), None)
    else:
        prefix = next((prefix for prefix in (GENEVAL, REWARD) if metric.startswith(prefix)), None)
        wanted = "geneval" if prefix == GENEVAL else prefix and metric.removeprefix(REWARD).partition("/")[0]
    shared = [name for name in first if all(name in own for own in measured.values())]
    for method, own in measured.items():
        if wanted is None or wanted in own:
            continue
        way = f"give `metric` {REWARD}{shared[0]}, which all measure, or " if shared else ""
        raise ValueError(
            f"{question.methods[method]}: its evaluations measure {', '.join(own) or 'no reward'} and not {wanted}, by "
            f"which these methods would be compared: {way}add {wanted} to its eval.rewards"
        )


def check_methods(folder: Path, question: ComparisonQuestion) -> None:
    """Refuses now what a later training would refuse. Raises ValueError: names the configuration and the fault."""
    to_come = [pair for pair in question.runs if not is_finished(folder / run_name(*pair))]
    for method, seed in dict(to_come).items():
        try:
            preflight(settings_of(question, method, seed))
        except ValueError as error:
            raise ValueError(f"{question.methods[method]}: {error}") from error


def provenance(results: Results) -> list[str]:
    """Budget, machine, versions and settings as lines; if runs differ, a line names every value."""
    question = results.question
    manifests = [run.data.manifest for row in results.methods for run in row.runs]
    versions = [manifest.get("versions", {}) for manifest in manifests]
    lines = [
        f"budget: {question.budget}={amount_text(question.limit)}, {plural(question.evals, 'evaluation')}, seeds 0 to "
        f"{question.seeds - 1}",
        f"overrides: {' '.join(question.overrides) or 'none'}",
        f"machine: {results.journal.get('platform')}, {results.journal.get('cpu_count')} CPU cores, "
        f"{plural(results.journal.get('jobs', 1), 'training')} at a time",
    ]
    for label, values in (
        ("device", [manifest.get("device") for manifest in manifests]),
        ("commit", [manifest.get("git_commit") for manifest in manifests]),
        ("versions", [", ".join(f"{package} {version}" for package, version in found.items()) for found in versions]),
        ("trained", [str(manifest.get("started", ""))[:10] for manifest in manifests]),
    ):
        found = sorted({str(value) for value in values if value})
        lines += [f"{label}: {'; '.join(found)}"] if found else []
    lines += [f"{results.label(name)}: {path}" for name, path in question.methods.items()]
    return lines


def measure_new(folder: Path, question: ComparisonQuestion) -> None:
    """Measures newly finished runs; a run that made the evaluation before training also measures the base."""
    finished = [run for pair in question.runs if is_finished(run := folder / run_name(*pair))]
    todo = [run for run in finished if not (run / "measure.json").is_file()]
    with progress("measuring", len(todo), enabled=bool(todo)) as advance:
        for run in todo:
            measure(run, base=(run / "eval" / "iteration_000000.jsonl").is_file())
            advance(run.name)


def numbers(results: Results, provenance: Sequence[str] = ()) -> dict[str, Any]:
    """All numbers of the tables, unrounded; unknown ones are null.

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
    """`mean` and `interval`; unknown values and an infinite upper bound are null."""
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
