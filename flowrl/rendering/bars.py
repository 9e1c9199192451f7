"""Charts over names: intervals in rows, and shares of a whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flowrl.rendering.charts import WIDE, dot, ends_of, legend, nice_ticks, responsive, svg, tick_text
from flowrl.rendering.markup import duration, esc, estimate
from flowrl.statistics.bootstrap import Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A number with its interval, and what it is ("before")."""

    interval: Interval
    label: str = ""
    color: int = 1
    shape: str = "dot"


Rows = Sequence[tuple[str, Sequence[Mark]]]
"""Names with their marks, one or two each: two are joined by a line, the change."""


def forest(
    rows: Rows, *, x_label: str, description: str, around: Sequence[float] = (0.0,), sign: bool = False,
    words: bool = False, wide: int = WIDE,
) -> str:  # fmt: skip
    """One line per name: dots with their intervals, for desktop and phone; nothing without rows.

    Args:
        rows: from top to bottom.
        description: text for readers who cannot see the chart.
        around: values that the axis shows in any case.
        sign: numbers are differences, written with their sign.
        words: write the numbers of rows with one mark beside them, if there is room.
        wide: width for a desktop.
    """

    def draw(width: int) -> str:
        step = 40 if any(len(marks) > 1 for _, marks in rows) else 28
        left = min(26 + 7 * max(len(name) for name, _ in rows), 42 * width // 100)
        right, top = 180 if words and width > 400 else 16, 8
        bottom = top + step * len(rows)
        low, high = ends_of((mark.interval for _, marks in rows for mark in marks), *around)
        ticks = nice_ticks(low, high, 5 if width > 400 else 3)

        def x(value: float) -> float:
            return left + (value - ticks[0]) / (ticks[-1] - ticks[0]) * (width - left - right)

        parts = tick_lines(ticks, x, top, bottom, sign=sign)
        for index, (name, marks) in enumerate(rows):
            parts += _row(name, marks, top + step * (index + 0.5), left, x, sign=sign)
            if words and width > 400 and len(marks) == 1:
                beside, y = estimate(marks[0].interval, sign=sign).replace("95 % ", ""), top + step * (index + 0.5)
                parts.append(f'<text class="label" x="{width - right + 12}" y="{y + 4:.1f}">{beside}</text>')
        middle = (left + width - right) / 2
        parts.append(f'<text class="label mid" x="{middle:.1f}" y="{bottom + 36}">{esc(x_label)}</text>')
        return svg(width, bottom + 42, description, "".join(parts))

    return responsive(draw, wide) if rows else ""


def tick_lines(
    ticks: Sequence[float], x: Callable[[float], float], top: int, bottom: int, *, sign: bool = False
) -> list[str]:
    """A line and a number for each tick; zero is the axis of differences."""
    parts = []
    for tick in ticks:
        style = "axis" if tick == 0 and sign else "grid"
        parts.append(f'<path class="{style}" d="M{x(tick):.1f} {top}V{bottom}"/>')
        parts.append(f'<text class="tick mid" x="{x(tick):.1f}" y="{bottom + 16}">{tick_text(tick)}</text>')
    return parts


def _row(
    name: str, marks: Sequence[Mark], y: float, left: int, x: Callable[[float], float], *, sign: bool
) -> list[str]:
    """A name and its marks, whose dots lie over their intervals; `x` is the place of a number."""
    room = (left - 19) // 7
    fit = name if len(name) <= room else f"{name[: room - 1]}\u2026"
    parts = [f'<text class="name end" x="{left - 12}" y="{y + 4:.1f}">{esc(fit)}</text>']
    places = [(x(mark.interval.mean), y + 6 * (2 * k - len(marks) + 1)) for k, mark in enumerate(marks)]
    if len(marks) > 1:
        parts.append(f'<path class="change" d="M{"L".join(f"{a:.1f} {b:.1f}" for a, b in places)}"/>')
    for mark, place in zip(marks, places, strict=True):
        if mark.interval.known:
            ends = f"M{x(mark.interval.low):.1f} {place[1]:.1f}H{x(mark.interval.high):.1f}"
            parts.append(f'<path class="whisker c{mark.color}" d="{ends}"/>')
        title = f"{name}{f' {mark.label}' if mark.label else ''}: {estimate(mark.interval, sign=sign)}"
        parts.append(dot(*place, title, mark.color, mark.shape))
    return parts


def forest_of_two(
    base: Mapping[str, Interval], subject: Mapping[str, Interval], names: tuple[str, str], *, x_label: str,
    description: str, wide: int = WIDE,
) -> str:  # fmt: skip
    """Scores from 0 to 1 by task: a ring for the base and a dot for the subject, with the legend of both `names`."""
    rows = []
    for task in dict.fromkeys([*base, *subject]):
        marks = [Mark(interval=base[task], label=names[0], color=2, shape="ring")] if task in base else []
        marks += [Mark(interval=subject[task], label=names[1])] if task in subject else []
        rows.append((task.replace("_", " "), marks))
    key = [(names[0], 2, "ring")] * bool(base) + [(names[1], 1, "dot")] * bool(subject)
    chart = forest(rows, x_label=x_label, description=description, around=(0.0, 1.0), wide=wide)
    return f"{chart}{legend([*key, ('95 % interval', 0, 'line')])}" if chart else ""


def stacked_bar(parts: Sequence[tuple[str, float]], *, description: str) -> str:
    """Shares of one total, side by side; a share too narrow for its number leaves it to the table."""
    total = sum(seconds for _, seconds in parts) or 1.0

    def draw(width: int) -> str:
        left, height, out = 0.0, 44, []
        for index, (name, seconds) in enumerate(parts):
            size, share = seconds / total * width, f"{100 * seconds / total:.0f} %"
            style, title = f"c{index % 6 + 1}", f"<title>{esc(name)}: {duration(seconds)} ({share})</title>"
            place = f'x="{left:.1f}" y="0" width="{max(size - 1.5, 0.5):.1f}" height="{height}"'
            out.append(f'<rect class="fill {style}" {place}>{title}</rect>')
            if size > 40:
                out.append(f'<text class="share {style}" x="{left + size / 2:.1f}" y="{height / 2 + 5}">{share}</text>')
            left += size
        return svg(width, height, description, "".join(out))

    return responsive(draw)
