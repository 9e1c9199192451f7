"""The page of a comparison: one file that needs no network, light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flowrl.comparing.comparison_result import MethodResult, Results
from flowrl.comparing.comparison_table import conclusion, heading, metric_name, tables
from flowrl.prompts.loading import spread
from flowrl.rendering import bars, dots
from flowrl.rendering.charts import WIDER, Series, legend, line_chart, smooth
from flowrl.rendering.document import document
from flowrl.rendering.embedded_images import image_element, image_table
from flowrl.rendering.markup import card, code, esc, notes_box, number, plural, section, titled_table
from flowrl.runs.run_data import column, shown_prompts
from flowrl.runtime.files import write_atomically
from flowrl.runtime.shapes import Float
from flowrl.statistics.bootstrap import point

COLORS, GRID, SHOTS = 6, 60, 4
Values = Float[np.ndarray, " n"]


def colors(results: Results) -> dict[str, int]:
    """Palette number of every method, 0 for grey."""
    names = [row.name for row in results.methods]
    asked = [name for name in results.question.methods if name in names]
    if len(asked) > COLORS:
        first = [results.baseline] if results.baseline in names else []
        asked = [*first, *(name for name in names if name != results.baseline)][:COLORS]
    return {name: asked.index(name) + 1 if name in asked else 0 for name in names}


def key(results: Results) -> str:
    """The legend."""
    palette = colors(results)
    shown = sorted((number, name) for name, number in palette.items() if number)
    entries = [
        (results.label(name) + (" (baseline)" if name == results.baseline else ""), number, "line")
        for number, name in shown
    ]
    others = sum(not number for number in palette.values())
    return legend([*entries, *([(f"{others} others", 0, "line")] if others else [])])


def score_chart(results: Results, cost: str) -> str:
    """Held-out score at the evaluations, mean over seeds, over network evaluations or seconds."""
    last = max(float(row.curves[cost][0][-1]) for row in results.methods)
    scale, unit = _unit(cost, last)
    series = [
        Series(
            label=results.label(row.name),
            x=row.curves[cost][0] / scale,
            y=row.curves[cost][1],
            color=color,
            markers=True,
        )
        for row, color in _painted(results)
    ]
    return _chart(series, unit, metric_name(results))


def reward_chart(results: Results) -> str:
    """Training reward over network evaluations: smoothed for each seed, then averaged on a common grid."""
    last = max(row.spent["nfe"] for row in results.methods)
    scale, unit = _unit("nfe", last)
    series = []
    for row, color in _painted(results):
        curves = []
        for run in row.runs:
            rows = [each for each in run.data.train if "nfe/total" in each and "reward" in each]
            nfe, reward = column(rows, "nfe/total")[1], column(rows, "reward")[1]
            if 1 < len(nfe) == len(reward):
                curves.append((nfe, smooth(reward, reward[:0])[0]))
        if not curves:
            continue
        x = np.linspace(max(nfe[0] for nfe, _ in curves), min(nfe[-1] for nfe, _ in curves), GRID)
        y = np.mean([np.interp(x, nfe, reward) for nfe, reward in curves], axis=0)
        series.append(Series(label=results.label(row.name), x=x / scale, y=y, color=color))
    return _chart(series, unit, "training reward") if series else ""


def forest(results: Results) -> str:
    """Differences to the baseline with their intervals, one line each, the largest on top."""
    found = [(row, row.difference.interval, color) for row, color in _painted(results) if row.difference is not None]
    rows = [
        (results.label(row.name), [bars.Mark(interval=interval, color=color)])
        for row, interval, color in sorted(found, key=lambda each: -each[1].mean)
    ]
    label = f"difference to {results.label(results.baseline)} with 95 % interval"
    said = f"Final {metric_name(results)}: {label}"
    return bars.forest(rows, x_label=label, description=said, sign=True, words=True, wide=WIDER)


def scatter(results: Results) -> str:
    """Final score against the distance from the base: small dots are seeds, large ones methods."""
    rows = [(row, color) for row, color in _painted(results) if math.isfinite(row.kl) and row.kl > 0]
    points = [
        dots.Dot(x=point(float(run.measured["kl"])), y=point(score), color=color, shape="raw")
        for row, color in rows
        for run, score in zip(row.runs, row.seed_scores, strict=True)
        if run.measured.get("kl")
    ]
    points += [
        dots.Dot(
            x=point(row.kl),
            y=point(row.score.mean),
            color=color,
            label=results.label(row.name),
            title=f"{results.label(row.name)}: {number(row.score.mean)} at {row.kl:.3g}",
        )
        for row, color in rows
    ]
    if not points:
        return ""
    name = metric_name(results)
    label = "distance from base (log)"
    return dots.scatter(points, x_label=label, y_label=name, description=f"{name} against {label}", log=True)


def shots(results: Results) -> str:
    """The same prompts and start noise: before training, then a row for every method, first finished seed."""
    runs = [(results.label(row.name), min(row.runs, key=lambda run: run.seed)) for row in results.methods]
    starts = [run.start for _, run in runs if run.start is not None]
    rows = [] if not starts else [("before training", _folder(starts[0].folder, 0))]
    rows += [(name, _folder(run.data.folder, run.last)) for name, run in runs]
    numbers = spread(min(len(list(folder.glob("[0-9]*.png"))) for _, folder in rows), SHOTS)
    listed = shown_prompts(runs[0][1].data.folder / "samples", [])
    prompts = {k: str(listed[k].get("prompt", k)) if k < len(listed) else str(k) for k in numbers}
    table = [
        (name, [image_element(folder / f"{k:04d}.png", f"{name}: {prompts[k]}") for k in numbers])
        for name, folder in rows
    ]
    return image_table(list(prompts.values()), table)


def _painted(results: Results) -> list[tuple[MethodResult, int]]:
    """Methods with their colours; grey first, so that coloured lines lie on top."""
    palette = colors(results)
    pairs = [(row, palette[row.name]) for row in results.methods]
    return sorted(pairs, key=lambda pair: (pair[1] > 0, -pair[1]))


def _chart(series: Sequence[Series], unit: str, y_label: str) -> str:
    said = f"{y_label} over {unit}"
    return line_chart(series, height=320, x_label=unit, y_label=y_label, description=said, x_name="at")


def _unit(cost: str, last: float) -> tuple[float, str]:
    """Scale and name of an axis so that its numbers stay short."""
    if cost == "seconds":
        return (60.0, "minutes of training") if last > 600 else (1.0, "seconds of training")
    if last >= 5e6:
        return 1e6, "network evaluations (millions)"
    return (1e3, "network evaluations (thousands)") if last >= 5e3 else (1.0, "network evaluations")


def _folder(run: Path, iteration: int) -> Path:
    return run / "samples" / f"iteration_{iteration:06d}"


DISTANCE_CAPTION = (
    "Large dots are means over seeds, small ones seeds. Up and left is better: more score for less change. What the "
    "distance is, and the diversity of the images, stands under the table of the final models."
)
REWARD_CAPTION = (
    "Of each seed a Gaussian moving average over iterations (standard deviation a twentieth of them), then the mean "
    "over seeds. Methods with other rewards, or other choices of prompts, are not comparable here."
)


def write_page(folder: Path, results: Results, *, command: str, provenance: Sequence[str]) -> None:
    """Writes `compare.html` of a comparison's folder."""
    page = render(results, command=command, provenance=provenance, title=f"Comparison {folder.resolve().name}")
    write_atomically(folder / "compare.html", page)


