"""The figures of a comparison: curves over cost, a forest plot of differences, score against distance, images.

Up to six methods have a colour; where there are more, these are the baseline and the five best, the rest is grey.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from flowrl.commands.compare.comparison_table import metric_name
from flowrl.commands.compare.result import MethodResult, Results, RunResult
from flowrl.commands.report.run_data import column
from flowrl.commands.report.shown_samples import embed
from flowrl.html.charts import (
    NARROW,
    Frame,
    Series,
    legend,
    line_chart,
    nice_ticks,
    responsive,
    smooth,
    svg,
    tick_text,
)
from flowrl.html.markup import esc, number, signed

COLORS, GRID, SHOTS = 6, 60, 4
_ROW = 26
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
    entries = [(results.label(name) + (" (baseline)" if name == results.baseline else ""), number, "line")
               for number, name in shown]  # fmt: skip
    others = sum(not number for number in palette.values())
    return legend([*entries, *([(f"{others} others", 0, "line")] if others else [])])


def score_chart(results: Results, cost: str) -> str:
    """Held-out score at the evaluations, mean over seeds, over network evaluations or seconds."""
    last = max(float(row.curves[cost][0][-1]) for row in results.methods)
    scale, unit = _unit(cost, last)
    series = [
        Series(label=results.label(row.name), x=row.curves[cost][0] / scale, y=row.curves[cost][1], color=color,
               markers=True)
        for row, color in _painted(results)
    ]  # fmt: skip
    return _chart(series, unit, metric_name(results.metric), f"{metric_name(results.metric)} over {unit}")


def reward_chart(results: Results) -> str:
    """Training reward over network evaluations: smoothed for each seed, then averaged on a common grid."""
    last = max(row.spent["nfe"] for row in results.methods)
    scale, unit = _unit("nfe", last)
    series = []
    for row, color in _painted(results):
        curves = [curve for run in row.runs if len((curve := _rewards(run))[0]) > 1]
        if not curves:
            continue
        x = np.linspace(max(nfe[0] for nfe, _ in curves), min(nfe[-1] for nfe, _ in curves), GRID)
        y = np.mean([np.interp(x, nfe, reward) for nfe, reward in curves], axis=0)
        series.append(Series(label=results.label(row.name), x=x / scale, y=y, color=color))
    return _chart(series, unit, "training reward", f"training reward over {unit}") if series else ""


def forest(results: Results) -> str:
    """Differences to the baseline with their intervals, a line each."""
    rows = [(row, color) for row, color in reversed(_painted(results, by_score=True)) if row.difference is not None]
    rows = sorted(rows, key=lambda pair: -(pair[0].difference.mean if pair[0].difference else 0.0))
    if not rows:
        return ""
    wide, narrow = (_forest(results, rows, width) for width in (720, NARROW))
    return f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'


def scatter(results: Results) -> str:
    """Final score against the distance from the base: small dots are seeds, large ones methods."""
    rows = [(row, color) for row, color in _painted(results) if math.isfinite(row.kl) and row.kl > 0]
    return responsive(lambda width: _scatter(results, rows, width)) if rows else ""


def shots(results: Results) -> str:
    """The same prompts and start noise: before training, then a row for every method, first finished seed."""
    runs = [(results.label(row.name), min(row.runs, key=lambda run: run.seed)) for row in results.methods]
    starts = [run.start for _, run in runs if run.start is not None]
    rows = [] if not starts else [("before training", _folder(starts[0].folder, 0))]
    rows += [(name, _folder(run.data.folder, run.last)) for name, run in runs]
    counts = {len(sorted(folder.glob("[0-9]*.png"))) for _, folder in rows}
    total = min(counts)
    if total == 0:
        return ""
    numbers = [(2 * k + 1) * total // (2 * min(SHOTS, total)) for k in range(min(SHOTS, total))]
    prompts = _prompts(runs[0][1].data.folder)
    head = "".join(f"<th scope=col>{esc(prompts.get(k, k))}</th>" for k in numbers)
    body = ""
    for name, folder in rows:
        cells = "".join(f"<td>{_image(folder / f'{k:04d}.png', f'{name}: {prompts.get(k, k)}')}</td>" for k in numbers)
        body += f"<tr><th scope=row>{esc(name)}</th>{cells}</tr>"
    return (
        f'<div class="scroll shots" role="region" aria-label="Images" tabindex="0"><table><thead><tr><th></th>{head}'
        f"</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _painted(results: Results, *, by_score: bool = False) -> list[tuple[MethodResult, int]]:
    """Methods with their colours; grey first, so that coloured lines lie on top."""
    palette = colors(results)
    pairs = [(row, palette[row.name]) for row in results.methods]
    return pairs if by_score else sorted(pairs, key=lambda pair: (pair[1] > 0, -pair[1]))


def _chart(series: Sequence[Series], unit: str, y_label: str, description: str) -> str:
    def draw(width: int) -> str:
        return line_chart(
            series, width=width, height=320, x_label=unit, y_label=y_label, description=description, x_name="at"
        )

    return responsive(draw)


def _unit(cost: str, last: float) -> tuple[float, str]:
    """Scale and name of an axis so that its numbers stay short."""
    if cost == "seconds":
        return (60.0, "minutes of training") if last > 600 else (1.0, "seconds of training")
    if last >= 5e6:
        return 1e6, "network evaluations (millions)"
    return (1e3, "network evaluations (thousands)") if last >= 5e3 else (1.0, "network evaluations")


def _rewards(run: RunResult) -> tuple[Values, Values]:
    rows = [row for row in run.data.train if "nfe/total" in row and "reward" in row]
    nfe = column(rows, "nfe/total")[1]
    reward = column(rows, "reward")[1]
    return (nfe, smooth(reward, reward[:0])[0]) if len(nfe) == len(reward) else (nfe[:0], reward[:0])


def _forest(results: Results, rows: Sequence[tuple[MethodResult, int]], width: int) -> str:
    wide = width > 400
    left = 14 + 7 * max(len(results.label(row.name)) for row, _ in rows)
    left, right, top = min(left, width // 3), 190 if wide else 14, 8
    bottom = top + _ROW * len(rows)
    ends = [0.0]
    for row, _ in rows:
        assert row.difference is not None
        interval = row.difference.interval
        ends += [value for value in (interval.low, interval.mean, interval.high) if math.isfinite(value)]
    ticks = nice_ticks(min(ends), max(ends), 5 if wide else 3)

    def x(value: float) -> float:
        return left + (value - ticks[0]) / (ticks[-1] - ticks[0]) * (width - left - right)

    parts = []
    for tick in ticks:
        style = "axis" if tick == 0 else "grid"
        parts.append(f'<path class="{style}" d="M{x(tick):.1f} {top}V{bottom}"/>')
        parts.append(f'<text class="tick mid" x="{x(tick):.1f}" y="{bottom + 16}">{tick_text(tick)}</text>')
    for index, (row, color) in enumerate(rows):
        assert row.difference is not None
        interval, y = row.difference.interval, top + _ROW * (index + 0.5)
        name = results.label(row.name)
        fit = name if 7 * len(name) <= left - 10 else name[: (left - 20) // 7] + "\u2026"
        parts.append(f'<text class="name end" x="{left - 10}" y="{y + 4:.1f}">{esc(fit)}</text>')
        words = signed(interval.mean)
        if interval.known:
            words += f" ({signed(interval.low)} to {signed(interval.high)})"
            parts.append(f'<path class="whisker c{color}" d="M{x(interval.low):.1f} {y:.1f}H{x(interval.high):.1f}"/>')
        title = f"<title>{esc(name)}: {words}</title>"
        parts.append(f'<circle class="dot c{color}" cx="{x(interval.mean):.1f}" cy="{y:.1f}" r="5">{title}</circle>')
        if wide:
            parts.append(f'<text class="label" x="{width - right + 12}" y="{y + 4:.1f}">{words}</text>')
    label = f"difference to {results.label(results.baseline)} with 95 % interval"
    parts.append(f'<text class="label mid" x="{(left + width - right) / 2:.1f}" y="{bottom + 36}">{esc(label)}</text>')
    return svg(width, bottom + 42, f"Final {metric_name(results.metric)}: {label}", "".join(parts))


def _scatter(results: Results, rows: Sequence[tuple[MethodResult, int]], width: int) -> str:
    height = 320
    seeds = [
        (float(run.measured["kl"]), score, color)
        for row, color in rows for run, score in zip(row.runs, row.seed_scores, strict=True) if run.measured.get("kl")
    ]  # fmt: skip
    logs = np.log10([kl for kl, _, _ in seeds])
    scores = np.array([*(score for _, score, _ in seeds), *(row.score.mean for row, _ in rows)])
    low, high = float(logs.min()), float(logs.max())
    pad = max(0.05, 0.06 * (high - low))
    y_ticks = nice_ticks(float(scores.min()), float(scores.max()), 5)
    frame = Frame(
        width=width, height=height, left=34 + 7 * max(len(tick_text(tick)) for tick in y_ticks),
        x_ticks=_log_ticks(low - pad, high + pad), y_ticks=y_ticks, x_range=(low - pad, high + pad),
        y_range=(y_ticks[0], y_ticks[-1]),
    )  # fmt: skip
    right, bottom = width - frame.right, height - frame.bottom
    parts = []
    for tick in y_ticks:
        y = frame.y(tick)
        parts.append(f'<path class="grid" d="M{frame.left} {y:.1f}H{right}"/>')
        parts.append(f'<text class="tick end" x="{frame.left - 7}" y="{y + 4:.1f}">{tick_text(tick)}</text>')
    for tick in frame.x_ticks:
        parts.append(f'<path class="axis" d="M{frame.x(tick):.1f} {bottom}v4"/>')
        words = tick_text(float(f"{10**tick:.3g}"))
        parts.append(f'<text class="tick mid" x="{frame.x(tick):.1f}" y="{bottom + 17}">{words}</text>')
    parts.append(f'<path class="axis" d="M{frame.left} {bottom}H{right}"/>')
    parts += [
        f'<circle class="raw c{color}" cx="{frame.x(math.log10(kl)):.1f}" cy="{frame.y(score):.1f}" r="2.5"/>'
        for kl, score, color in seeds
    ]
    for row, color in rows:
        x, y = frame.x(math.log10(row.kl)), frame.y(row.score.mean)
        title = f"<title>{esc(results.label(row.name))}: {number(row.score.mean)} at {row.kl:.3g}</title>"
        parts.append(f'<circle class="dot c{color}" cx="{x:.1f}" cy="{y:.1f}" r="5.5">{title}</circle>')
    parts += _labels(results, rows, frame)
    middle = (frame.top + bottom) / 2
    parts.append(
        f'<text class="label mid" x="{(frame.left + right) / 2:.1f}" y="{height - 5}">distance from base (log)</text>'
    )
    name = esc(metric_name(results.metric))
    parts.append(f'<text class="label mid" transform="translate(12 {middle:.1f}) rotate(-90)">{name}</text>')
    return svg(width, height, f"{metric_name(results.metric)} against distance from the base", "".join(parts))


def _labels(results: Results, rows: Sequence[tuple[MethodResult, int]], frame: Frame) -> list[str]:
    """Names beside the dots, coloured methods first; a name that would cover another one is left to hovering."""
    taken: list[tuple[float, float, float]] = []
    parts = []
    for row, _ in sorted(rows, key=lambda pair: pair[1] == 0):
        name = results.label(row.name)
        x, y, size = frame.x(math.log10(row.kl)), frame.y(row.score.mean) + 4, 6.2 * len(name)
        start = x + 9 if x + 9 + size < frame.width else x - 9 - size
        if all(abs(y - other) > 12 or start > end or start + size < begin for begin, end, other in taken):
            taken.append((start, start + size, y))
            parts.append(f'<text class="tick" x="{start:.1f}" y="{y:.1f}">{esc(name)}</text>')
    return parts


def _log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Exponents of 1, 2, 5 times powers of ten within a range of exponents; powers alone where there are many."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    factors = (1,) if high - low > 3 else (1, 2, 5)
    exact = tuple(power + math.log10(factor) for power in powers for factor in factors)
    found = tuple(value for value in exact if low <= value <= high)
    return found or (low, high)


def _folder(run: Path, iteration: int) -> Path:
    return run / "samples" / f"iteration_{iteration:06d}"


def _prompts(run: Path) -> dict[int, str]:
    path = run / "samples" / "prompts.json"
    listed = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    return {number: entry["prompt"] for number, entry in enumerate(listed)}


def _image(path: Path, words: str) -> str:
    found = embed(path) if path.is_file() else None
    if found is None:
        return "\u2013"
    source, small = found
    style = ' class="pixels"' if small else ""
    return f'<img{style} src="{source}" alt="{esc(words)}">'
