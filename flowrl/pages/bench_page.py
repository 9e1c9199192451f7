"""The page of a bench, and of two benches side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrl.planning.words import in_bytes
from flowrl.profiling.result import PAGE, USED, WHOLE, WRONG, Bench, Phase, TimeSpread
from flowrl.profiling.text import (
    READING,
    alone,
    amount,
    compare_phases,
    facts_that_differ,
    last_words,
    notes_of,
    pace,
    rate,
    span,
)
from flowrl.profiling.text import time as written
from flowrl.rendering.bars import tick_lines
from flowrl.rendering.charts import NARROW, WIDER, legend, nice_ticks, responsive, svg
from flowrl.rendering.document import document
from flowrl.rendering.markup import DASH, card, code, esc, facts_table, fold, notes_box, plural, section, table, tiles
from flowrl.runtime.files import write_atomically


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
                    f"<title>{esc(f'{row.name}, {label}')}: {written(spread.median)}</title></rect>"
                )
                if spread.high > spread.low:
                    parts.append(f'<path class="whisker c0" d="M{x(spread.low):.1f} {bar_y + 7}H{high:.1f}"/>')
                parts.append(
                    f'<text class="label" x="{max(end, high) + 6:.1f}" y="{bar_y + 11}">{written(spread.median)}</text>'
                )
        middle = (left + width - right) / 2
        parts.append(f'<text class="label mid" x="{middle:.1f}" y="{bottom + 36}">{unit}</text>')
        return svg(width, bottom + 42, description, "".join(parts))

    shown = [(names[0], 1, "box")] + [(names[1], 3, "box")] * any(row.second is not None for row in rows)
    return responsive(draw, WIDER) + legend(shown)


FOOTER = "Written by <code>flowrl bench</code>."
_TITLES = {
    "ceilings": "What this machine reaches", "text": "Text", "network": "The network", "guidance": "Guidance",
    "attention": "Kernels of attention",
    "parts": "Other parts", "rewards": "Rewards", "iteration": "Whole iterations", "compile": "Compiled blocks",
}  # fmt: skip
_HEAD = ("phase", "seconds", "min .. max", "repeats", "of ceiling", "roofline", "memory", "saved", "operations")


def write_page(bench: Bench) -> Path:
    """Writes the page into the folder of a bench and returns its path."""
    assert bench.folder is not None
    write_atomically(bench.folder / PAGE, render(bench))
    return bench.folder / PAGE


def render(bench: Bench) -> str:
    """The whole page as HTML."""
    words = [*bench.notes, *(word for word in last_words(bench) if WRONG in word or word.startswith("Cut off"))]
    timed = [one for one in bench.phases if one.section in ("network", "guidance") and one.seconds is not None]
    bars = [_pair(bench, one) for one in timed]
    chart = paired_bars(bars, ("measured", "roofline"), description="Seconds of the network's phases")
    parts = [notes_box(words), tiles(_tiles(bench)), _iteration(bench)]
    parts.append(section("network-bars", "The network beside its roofline", card(chart)))
    for name, title in _TITLES.items():
        rows = [_row(bench, one) for one in bench.phases if one.section == name and one.seconds is not None]
        below = "".join(f'<p class="muted">{esc(line)}</p>' for line in notes_of(bench, name))
        parts.append(section(name, title, (table(title, _HEAD, rows) if rows else "") + below))
    told = fold("Machine and software", facts_table("Facts", ["fact", "value"], bench.facts)) if bench.facts else ""
    told += fold("Configuration", code(bench.config)) if bench.config else ""
    body = "".join([*parts, section("settings", "Settings and versions", told)])
    facts = [bench.facts.get(key) for key in ("device", "model", "dtype", "date")]
    return document(f"Bench of {bench.name}", body, lead=" · ".join(esc(fact) for fact in facts if fact), footer=FOOTER)


def render_comparison(first: Bench, second: Bench, names: tuple[str, str]) -> str:
    """Two benches side by side as HTML."""
    found = compare_phases(first, second)
    pairs = [BarPair(name=key, first=a, second=b) for key, a, b, _ in found if not key.startswith("ceilings")]
    chart = paired_bars(pairs, names, description=f"Seconds of each phase, {names[0]} and {names[1]}")
    rows = [
        [esc(key), _with_span(a), _with_span(b), f"{a.median / b.median:.2f}x" if b.median else DASH, verdict or DASH]
        for key, a, b, verdict in found
    ]
    only = [f"Only in {name}: {'; '.join(keys)}" for name, keys in alone(first, second, names) if keys]
    differ = [[esc(key), esc(a), esc(b)] for key, a, b in facts_that_differ(first, second)]
    named = [esc(name) for name in names]
    changed = [verdict for *_, verdict in found if verdict]
    body = "".join(
        [
            notes_box(only),
            f'<p class="summary">{len(changed)} of {len(found)} phases changed beyond the range of their repeats: '
            f"{changed.count('faster')} faster, {changed.count('slower')} slower in {esc(names[1])}.</p>",
            section("bars", "Seconds", card(chart)),
            section("table", "Phases", table("Seconds of both", ["phase", *named, "A / B", "beyond spread"], rows)),
            section("facts", "What differs", table("Facts", ["fact", *named], differ) if differ else ""),
        ]
    )
    return document(f"{names[0]} beside {names[1]}", body, footer=FOOTER)


def _tiles(bench: Bench) -> list[tuple[str, str, str]]:
    found = []
    whole, found_pace, ratio = bench.phase("iteration", "whole"), bench.throughput, bench.ratio_first_deviation
    if whole is not None and whole.wall is not None:
        images = f"{plural(whole.items, 'image')}, on the clock"
        found.append(("An iteration", written(whole.wall.median), images))
    if found_pace is not None:
        flops, of = found_pace
        found.append(("Pace", rate(flops), "of whole iterations" if of == "whole" else f"of {of} alone"))
    for section_, name in (("network", "forward"), ("network", "forward and backward")):
        phase = bench.phase(section_, name)
        share = None if phase is None else bench.utilisation(phase)
        if share is not None:
            found.append((name.capitalize(), f"{share:.0%}", "of a large matrix product"))
    if ratio is not None:
        found.append(("Deviation", f"{ratio:.2g}", "of the update's log-densities from the rollout's"))
    return found


def _iteration(bench: Bench) -> str:
    whole = bench.phase("iteration", WHOLE)
    rows = [
        one
        for one in bench.phases
        if one.section == "iteration" and one.wall is not None and one.name not in (WHOLE, USED)
    ]
    if whole is None or whole.wall is None or not rows:
        return ""
    pairs = [_pair(bench, one) for one in [*rows, whole]]
    chart = paired_bars(
        pairs, ("measured", "roofline"), description="Seconds of an iteration by stage, beside rooflines"
    )
    lead = "By the recipe itself, on the clock; the line is the range of its iterations. " + READING
    return section("an-iteration", "Where an iteration goes", card(chart), esc(lead))


def _pair(bench: Bench, phase: Phase) -> BarPair:
    least = bench.roofline(phase)
    assert phase.seconds is not None
    return BarPair(
        name=phase.name,
        first=phase.seconds,
        second=None if least is None else TimeSpread(median=least, low=least, high=least),
    )


def _row(bench: Bench, phase: Phase) -> list[str]:
    assert phase.seconds is not None
    share, least = bench.utilisation(phase), bench.roofline(phase)
    whole = bench.utilisation(phase, recomputed=True) if phase.recomputed else None
    reached = "" if share is None else f"{share:.0%}" + ("" if whole is None else f" ({whole:.0%} with recomputation)")
    if phase.section == "ceilings" and not phase.ceiling:
        reached = pace(phase)
    rows = f" · {much}" if (much := amount(phase)) else ""
    return [
        esc(phase.name + rows),
        written(phase.seconds.median),
        esc(span(phase.seconds)),
        str(phase.repeats),
        reached or DASH,
        DASH if least is None else written(least),
        *(DASH if count is None else in_bytes(count) for count in (phase.peak_bytes, phase.saved_bytes)),
        DASH if phase.operations is None else f"{phase.operations:,}",
    ]


def _with_span(spread: TimeSpread) -> str:
    return f"{written(spread.median)}<small>{esc(span(spread))}</small>"