def render(results: Results, *, command: str, provenance: Sequence[str], title: str) -> str:
    """The whole page as HTML."""
    metric = metric_name(results)
    curves = "".join(card(score_chart(results, cost)) for cost in ("nfe", "seconds"))
    notes = [*results.notes, *(f"{name} is not in the tables: {state}" for name, state in results.missing)]
    listed = "".join(titled_table(part.title, part.head, part.rows, part.note) for part in tables(results))
    distance = "".join(
        card(chart, below=f"<figcaption>{esc(words)}</figcaption>")
        for chart, words in ((scatter(results), DISTANCE_CAPTION), (reward_chart(results), REWARD_CAPTION))
    )
    body = "".join([
        f'<p class="summary">{esc(conclusion(results))}</p><p class="muted">{esc(heading(results))}</p>',
        notes_box(notes),
        section("curves", f"{metric[0].upper()}{metric[1:]} over its cost",
                f'<div class="two">{curves}</div>{key(results)}',
                "At the evaluations, mean over seeds. What evaluation costs is not counted."),
        section("differences", f"Difference to {results.label(results.baseline)} at the end",
                card(forest(results), style=" one"),
                "Same seeds, prompts and start noise on both sides. Right of the line is better than the baseline; an "
                "interval that crosses the line leaves the sign open. The table has p-values over training seeds that "
                "allow for the number of methods."),
        section("distance", "Distance from the base model, and training reward",
                f'<div class="two">{distance}</div>{key(results)}' if distance else ""),
        section("tables", "Tables", f'<div class="tables">{listed}</div>'),
        section("images", "Images", shots(results),
                "Same prompts and start noise in every row, spread evenly over the evaluation, not picked; the first "
                "seed of each method after training."),
        section("settings", "Settings and commands",
                f"{code(command)}<ul>{''.join(f'<li>{esc(line)}</li>' for line in provenance)}</ul>"),
    ])  # fmt: skip
    footer = "Written by <code>flowrl compare</code> from the files of the runs."
    runs = sum(len(row.runs) for row in results.methods)
    state = f"{plural(runs, 'finished run')} of {len(results.question.runs)}"
    lead = [plural(len(results.methods), "method"), state, esc(results.journal.get("created", ""))]
    return document(title, body, lead=" · ".join(lead), footer=footer)
