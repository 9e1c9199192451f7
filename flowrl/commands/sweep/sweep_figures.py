"""The figures of a sweep: points with intervals along both axes, joined within a series; and the strip of images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrl.commands.report.shown_samples import embed
from flowrl.commands.sweep.result import Outcome, Results
from flowrl.commands.sweep.settings import Setting
from flowrl.html.charts import Frame, axes, legend, nice_ticks, responsive, svg, tick_text
from flowrl.html.markup import bounds, esc, number
from flowrl.statistics.bootstrap import Interval
from flowrl.statistics.bootstrap import point as exactly

HEIGHT = 330
COLORS = {"rlg": 1, "best_of": 2, "prune": 3, "run": 4}
NAMES = {"rlg": "RLG scales", "best_of": "best of N", "prune": "pruned, N@steps", "run": "other runs, as trained"}
SHAPES = {"rlg": "line", "best_of": "line", "prune": "dot", "run": "ring"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A setting on a chart; bounds that are not known are not drawn, and points of one series can be joined."""

    x: Interval
    y: Interval
    label: str
    title: str
    kind: str
    series: tuple[str, float]


def key(kinds: Sequence[str]) -> str:
    """The legend of the series that are there."""
    return legend([(NAMES[kind], COLORS[kind], SHAPES[kind]) for kind in NAMES if kind in kinds])


def against_diversity(results: Results, name: str) -> str:
    """A measure over diversity: scales joined in order, other runs beside them."""
    points = [_point(one, one.means[results.diversity], name) for one in results.of_kind("rlg", "run")]
    return chart(points, x_label=f"{results.diversity} (right: more different images)", y_label=name)


def against_scale(results: Results, name: str) -> str:
    """A measure over the RLG scale."""
    points = [_point(one, exactly(one.setting.scale), name, label="") for one in results.of_kind("rlg")]
    return chart(points, x_label="RLG scale", y_label=name)


def against_cost(results: Results, name: str) -> str:
    """A measure over evaluations of the network: RLG, best of N and pruning."""
    outcomes = results.of_kind("rlg", "best_of", "prune")
    points = [_point(one, exactly(math.log10(one.evaluations)), name) for one in outcomes]
    return chart(points, x_label="network evaluations for an image (log)", y_label=name, cost=True)


def short(setting: Setting) -> str:
    """A label that fits beside a dot."""
    if setting.kind == "rlg":
        return {0.0: "0 base", 1.0: "1 tuned"}.get(setting.scale, tick_text(setting.scale))
    if setting.kind == "run":
        return setting.run
    cuts = ",".join(str(step + 1) for step, _ in setting.plan.cuts)
    search = f"{setting.plan.num_candidates}{'@' if cuts else ''}{cuts}"
    return search if setting.scale == 1 else f"{search} of {tick_text(setting.scale)}"


def _point(one: Outcome, x: Interval, name: str, label: str | None = None) -> Point:
    value = one.means[name]
    interval = f" (95 % {bounds(value)})" if value.known else ""
    return Point(
        x=x, y=value, label=short(one.setting) if label is None else label, kind=one.setting.kind,
        series=("best_of", one.setting.scale) if one.setting.kind == "best_of" else (one.setting.kind, 0.0),
        title=f"{one.setting.label}: {name} {number(value.mean)}{interval}, {one.evaluations} evaluations",
    )  # fmt: skip


def chart(points: Sequence[Point], *, x_label: str, y_label: str, cost: bool = False) -> str:
    """The chart for desktop and phone; `cost`: x is a logarithm, and what is joined is best of N instead of scales."""
    return responsive(lambda width: _chart(points, width, x_label, y_label, cost))


def _chart(points: Sequence[Point], width: int, x_label: str, y_label: str, cost: bool) -> str:
    frame = _frame(points, width, cost)
    parts = [axes(frame, x_label, y_label, x_text=_cost_text if cost else tick_text)]
    for series in dict.fromkeys(point.series for point in points if point.kind == ("best_of" if cost else "rlg")):
        parts.append(_joined(frame, [point for point in points if point.series == series]))
    parts += [_whiskers(frame, point) for point in points]
    parts += [_dot(frame, point) for point in points]
    parts += _labels(frame, points)
    return svg(width, HEIGHT, f"{y_label} against {x_label}", "".join(parts))


