"""The page of a reward's card: one file that needs no network, light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from flowrl.commands.report.shown_samples import embed
from flowrl.commands.reward.card.card_measure import Card
from flowrl.commands.reward.card.card_text import Grade, Verdict, calls, lines, overall, verdicts, worst_change
from flowrl.html.charts import Frame, nice_ticks, responsive, svg, tick_text
from flowrl.html.document import document
from flowrl.html.markup import DASH, bounds, duration, esc, number, plural, section, table
from flowrl.media.perturbations import PERTURBATIONS
from flowrl.prompts.loading import spread
from flowrl.statistics.bootstrap import Interval

EXTRA_CSS = """
.verdicts{display:grid;grid-template-columns:max-content max-content 1fr;gap:0;margin:22px 0 0;padding:0 16px}
.verdicts>*{padding:9px 14px 9px 0;border-top:1px solid var(--edge);margin:0}
.verdicts>:nth-child(-n+3){border-top:0}.verdicts b{font-weight:600}
.scatters{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:16px}
.mark.fair{color:var(--ink)}.numbers .scroll{width:auto}.numbers table{width:100%}
.gallery{display:grid;gap:16px}
.gallery .sides{flex-wrap:wrap}.gallery .sides div{flex:0 0 112px}.one{max-width:760px;margin-top:12px}
@media (max-width:640px){.verdicts{grid-template-columns:1fr max-content}
.verdicts p{grid-column:1/-1;border-top:0;padding-top:0}.verdicts>:nth-child(3n+1),.verdicts>:nth-child(3n+2)
{border-top:1px solid var(--edge)}.gallery .sides div{flex-basis:84px}}
"""
GROUPS, SHOWN = 6, 7  # prompts and images of each in the gallery
POINTS = 1500  # of a scatter plot
MARKS: dict[Grade, tuple[str, str]] = {
    "good": ("good", "✓ good"), "fair": ("fair", "○ fair"), "poor": ("bad", "✕ poor"), "open": ("", DASH),
}  # fmt: skip


def render(card: Card) -> str:
    """The whole page as HTML."""
    found = verdicts(card)
    notes = "".join(f"<li>{esc(note)}</li>" for note in card.notes)
    body = "".join([
        f'<p class="summary">{esc(overall(found))}</p>',
        f'<ul class="notes">{notes}</ul>' if notes else "",
        _tiles(card),
        section("verdicts", "Verdicts", _verdicts(found)),
        section("advantages", "What becomes of advantages", _figure(_ranks(card)),
                "Rank correlation of a prompt's images, before and after each change, mean over prompts with 95 % "
                "intervals. 1 keeps the order, 0 has nothing left of it."),
        section("values", "Values, image by image", _scatters(card),
                "A dot an image; on the line nothing changed."),
        section("images", "What it prefers", _gallery(card),
                "Prompts spread evenly over the list, not picked. Left the highest value, right the lowest."),
        section("numbers", "Numbers", f'<div class="numbers">{_numbers(card)}</div>',
                "Intervals: 95 %, bootstrap over prompts; those of the seconds over batches."),
        section("version", "What was measured", f'<pre tabindex="0"><code>{esc(card.version)}</code></pre>'),
    ])  # fmt: skip
    title = f"Reward card: {card.name}"
    facts = [plural(card.images, "image"), plural(card.prompts, "prompt"), f"kind {card.kind}"]
    footer = "Written by <code>flowrl reward card</code>."
    return document(title, body, lead=esc(" · ".join(facts)), footer=footer, css=EXTRA_CSS)


def _tiles(card: Card) -> str:
    def tile(name: str, value: str, note: str) -> str:
        return f"<div><dt>{esc(name)}</dt><dd><b>{esc(value)}</b><small>{esc(note)}</small></dd></div>"

    def of(name: str, interval: Interval, note: str) -> str:
        within = f"95 %: {bounds(interval)}" if interval.known else note
        return tile(name, number(interval.mean), within)

    ratio = card.repeat.signal_to_noise
    said = "no noise seen" if math.isinf(ratio) else f"signal to noise {number(ratio, 1)}"
    tiles = of("reliability within prompts", card.repeat.reliability, said)
    tiles += of("noise share of a group's deviation", card.repeat.noise_share, said)
    worst = worst_change(card)
    if worst is not None:
        tiles += tile("order kept at worst", number(card.perturbed[worst].rank.mean, 2), PERTURBATIONS[worst][0])
    if card.order is not None:
        tiles += of("first one wins beyond half", card.order.first_wins, "")
    hours = f"{number(card.cost.hours_per_1000)} h, {calls(card)}"
    tiles += tile("1000 images take", duration(1000 * card.cost.seconds.mean), hours)
    return f'<dl class="tiles">{tiles}</dl>'


def _verdicts(found: Sequence[Verdict]) -> str:
    rows = ""
    for verdict in found:
        style, mark = MARKS[verdict.grade]
        rows += f'<b>{esc(verdict.aspect)}</b><span class="mark {style}">{mark}</span><p>{esc(verdict.words)}</p>'
    return f'<div class="verdicts card">{rows}</div>'


def _figure(chart: str) -> str:
    return f'<figure class="card one">{chart}</figure>' if chart else ""


def _ranks(card: Card) -> str:
    rows = [("second pass", card.repeat.rank)]
    rows += [(PERTURBATIONS[name][0], found.rank) for name, found in card.perturbed.items()]
    rows += [(f"{name} instead", other.within) for name, other in card.others.items()]
    rows = [(name, rank) for name, rank in rows if math.isfinite(rank.mean)]
    return responsive(lambda width: _whiskers(rows, width)) if rows else ""


def _whiskers(rows: Sequence[tuple[str, Interval]], width: int) -> str:
    left, right, top, step = 150, 20, 8, 30
    bottom = top + step * len(rows)
    low = min(0.0, *(value for _, rank in rows for value in (rank.mean, rank.low) if math.isfinite(value)))
    ticks = nice_ticks(max(-1.0, low), 1.0, 5 if width > 400 else 3)

    def x(value: float) -> float:
        return left + (value - ticks[0]) / (ticks[-1] - ticks[0]) * (width - left - right)

    parts = []
    for tick in ticks:
        parts.append(f'<path class="grid" d="M{x(tick):.1f} {top}V{bottom}"/>')
        parts.append(f'<text class="tick mid" x="{x(tick):.1f}" y="{bottom + 16}">{tick_text(tick)}</text>')
    for index, (name, rank) in enumerate(rows):
        y = top + step * (index + 0.5)
        fit = name if len(name) <= 20 else name[:19] + "\u2026"
        parts.append(f'<text class="name end" x="{left - 12}" y="{y + 4:.1f}">{esc(fit)}</text>')
        if rank.known:
            parts.append(f'<path class="whisker c1" d="M{x(rank.low):.1f} {y:.1f}H{x(rank.high):.1f}"/>')
        words = f"{name}: {number(rank.mean)}" + (f" (95 % {bounds(rank)})" if rank.known else "")
        dot = f'<circle class="dot c1" cx="{x(rank.mean):.1f}" cy="{y:.1f}" r="4.5">'
        parts.append(f"{dot}<title>{esc(words)}</title></circle>")
    middle = (left + width - right) / 2
    label = "rank correlation of advantages"
    parts.append(f'<text class="label mid" x="{middle:.1f}" y="{bottom + 36}">{label}</text>')
    return svg(width, bottom + 42, f"{label}: " + ", ".join(f"{n} {r.mean:.2f}" for n, r in rows), "".join(parts))


def _scatters(card: Card) -> str:
    """The second pass, and the change that harms the order most."""
    shown = [("second pass", card.again)]
    worst = worst_change(card)
    if worst is not None:
        shown.append((PERTURBATIONS[worst][0], card.changed[worst]))
    charts = [chart for name, values in shown if (chart := _scatter(card.values, values, name))]
    cards = "".join(f'<figure class="card">{chart}</figure>' for chart in charts)
    return f'<div class="scatters">{cards}</div>' if cards else ""


def _scatter(x: np.ndarray, y: np.ndarray, name: str) -> str:
    both = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    if not len(both):
        return ""
    places = both[spread(len(both), POINTS)]
    low, high = float(min(x[both].min(), y[both].min())), float(max(x[both].max(), y[both].max()))
    ticks = nice_ticks(low, high, 5)

    def draw(width: int) -> str:
        frame = Frame(
            width=width, height=300, left=34 + 7 * max(len(tick_text(tick)) for tick in ticks), x_ticks=ticks,
            y_ticks=ticks, x_range=(ticks[0], ticks[-1]), y_range=(ticks[0], ticks[-1]),
        )  # fmt: skip
        bottom, right = frame.height - frame.bottom, frame.width - frame.right
        parts = []
        for tick in ticks:
            across, up = frame.x(tick), frame.y(tick)
            parts.append(f'<path class="grid" d="M{frame.left} {up:.1f}H{right}M{across:.1f} {frame.top}V{bottom}"/>')
            parts.append(f'<text class="tick end" x="{frame.left - 7}" y="{up + 4:.1f}">{tick_text(tick)}</text>')
            parts.append(f'<text class="tick mid" x="{across:.1f}" y="{bottom + 17}">{tick_text(tick)}</text>')
        ends = (frame.x(ticks[0]), frame.y(ticks[0]), frame.x(ticks[-1]), frame.y(ticks[-1]))
        parts.append('<path class="axis" stroke-dasharray="4 4" d="M{:.1f} {:.1f}L{:.1f} {:.1f}"/>'.format(*ends))
        parts += [f'<circle class="raw c1" cx="{frame.x(x[p]):.1f}" cy="{frame.y(y[p]):.1f}" r="2.6"/>' for p in places]
        middle = (frame.left + right) / 2
        parts.append(f'<text class="label mid" x="{middle:.1f}" y="{frame.height - 5}">first pass</text>')
        turned = f"translate(12 {(frame.top + bottom) / 2:.1f}) rotate(-90)"
        parts.append(f'<text class="label mid" transform="{turned}">{esc(name)}</text>')
        return svg(width, frame.height, f"Values of the {name} over those of the first pass", "".join(parts))

    return responsive(draw)


def _gallery(card: Card) -> str:
    groups: dict[int, list[int]] = {}
    for place, item in enumerate(card.items):
        if math.isfinite(card.values[place]):
            groups.setdefault(item.group, []).append(place)
    rows = list(groups.values())
    figures = ""
    for places in (rows[index] for index in spread(len(rows), GROUPS)):
        order = sorted(places, key=lambda place: -card.values[place])
        shown = [order[index] for index in _ends(len(order), SHOWN)]
        images = ""
        for place in shown:
            embedded = embed(card.items[place].path)
            if embedded is not None:
                source, small = embedded
                style = ' class="pixels"' if small else ""
                value = number(float(card.values[place]))
                images += f'<div><img{style} src="{source}" alt="value {value}"><span>{value}</span></div>'
        prompt = esc(card.items[places[0]].prompt or card.items[places[0]].path.parent.name)
        figures += f'<figure class="pair"><div class="sides">{images}</div><figcaption>{prompt}</figcaption></figure>'
    return f'<div class="gallery">{figures}</div>' if figures else ""


def _ends(total: int, count: int) -> list[int]:
    """Up to `count` places of a list, the first and the last among them."""
    count = min(total, count)
    return [round(k * (total - 1) / max(1, count - 1)) for k in range(count)]


def _numbers(card: Card) -> str:
    rows, part = [], ""
    for line in lines(card):
        if line.section != part:
            part = line.section
            rows.append([f'<span class="muted">{esc(part)}</span>', "", ""])
        rows.append([esc(line.name), number(line.value.mean, 4), bounds(line.value) if line.value.known else ""])
    return table("Every number of the card", ["", "value", "95 %"], rows)
