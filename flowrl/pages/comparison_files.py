"""Measures the finished runs of a comparison, prints its tables, and writes them, its page and its numbers."""

from __future__ import annotations

import json
from pathlib import Path

from flowrl.comparing.comparison_result import Results, read_results
from flowrl.comparing.comparison_table import amount_text, markdown, text
from flowrl.comparing.measure import measure
from flowrl.comparing.question import Question, command, is_finished, run_name
from flowrl.comparing.results_file import numbers
from flowrl.pages.comparison_page import render
from flowrl.runtime.files import write_atomically
from flowrl.runtime.progress import progress
from flowrl.runtime.scrubbing import say as print


def write(
    folder: Path, question: Question, *, baseline: str | None = None, metric: str | None = None,
    targets: str | None = None, measured: bool = True,
) -> Results | None:  # fmt: skip
    """Writes table and page of what is finished; None, and a sentence, where nothing is.

    Args:
        folder: of the comparison.
        question: what it compares.
        baseline: see `read_results`, as the next two.
        metric: of the main column.
        targets: scores whose cost is tabulated.
        measured: measure distance and diversity of runs that have no `measure.json` yet.
    """
    finished = [run for pair in question.runs if is_finished(run := folder / run_name(*pair))]
    if not finished:
        print("No run is finished yet, so there is no table.")
        return None
    if measured:
        _measure(finished)
    results = read_results(folder, question, baseline=baseline, metric=metric, targets=targets)
    asked = command(question, folder, int(results.journal.get("jobs", 1)))
    facts = provenance(results)
    write_atomically(folder / "compare.md", markdown(results, command=asked, provenance=facts))
    write_atomically(folder / "results.json", json.dumps(numbers(results, facts), indent=1) + "\n")
    page = folder / "compare.html"
    write_atomically(
        page, render(results, command=asked, provenance=facts, title=f"Comparison {folder.resolve().name}")
    )
    print(f"\n{text(results)}\n\nPage     {page}\nTable    {folder / 'compare.md'}\nNumbers  {folder / 'results.json'}")
    return results


def provenance(results: Results) -> list[str]:
    """Budget, machine, versions and settings as lines; where runs differ, every value is named."""
    question = results.question
    manifests = [run.data.manifest for row in results.methods for run in row.runs]
    versions = [manifest.get("versions", {}) for manifest in manifests]
    lines = [
        f"budget: {question.budget}={amount_text(question.limit)}, {question.evals} evaluations, seeds 0 to "
        f"{question.seeds - 1}",
        f"overrides: {' '.join(question.overrides) or 'none'}",
        f"machine: {results.journal.get('platform')}, {results.journal.get('cpu_count')} CPU cores, "
        f"{results.journal.get('jobs', 1)} trainings at a time",
    ]
    for label, values in (
        ("device", [manifest.get("device") for manifest in manifests]),
        ("commit", [manifest.get("git_commit") for manifest in manifests]),
        (
            "versions",
            [", ".join(f"{package} {number}" for package, number in found.items()) for found in versions],
        ),
        ("trained", [str(manifest.get("started", ""))[:10] for manifest in manifests]),
    ):
        found = sorted({str(value) for value in values if value})
        lines += [f"{label}: {'; '.join(found)}"] if found else []
    lines += [f"{results.label(name)}: {path}" for name, path in question.methods.items()]
    return lines


def _measure(finished: list[Path]) -> None:
    """Measures runs that are new; those that made the evaluation before training also measure the base."""
    todo = [run for run in finished if not (run / "measure.json").is_file()]
    with progress("measuring", len(todo), enabled=bool(todo)) as advance:
        for run in todo:
            measure(run, base=(run / "eval" / "iteration_000000.jsonl").is_file())
            advance(run.name)