def _frame(points: Sequence[Point], width: int, cost: bool) -> Frame:
    x = [value for point in points for value in (point.x.low, point.x.mean, point.x.high) if math.isfinite(value)]
    y = [value for point in points for value in (point.y.low, point.y.mean, point.y.high) if math.isfinite(value)]
    y_ticks = nice_ticks(min(y), max(y), 5)
    low, high = min(x), max(x)
    pad = 0.06 * (high - low) or 0.1
    low, high = low - pad, high + pad
    ticks = _cost_ticks(points) if cost else nice_ticks(low, high, 6 if width > 400 else 4)
    return Frame(
        width=width, height=HEIGHT, left=34 + 7 * max(len(tick_text(tick)) for tick in y_ticks),
        x_ticks=tuple(tick for tick in ticks if low <= tick <= high), y_ticks=y_ticks, x_range=(low, high),
        y_range=(y_ticks[0], y_ticks[-1]),
    )  # fmt: skip


def _cost_ticks(points: Sequence[Point]) -> tuple[float, ...]:
    """The costs that occur, those a quarter or more above the tick before."""
    ticks: list[float] = []
    for value in sorted({point.x.mean for point in points}):
        if not ticks or value >= ticks[-1] + math.log10(1.25):
            ticks.append(value)
    return tuple(ticks)


def _cost_text(tick: float) -> str:
    """A tick of the logarithmic axis of costs."""
    return tick_text(float(f"{10**tick:.3g}"))


def _joined(frame: Frame, points: Sequence[Point]) -> str:
    if len(points) < 2:
        return ""
    path = "L".join(f"{frame.x(point.x.mean):.1f} {frame.y(point.y.mean):.1f}" for point in points)
    return f'<path class="line thin c{COLORS[points[0].kind]}" d="M{path}"/>'


def _whiskers(frame: Frame, point: Point) -> str:
    color, x, y = COLORS[point.kind], frame.x(point.x.mean), frame.y(point.y.mean)
    parts = ""
    if point.y.known:
        top, bottom = frame.y(point.y.high), frame.y(point.y.low)
        parts += f'<path class="whisker faint c{color}" d="M{x:.1f} {top:.1f}V{bottom:.1f}"/>'
    if point.x.known:
        left, right = frame.x(point.x.low), frame.x(point.x.high)
        parts += f'<path class="whisker faint c{color}" d="M{left:.1f} {y:.1f}H{right:.1f}"/>'
    return parts


def _dot(frame: Frame, point: Point) -> str:
    style = "ring" if point.kind == "run" else "dot"
    return (
        f'<circle class="{style} c{COLORS[point.kind]}" cx="{frame.x(point.x.mean):.1f}" '
        f'cy="{frame.y(point.y.mean):.1f}" r="5"><title>{esc(point.title)}</title></circle>'
    )


def _labels(frame: Frame, points: Sequence[Point]) -> list[str]:
    """Labels beside their dots, where they cover no other dot or label; what finds no place is left to hovering."""
    dots = [(frame.x(point.x.mean), frame.y(point.y.mean)) for point in points]
    taken = [(x - 6, x + 6, y - 6, y + 6) for x, y in dots]
    parts = []
    for point, (x, y) in zip(points, dots, strict=True):
        size = 6.6 * len(point.label)
        places = ((x + 8, y - 6), (x - 8 - size, y - 6), (x + 8, y + 15), (x - 8 - size, y + 15),
                  (x - size / 2, y - 12), (x - size / 2, y + 21))  # fmt: skip
        for left, base in places if point.label else ():
            box = (left, left + size, base - 9, base + 2)
            inside = frame.left <= left and box[1] <= frame.width and 0 <= box[2] and base <= HEIGHT - frame.bottom - 2
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                parts.append(f'<text class="tick" x="{left:.1f}" y="{base:.1f}">{esc(point.label)}</text>')
                break
    return parts


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3]


StripRows = list[tuple[str, list[tuple[Setting, Path]]]]
"""A prompt a row: its text, and the image of every setting."""


def strip(rows: StripRows, kinds: Sequence[str]) -> str:
    """Images of one start noise a row, a setting a column."""
    head = body = ""
    for prompt, cells in rows:
        shown = [(setting, embed(path)) for setting, path in cells if setting.kind in kinds and path.is_file()]
        known = [(setting, found) for setting, found in shown if found is not None]
        head = "".join(f"<th scope=col>{esc(setting.label)}</th>" for setting, _ in known)
        images = "".join(
            f'<td><img{" class=pixels" if small else ""} src="{source}" alt="{esc(f"{setting.label}: {prompt}")}"></td>'
            for setting, (source, small) in known
        )
        body += f"<tr><th scope=row>{esc(prompt)}</th>{images}</tr>"
    if not head:
        return ""
    return (
        f'<div class="scroll shots" role="region" aria-label="Images" tabindex="0"><table><thead><tr><th></th>{head}'
        f"</tr></thead><tbody>{body}</tbody></table></div>"
    )
