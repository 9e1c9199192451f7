"""The page of an evaluation: one file that needs no network, light and dark, and prints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from flowrl.commands.eval.benchmark import Result, Table
from flowrl.html.bars import dot_chart
from flowrl.html.charts import legend, nice_ticks, responsive, svg, tick_text
from flowrl.html.document import document
from flowrl.html.markup import bounds, esc, section, signed, table
from flowrl.statistics.bootstrap import Interval

ROW = 28  # pixels a line of the forest takes
EXTRA_CSS = """
.one{margin-top:12px;max-width:760px}.tables h3{margin-top:26px}.tables .muted{margin-top:8px}
.fails{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:12px;margin:4px 0 22px}
.fails figure{margin:0;background:var(--card);border:1px solid var(--edge);border-radius:10px;padding:8px}
.fails img{display:block;width:100%;height:auto;border-radius:5px}.fails figcaption{overflow-wrap:anywhere}
"""


def render(
    result: Result, *, title: str, names: Sequence[str], command: str, more: Sequence[Table] = ()
) -> str:  # fmt: skip
    """The whole page as HTML.

    Args:
        result: what the benchmark found.
        title: of the page.
        names: of the subject and, if there is one, of the base.
        command: that made it.
        more: tables that are not the benchmark's own, such as means over several models.
    """
    notes = "".join(f"<li>{esc(note)}</li>" for note in result.notes)
    body = "".join([
        f'<p class="summary">{esc(result.headline)}</p>',
        f'<ul class="notes">{notes}</ul>' if notes else "",
        section("scores", "Scores with 95 % intervals", _chart(result, names),
                "Intervals resample prompts; they do not cover another training of the same model."),
        section("differences", f"Change from {names[-1]} to {names[0]}", _forest(result.differences),
                "Pairs of the same prompt and sample. Right of the line is better; an interval that crosses the line "
                "leaves the sign open."),
        section("tables", "Tables",
                f'<div class="tables">{"".join(_table(part) for part in (*more, *result.tables))}</div>'),
        *result.sections,
        section("settings", "Command and settings", _settings(command, result.facts)),
    ])  # fmt: skip
    return document(title, body, footer="Written by <code>flowrl eval</code>.", css=EXTRA_CSS)


def _chart(result: Result, names: Sequence[str]) -> str:
    """A disc for the subject, a ring for the base, each with its interval."""
    if not result.intervals:
        return ""

    def draw(width: int) -> str:
        return dot_chart(
            result.base_intervals, result.intervals, width=width, x_label="score", description="scores with intervals"
        )

    key = [(names[0], 1, "dot"), *((name, 2, "ring") for name in names[1:])]
    return f'<figure class="card one">{responsive(draw)}</figure>{legend(key)}'


def _forest(differences: Mapping[str, Interval]) -> str:
    """Differences with their intervals, a line each, around zero."""
    if not differences:
        return ""
    return f'<figure class="card one">{responsive(lambda width: _draw_forest(differences, width))}</figure>'


def _draw_forest(differences: Mapping[str, Interval], width: int) -> str:
    left, right, top = 128, 170 if width > 400 else 14, 8
    bottom = top + ROW * len(differences)
    ends = [value for part in differences.values() for value in (part.low, part.mean, part.high) if value == value]
    ticks = nice_ticks(min(0.0, *ends), max(0.0, *ends), 4 if width > 400 else 3)

    def x(value: float) -> float:
        return left + (value - ticks[0]) / (ticks[-1] - ticks[0]) * (width - left - right)

    parts = []
    for tick in ticks:
        parts.append(f'<path class="{"grid" if tick else "axis"}" d="M{x(tick):.1f} {top}V{bottom}"/>')
        parts.append(f'<text class="tick mid" x="{x(tick):.1f}" y="{bottom + 16}">{tick_text(tick)}</text>')
    for index, (name, interval) in enumerate(differences.items()):
        y, words = top + ROW * (index + 0.5), signed(interval.mean)
        parts.append(f'<text class="name end" x="{left - 12}" y="{y + 4:.1f}">{esc(name.replace("_", " "))}</text>')
        if interval.known:
            words += f" ({bounds(interval, sign=True)})"
            parts.append(f'<path class="whisker c1" d="M{x(interval.low):.1f} {y:.1f}H{x(interval.high):.1f}"/>')
        title = f"<title>{esc(name)}: {words}</title>"
        parts.append(f'<circle class="dot c1" cx="{x(interval.mean):.1f}" cy="{y:.1f}" r="4.5">{title}</circle>')
        if width > 400:
            parts.append(f'<text class="label" x="{width - right + 10}" y="{y + 4:.1f}">{words}</text>')
    label = f'<text class="label mid" x="{(left + width - right) / 2:.1f}" y="{bottom + 36}">change with 95 %</text>'
    return svg(width, bottom + 42, "changes with intervals", "".join([*parts, label]))


def _table(part: Table) -> str:
    rows = [[esc(cell) for cell in row] for row in part.rows]
    note = f'<p class="muted">{esc(part.note)}</p>' if part.note else ""
    body = table(part.title, [esc(cell) for cell in part.head], rows) if rows else ""
    return f"<h3>{esc(part.title)}</h3>{body}{note}"


def _settings(command: str, facts: Mapping[str, object]) -> str:
    rows = [
        [esc(key), f"<code>{esc(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))}</code>"]
        for key, value in facts.items()
    ]
    folded = table("Judge, settings and times", ["Key", "Value"], rows)
    return (
        f'<pre tabindex="0"><code>{esc(command)}</code></pre>'
        f"<details><summary>Judge, settings and times</summary>{folded}</details>"
    )
