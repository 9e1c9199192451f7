"""The tables of a comparison, as text for a terminal of 80 columns and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from flowrl.comparing.comparison_result import MethodResult, Results
from flowrl.comparing.measure import DIVERSITY_TEXT
from flowrl.rendering.terminal_text import Table, as_markdown, as_table, wrapped
from flowrl.runs.evaluation_rows import SCORE
from flowrl.statistics.bootstrap import Interval
from flowrl.statistics.crossed import Estimate
from flowrl.training.drift import KL_TEXT

_NO = "\u2013"
UNITS = {"nfe": "network evaluations", "seconds": "seconds of training", "images": "images"}


def tables(results: Results) -> list[Table]:
    """Tables of scores, differences to the baseline, costs, costs to reach scores, and the final models."""
    return [
        table
        for table in (_scores(results), _differences(results), _spent(results), _reach(results), _models(results))
        if table is not None
    ]


def metric_name(results: Results) -> str:
    """The metric in words, with the name of its prompts."""
    name = results.metric.removeprefix("eval/").replace("geneval/", "GenEval ").replace("reward/", "")
    return f"{results.held_word} {'GenEval score' if results.metric == SCORE else name}"


def text(results: Results) -> str:
    """All tables for a terminal."""
    blocks = [wrapped(line) for line in (heading(results), conclusion(results), *results.notes)]
    blocks += [as_table(table) for table in tables(results)]
    if results.missing:
        blocks.append("Not in the tables:\n" + "\n".join(f"  {name}: {state}" for name, state in results.missing))
    return "\n\n".join(blocks)


def markdown(results: Results, *, command: str, provenance: Sequence[str]) -> str:
    """All tables with their notes, and how they were made."""
    name = metric_name(results)
    parts = [f"# {name[0].upper()}{name[1:]} by method", heading(results)]
    parts += [conclusion(results), *results.notes]
    for table in tables(results):
        parts += [f"## {table.title}", as_markdown(table)]
        parts += [table.note] if table.note else []
    if results.missing:
        parts += ["## Not in the tables", "\n".join(f"- {name}: {state}" for name, state in results.missing)]
    parts += ["## How it was made", f"```\n{command}\n```", "\n".join(f"- {line}" for line in provenance)]
    return "\n\n".join(parts) + "\n"


def heading(results: Results) -> str:
    """One sentence: how many methods, the budget, the seeds, and what intervals cover."""
    question = results.question
    amount = amount_text(question.limit)
    base = "" if results.base is None else f" Before training: {number_form(results)(results.base.mean)}."
    counts = {len(row.runs) for row in results.methods}
    low, high = min(counts), max(counts)
    seeds = f"{low}" if low == high else f"{low} to {high}"
    only = "" if low > 1 else " (of these runs only where a method has one seed)"
    covered = f"{seeds} training seeds: 95 % intervals cover other seeds{only} and {results.claim}"
    if counts == {1}:
        covered = f"one training seed: 95 % intervals cover {results.claim}, and these runs only"
    return (
        f"{len(results.methods)} methods, {amount} {UNITS[question.budget]} each; {covered}.{base} "
        f"* is the baseline, {results.label(results.baseline)}."
    )


def conclusion(results: Results) -> str:
    """The result in words: the best method, and for how many methods the difference to the baseline is established."""
    best, write = results.methods[0], number_form(results)
    name = results.label(results.baseline)
    tied = (results.label(row.name) for row in results.methods if row.score.mean == best.score.mean)
    said = f"Highest: {' and '.join(tied)}, {write(best.score.mean)} (95 % {_bounds(best.score, write)})."
    compared = [row for row in results.methods if row.difference is not None]
    if not compared:
        return said
    tested = [row for row in compared if math.isfinite(row.holm)]
    if not tested:
        return f"{said} One training seed says which of a pair of runs scored higher, not which method is better."
    sure = [row.difference.mean for row in tested if row.difference is not None and row.holm < 0.05]
    better, worse = sum(change > 0 for change in sure), sum(change < 0 for change in sure)
    return (
        f"{said} Against {name}, with Holm p below 0.05: {better} better, {worse} worse; not established for "
        f"{len(compared) - better - worse} of {len(compared)}."
    )


def amount_text(value: float) -> str:
    """A count in few characters: 950, 52.1k, 1.20M; a dash if unknown."""
    if not math.isfinite(value):
        return _NO
    if value >= 999_500:
        return f"{value / 1e6:.3g}M"
    return f"{value / 1e3:.3g}k" if value >= 10_000 else f"{value:.0f}"


def time_text(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss; a dash if unknown."""
    if not math.isfinite(seconds):
        return _NO
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"


def ratio_text(found: Interval) -> str:
    """A ratio of costs with its bounds; a dash if unknown."""
    if math.isnan(found.mean):
        return _NO
    if not found.low > 0:  # the method might never get there, or nothing is known
        return f"{found.mean:.2f}x" + (f" (at most {found.high:.1f})" if math.isfinite(found.high) else "")
    return f"{found.mean:.2f}x ({found.low:.1f} {'or more' if found.high == math.inf else f'to {found.high:.1f}'})"


def p_text(p: float) -> str:
    """A p-value; a dash if there is none."""
    if not math.isfinite(p):
        return _NO
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def _name(results: Results, row: MethodResult) -> str:
    return results.label(row.name) + (" *" if row.name == results.baseline else "")


