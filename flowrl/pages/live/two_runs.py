"""Two runs side by side: a chart for each common metric, and the last values in a table."""

from __future__ import annotations

from dataclasses import replace

from flowrl.pages.run_curves import evaluation_series, figure, training_series
from flowrl.rendering.charts import Series, smooth_series
from flowrl.rendering.markup import DASH, esc, number, section, signed, table
from flowrl.runs.run_data import RunData, column, keys_below
from flowrl.runs.vital_signs import RECENT, SIGNS

Pair = tuple[RunData, RunData]
MOST_EVALUATED = 8
"""Metrics of evaluations that get a chart."""


def view_of_two(one: RunData, other: RunData, names: tuple[str, str]) -> str:
    """Charts and a table; names are those of the list."""
    pair = (one, other)
    found = (training_series(run, label=names[k], color=k + 1) for k, run in enumerate(pair))
    charts = [_chart("Training reward", [series for series, _ in filter(None, found)])]
    for key in _evaluations(pair)[:MOST_EVALUATED]:
        evaluated = [
            replace(evaluation_series(run, key, names[k], color=k + 1), dashed=k == 1)
            for k, run in enumerate(pair)
            if len(column(run.evaluations, key)[1])
        ]
        charts.append(_chart(_title(key), evaluated))
    signs = [*((sign.key, sign.title) for sign in SIGNS), ("seconds", "Seconds of an iteration")]
    signs += [
        (key, f"Memory, {key.split('/')[1].removesuffix('_gib')} (GiB)")
        for key in dict.fromkeys(key for run in pair for key in keys_below(run.train, "memory/"))
    ]
    small = []
    for key, title in signs:
        columns = [(k, *column(run.train, key)) for k, run in enumerate(pair)]
        small.append(_chart(title, [smooth_series(names[k], x, y, color=k + 1) for k, x, y in columns if len(y)]))
    lead = (
        "Blue is the first run, orange the second. Points behind a line are iterations, or means of some. That one "
        "line lies above the other is no test: <code>flowrl compare</code> trains methods to one budget and tests them."
    )
    return "".join([
        section("curves", "Side by side", f'<div class="two">{"".join(charts)}</div>' if any(charts) else "", lead),
        section("numbers", "Last values", _numbers(pair, names, signs),
                f"Means of the last {RECENT} iterations; of evaluations the last one."),
        section("health", "Vital signs", f'<div class="two">{"".join(small)}</div>' if any(small) else ""),
    ])  # fmt: skip


def _evaluations(pair: Pair) -> list[str]:
    """Means with their own bounds; first those that both runs have."""
    keys = dict.fromkeys(key for run in pair for key in keys_below(run.evaluations, "eval/"))
    known = [key for key in keys if f"{key}_low" in keys]
    return sorted(known, key=lambda key: not all(len(column(run.evaluations, key)[1]) for run in pair))


def _title(key: str) -> str:
    return f"Evaluation: {key.removeprefix('eval/').removeprefix('reward/')}"


def _chart(title: str, series: list[Series]) -> str:
    if not series:
        return ""
    text = f"{title} of {' and '.join(line.label for line in series)}"
    key = [(line.label, line.color, "dash" if line.dashed else "line") for line in series]
    return figure(title, series, "", text, key)


def _numbers(pair: Pair, names: tuple[str, str], signs: list[tuple[str, str]]) -> str:
    rows = []
    for key, title in [("reward", "Training reward"), *signs]:
        values = [column(run.train, key)[1][-RECENT:] for run in pair]
        rows.append(_row(title, [float(found.mean()) if len(found) else None for found in values]))
    for key in _evaluations(pair):
        values = [column(run.evaluations, key)[1] for run in pair]
        rows.append(_row(_title(key), [float(found[-1]) if len(found) else None for found in values]))
    rows = [row for row in rows if row]
    head = ["Metric", esc(names[0]), esc(names[1]), "Second less first"]
    return table("Last values of both runs", head, rows) if rows else ""


def _row(title: str, values: list[float | None]) -> list[str]:
    one, other = values
    if one is None and other is None:
        return []
    difference = DASH if one is None or other is None else signed(other - one, 4)
    return [esc(title), *(DASH if value is None else number(value, 4) for value in values), difference]
