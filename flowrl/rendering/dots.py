"""Charts of dots with their intervals along both axes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from flowrl.rendering.charts import Frame, dot, draw_axes, ends_of, frame_of, nice_ticks, responsive, svg
from flowrl.rendering.markup import esc
from flowrl.statistics.bootstrap import Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Dot:
    """A dot with its interval along either axis, drawn if known."""

    x: Interval
    """Where it lies, likewise `y`."""
    y: Interval
    title: str = ""
    """What hovering says."""
    label: str = ""
    """Text beside it if there is room."""
    color: int = 1
    """0 to 6."""
    shape: str = "dot"
    """Either "dot", "ring", or "raw" for one of many."""
    line: Hashable = None
    """Points of one line are joined in their order."""


def scatter(
    points: Sequence[Dot], *, x_label: str, y_label: str, description: str, log: bool = False, same: bool = False
) -> str:
    """Dots with their intervals, for desktop and phone.

    Args:
        points: one or more; labels are placed in their order, and what finds no place is left to hovering.
        x_label: of the axis, likewise `y_label`.
        description: text for readers who cannot see the chart.
        log: x is drawn as a logarithm.
        same: both axes measure the same: they get one scale, and the line on which they are equal.
    """

    def draw(width: int) -> str:
        height = 300 if same else 330
        x_low, x_high = ends_of(point.x for point in points)
        y_low, y_high = ends_of(point.y for point in points)
        diagonal = ""
        if same:
            x_ticks = y_ticks = nice_ticks(min(x_low, y_low), max(x_high, y_high), 5)
            low, high = x_ticks[0], x_ticks[-1]
        else:
            y_ticks = nice_ticks(y_low, y_high, 5)
            low, high = (math.log10(x_low), math.log10(x_high)) if log else (x_low, x_high)
            pad = 0.06 * (high - low) or 0.1
            low, high = low - pad, high + pad
            x_ticks = log_ticks(low, high) if log else nice_ticks(low, high, 6 if width > 400 else 4)
        frame = frame_of(width, height, x_ticks, (low, high), y_ticks, log=log)
        if same:
            ends = f"M{frame.x(low):.1f} {frame.y(low):.1f}L{frame.x(high):.1f} {frame.y(high):.1f}"
            diagonal = f'<path class="axis" stroke-dasharray="4 4" d="{ends}"/>'
        parts = [draw_axes(frame, x_label, y_label), diagonal, *_marks(frame, points), *_labels(frame, points)]
        return svg(width, height, description, "".join(parts))

    return responsive(draw)


def log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Exponents of 1, 2, 5 times powers of ten in a range: only powers in a wide one, round numbers in a narrow one."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    factors = (1,) if high - low > 3 else (1, 2, 5)
    values = [10.0**power * factor for power in powers for factor in factors]
    if high - low < 0.8:
        values = [value for value in nice_ticks(10**low, 10**high, 4) if value > 0]
    return tuple(place for value in values if low <= (place := math.log10(value)) <= high)


def _marks(frame: Frame, points: Sequence[Dot]) -> list[str]:
    """Lines through dots, over them the intervals, and over these the dots."""
    lines, whiskers, dots = dict[Hashable, list[Dot]](), [], []
    for point in points:
        lines.setdefault(point.line, []).append(point)
        x, y, ends = frame.x(point.x.mean), frame.y(point.y.mean), ""
        if point.y.known:
            ends += f"M{x:.1f} {frame.y(point.y.high):.1f}V{frame.y(point.y.low):.1f}"
        if point.x.known:
            ends += f"M{frame.x(point.x.low):.1f} {y:.1f}H{frame.x(point.x.high):.1f}"
        whiskers.append(f'<path class="whisker faint c{point.color}" d="{ends}"/>' if ends else "")
        dots.append(dot(x, y, point.title, point.color, point.shape))
    joined = []
    for line, own in lines.items():
        if line is not None and len(own) > 1:
            path = "L".join(f"{frame.x(point.x.mean):.1f} {frame.y(point.y.mean):.1f}" for point in own)
            joined.append(f'<path class="line thin c{own[0].color}" d="M{path}"/>')
    return [*joined, *whiskers, *dots]


def _labels(frame: Frame, points: Sequence[Dot]) -> list[str]:
    """Labels beside their dots, if they cover no other dot or label."""
    labelled = [(frame.x(point.x.mean), frame.y(point.y.mean), point.label) for point in points if point.label]
    taken = [(x - 6, x + 6, y - 6, y + 6) for x, y, _ in labelled]
    parts = []
    for x, y, label in labelled:
        size = 6.6 * len(label)
        places = ((x + 8, y - 6), (x - 8 - size, y - 6), (x + 8, y + 15), (x - 8 - size, y + 15),
                  (x - size / 2, y - 12), (x - size / 2, y + 21))  # fmt: skip
        for left, base in places:
            box = (left, left + size, base - 9, base + 2)
            inside = frame.left <= left and box[1] <= frame.width and box[2] >= 0
            inside = inside and base <= frame.height - frame.bottom - 2
            apart = (box[1] <= a[0] or a[1] <= box[0] or box[3] <= a[2] or a[3] <= box[2] for a in taken)
            if inside and all(apart):
                taken.append(box)
                parts.append(f'<text class="tick" x="{left:.1f}" y="{base:.1f}">{esc(label)}</text>')
                break
    return parts
