"""Charts of a bench: bars of two numbers each, one below the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowrl.profiling.result import TimeSpread
from flowrl.profiling.text import time
from flowrl.rendering.bars import tick_lines
from flowrl.rendering.charts import NARROW, WIDER, legend, nice_ticks, responsive, svg
from flowrl.rendering.markup import esc


@dataclass(frozen=True, kw_only=True, slots=True)
class BarPair:
    """A name with two numbers of seconds; the second may be unknown."""

    name: str
    first: TimeSpread
    second: TimeSpread | None


def paired_bars(rows: Sequence[BarPair], names: tuple[str, str], *, description: str) -> str:
    """Two bars a row, with the range of the repeats as a line; empty without rows.

    Args:
        rows: from top to bottom.
        names: of the upper and the lower bar.
        description: text for readers who cannot see the chart.
    """
    if not rows:
        return ""
    most = max(max(row.first.high, row.second.high if row.second else 0.0) for row in rows)
    scale, unit = (1.0, "s") if most >= 1 else (1e3, "ms")

    def draw(width: int) -> str:
        step, top = 44, 6
        left = min(26 + 7 * max(len(row.name) for row in rows), 40 * width // 100)
        right, bottom = 84, top + step * len(rows)
        ticks = nice_ticks(0.0, most * scale, 5 if width > NARROW else 3)

        def x(seconds: float) -> float:
            return left + seconds * scale / ticks[-1] * (width - left - right)

        parts = tick_lines(ticks, lambda tick: x(tick / scale), top, bottom)
        room = (left - 19) // 7
        for index, row in enumerate(rows):
            y = top + step * index
            fit = row.name if len(row.name) <= room else f"{row.name[: room - 1]}\u2026"
            parts.append(f'<text class="name end" x="{left - 12}" y="{y + 25}">{esc(fit)}</text>')
            for place, (label, spread) in enumerate(zip(names, (row.first, row.second), strict=True)):
                if spread is None:
                    continue
                start, end, high, bar_y = x(0.0), x(spread.median), x(spread.high), y + 5 + 17 * place
                parts.append(
                    f'<rect class="fill c{2 * place + 1}" x="{start:.1f}" y="{bar_y}" '
                    f'width="{max(end - start, 0.5):.1f}" height="14">'
                    f"<title>{esc(f'{row.name}, {label}')}: {time(spread.median)}</title></rect>"
                )
                if spread.high > spread.low:
                    parts.append(f'<path class="whisker c0" d="M{x(spread.low):.1f} {bar_y + 7}H{high:.1f}"/>')
                parts.append(
                    f'<text class="label" x="{max(end, high) + 6:.1f}" y="{bar_y + 11}">{time(spread.median)}</text>'
                )
        middle = (left + width - right) / 2
        parts.append(f'<text class="label mid" x="{middle:.1f}" y="{bottom + 36}">{unit}</text>')
        return svg(width, bottom + 42, description, "".join(parts))

    shown = [(names[0], 1, "box")] + [(names[1], 3, "box")] * any(row.second is not None for row in rows)
    return responsive(draw, WIDER) + legend(shown)