def number_form(results: Results, sign: str = "") -> Callable[[float], str]:
    """Writes scores to two digits of their standard error, about a quarter of the interval; none is rounded to 0."""
    widths = [row.score.interval.high - row.score.interval.low for row in results.methods]
    errors = [width / 4 for width in widths if width > 0]
    digits = min(max(1 - math.floor(math.log10(min(errors))), 0), 5) if errors else 3

    def write(value: float) -> str:
        form = f"{sign}.1g" if 0 < abs(value) < 0.5 * 10**-digits else f"{sign}.{digits}f"
        return f"{value:{form}}" if math.isfinite(value) else _NO

    return write


def _bounds(estimate: Estimate, write: Callable[[float], str], *, seeds: bool = False) -> str:
    interval = estimate.seeds if seeds else estimate.interval
    return f"{write(interval.low)} to {write(interval.high)}" if interval.known else _NO


def _scores(results: Results) -> Table:
    plain, signed = number_form(results), number_form(results, "+")
    rows = []
    for row in results.methods:
        gain = (_NO, _NO) if row.gain is None else (signed(row.gain.mean), _bounds(row.gain, signed))
        rows.append((_name(results, row), plain(row.score.mean), _bounds(row.score, plain), *gain,
                     " ".join(plain(score) for score in row.seed_scores)))  # fmt: skip
    name = metric_name(results)
    return Table(
        title=f"{name[0].upper()}{name[1:]} at the end",
        head=("method", "score", "95 %", "gain", "95 % of gain", "each seed"),
        rows=tuple(rows),
        note="Mean over seeds. The gain is that over the model before training on the same prompts and start noise.",
    )


def _differences(results: Results) -> Table | None:
    signed, plain = number_form(results, "+"), number_form(results)
    rows = [
        (_name(results, row), signed(row.difference.mean), _bounds(row.difference, signed), p_text(row.difference.p),
         p_text(row.holm), _bounds(row.difference, signed, seeds=True), plain(row.difference.detectable))
        for row in results.methods if row.difference is not None
    ]  # fmt: skip
    if not rows:
        return None
    tested = sum(math.isfinite(row.difference.p) for row in results.methods if row.difference is not None)
    allowed = (
        f" Holm p allows for the number of comparisons, {tested}: below 0.05 the difference stands. Detectable is the "
        "smallest true difference that this test would find with 80 % power at 5 %, two-sided."
        if tested
        else ""
    )
    return Table(
        title=f"Difference to {results.label(results.baseline)}",
        head=("method", "diff.", "95 %", "p", "Holm p", "95 % of seeds", "detectable"),
        rows=tuple(rows),
        note="Same seeds, prompts and start noise on both sides. 95 %: over seeds and prompts. p and 95 % of seeds: "
        f"Student's t over the seeds' differences, on these prompts; one seed has neither.{allowed}",
    )


def _spent(results: Results) -> Table:
    columns = {"nfe": amount_text, "images": amount_text, "seconds": time_text, "iterations": amount_text}
    rows = [
        (_name(results, row), *(write(row.spent[key]) for key, write in columns.items())) for row in results.methods
    ]
    jobs = results.journal.get("jobs", 1)
    together = f" {jobs} trainings shared the machine, so times compare methods only roughly." if jobs > 1 else ""
    return Table(
        title="Spent on training",
        head=("method", "network evaluations", "images", "time", "iterations"),
        rows=tuple(rows),
        note="Means over seeds. A network evaluation is one image through the network once, forward or backward; "
        f"evaluation is not counted.{together}",
    )


def _reach(results: Results) -> Table | None:
    if not results.targets:
        return None
    write = number_form(results)
    rows = []
    for row in results.methods:
        cells = [
            f"{amount_text(nfe)} {time_text(seconds)}" if math.isfinite(nfe) else "not reached"
            for nfe, seconds in zip(row.reach["nfe"], row.reach["seconds"], strict=True)
        ]
        cells += [ratio_text(row.speed[cost]) for cost in ("nfe", "seconds")]
        rows.append((_name(results, row), *cells))
    return Table(
        title="Network evaluations and time to reach a score",
        head=("method", *(f"to {write(target)}" for target in results.targets), "fewer", "faster"),
        rows=tuple(rows),
        note="By linear interpolation between the evaluations of the mean over seeds. Fewer: network evaluations that "
        f"{results.label(results.baseline)} takes to the last of these scores, over those of the method; faster: "
        "seconds; with 95 % intervals over seeds, which are open where other seeds might never get there.",
    )


def _models(results: Results) -> Table | None:
    if all(math.isnan(row.kl) for row in results.methods):
        return None
    shown = [(_name(results, row), row.kl, row.diversity) for row in results.methods]
    if math.isfinite(results.base_diversity):
        shown.append(("before training", 0.0, results.base_diversity))
    rows = [(name, f"{kl:.3g}".replace("nan", _NO), f"{far:.4f}".replace("nan", _NO)) for name, kl, far in shown]
    return Table(
        title="Final models",
        head=("method", "distance from base", "diversity"),
        rows=tuple(rows),
        note=f"Distance from base: {KL_TEXT}. Diversity: {DIVERSITY_TEXT}.",
    )
