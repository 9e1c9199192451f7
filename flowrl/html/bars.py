"""Charts over names instead of iterations: scores of tasks with their intervals, and time by stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from flowrl.html.charts import nice_ticks, svg, tick_text
from flowrl.html.markup import duration, esc, number
from flowrl.statistics.bootstrap import Interval

ROW = 40  # pixels a task takes


def dot_chart(
    before: Mapping[str, Interval], after: Mapping[str, Interval], *, width: int, x_label: str, description: str
) -> str:
    """One line a task: a ring before, a disc after, each with its interval, joined by the change."""
    names = list(dict.fromkeys([*before, *after]))
    left, right, top = 108, 16, 8
    bottom = top + ROW * len(names)
    shown = [*before.values(), *after.values()]
    ends = [value for interval in shown for value in (interval.mean, interval.low, interval.high) if value == value]
    ticks = nice_ticks(min(0.0, *ends), max(1.0, *ends), 5 if width > 400 else 4)

    def x(value: float) -> float:
        return left + (value - ticks[0]) / (ticks[-1] - ticks[0]) * (width - left - right)

    parts = []
    for tick in ticks:
        parts.append(f'<path class="grid" d="M{x(tick):.1f} {top}V{bottom}"/>')
        parts.append(f'<text class="tick mid" x="{x(tick):.1f}" y="{bottom + 16}">{tick_text(tick)}</text>')
    for index, name in enumerate(names):
        y = top + ROW * (index + 0.5)
        parts.append(f'<text class="name end" x="{left - 12}" y="{y + 4:.1f}">{esc(name.replace("_", " "))}</text>')
        if name in before and name in after:
            a, b = x(before[name].mean), x(after[name].mean)
            parts.append(f'<path class="change" d="M{a:.1f} {y - 6:.1f}L{b:.1f} {y + 6:.1f}"/>')
        if name in before:
            parts.append(_dot(x, y - 6, before[name], "ring c2", f"{name} before"))
        if name in after:
            parts.append(_dot(x, y + 6, after[name], "dot c1", f"{name} after"))
    parts.append(
        f'<text class="label mid" x="{(left + width - right) / 2:.1f}" y="{bottom + 36}">{esc(x_label)}</text>'
    )
    return svg(width, bottom + 42, description, "".join(parts))


def stacked_bar(parts: Sequence[tuple[str, float]], *, width: int, description: str) -> str:
    """Shares of one total, side by side; a share too narrow for its number leaves it to the table."""
    total = sum(seconds for _, seconds in parts) or 1.0
    left, height, out = 0.0, 44, []
    for index, (name, seconds) in enumerate(parts):
        size = seconds / total * width
        share = f"{100 * seconds / total:.0f} %"
        title = f"<title>{esc(name)}: {duration(seconds)} ({share})</title>"
        place = f'x="{left:.1f}" y="0" width="{max(size - 1.5, 0.5):.1f}" height="{height}"'
        out.append(f'<rect class="fill c{index % 6 + 1}" {place}>{title}</rect>')
        if size > 40:
            out.append(
                f'<text class="share c{index % 6 + 1}" x="{left + size / 2:.1f}" y="{height / 2 + 5}">{share}</text>'
            )
        left += size
    return svg(width, height, description, "".join(out))


def _dot(x: Callable[[float], float], y: float, interval: Interval, style: str, label: str) -> str:
    color = style.split()[-1]
    whisker = note = ""
    if interval.known:
        whisker = f'<path class="whisker {color}" d="M{x(interval.low):.1f} {y:.1f}H{x(interval.high):.1f}"/>'
        note = f" (95 % {number(interval.low)} to {number(interval.high)})"
    title = f"<title>{esc(label.replace('_', ' '))}: {number(interval.mean)}{note}</title>"
    return f'{whisker}<circle class="{style}" cx="{x(interval.mean):.1f}" cy="{y:.1f}" r="4.5">{title}</circle>'
