"""The page of a reward's card: one file that needs no network, light and dark."""

from __future__ import annotations

import math

import numpy as np

from flowrl.evaluation.reward_card.card_measure import CardMeasures
from flowrl.evaluation.reward_card.card_text import Grade, calls, lines, overall, verdicts, worst_change
from flowrl.media.images import evenly
from flowrl.media.perturbations import PERTURBATIONS
from flowrl.prompts.loading import spread
from flowrl.rendering.bars import Mark, forest
from flowrl.rendering.charts import WIDER
from flowrl.rendering.document import document
from flowrl.rendering.dots import Dot, scatter
from flowrl.rendering.embedded_images import image_element
from flowrl.rendering.markup import DASH, bounds, code, duration, esc, notes_box, number, plural, section, table, tiles
from flowrl.rendering.markup import card as figure
from flowrl.statistics.bootstrap import Interval, point

GROUPS, SHOWN = 6, 7  # prompts and images of each in the gallery
POINTS = 1500  # of a scatter plot
MARKS: dict[Grade, tuple[str, str]] = {
    "good": ("good", "✓ good"),
    "fair": ("fair", "○ fair"),
    "poor": ("bad", "✕ poor"),
    "open": ("", DASH),
}


def render(card: CardMeasures) -> str:
    """The whole page as HTML."""
    found = verdicts(card)
    rows = ""
    for verdict in found:
        style, mark = MARKS[verdict.grade]
        rows += f'<b>{esc(verdict.aspect)}</b><span class="mark {style}">{mark}</span><p>{esc(verdict.words)}</p>'
    # The second pass, and the change that harms the order most.
    shown = [("second pass", card.again)]
    worst = worst_change(card)
    if worst is not None:
        shown.append((PERTURBATIONS[worst][0], card.changed[worst]))
    charts = "".join(figure(_scatter(card.values, values, name)) for name, values in shown)
    kept = [("second pass", card.repeat.rank)]
    kept += [(PERTURBATIONS[name][0], changed.rank) for name, changed in card.perturbed.items()]
    kept += [(f"{name} instead", other.within) for name, other in card.others.items()]
    kept = [(name, rank) for name, rank in kept if math.isfinite(rank.mean)]
    label = "rank correlation of advantages"
    said = f"{label}: " + ", ".join(f"{name} {rank.mean:.2f}" for name, rank in kept)
    marks = [(name, [Mark(interval=rank)]) for name, rank in kept]
    ranks = forest(marks, x_label=label, description=said, around=(0.0, 1.0), wide=WIDER)
    listed: list[list[str]] = []
    part = ""
    for place, name, value in lines(card):
        if place != part:
            part = place
            listed.append([f'<span class="muted">{esc(part)}</span>', "", ""])
        listed.append([esc(name), number(value.mean, 4), bounds(value) if value.known else ""])
    numbers = table("Every number of the card", ["", "value", "95 %"], listed)
    body = "".join([
        f'<p class="summary">{esc(overall(found))}</p>',
        notes_box(card.notes),
        _tiles(card),
        section("verdicts", "Verdicts", f'<div class="verdicts card">{rows}</div>'),
        section("advantages", "What becomes of advantages", figure(ranks, style=" one"),
                "Rank correlation of a prompt's images, before and after each change, mean over prompts with 95 % "
                "intervals. 1 keeps the order, 0 has nothing left of it."),
        section("values", "Values, image by image", f'<div class="two">{charts}</div>' if charts else "",
                "One dot per image; on the line nothing changed."),
        section("images", "What it prefers", _gallery(card),
                "Prompts spread evenly over the list, not picked. Left the highest value, right the lowest."),
        section("numbers", "Numbers", f'<div class="numbers">{numbers}</div>',
                "Intervals: 95 %, over prompts; those of the seconds over batches."),
        section("version", "What was measured", code(card.version), esc(card.reproduces or "")),
    ])  # fmt: skip
    title = f"Reward card: {card.name}"
    facts = [plural(card.images, "image"), plural(card.prompts, "prompt"), f"kind {card.kind}"]
    footer = "Written by <code>flowrl reward card</code>."
    return document(title, body, lead=esc(" · ".join(facts)), footer=footer)


def _tiles(card: CardMeasures) -> str:
    def of(name: str, interval: Interval, note: str) -> tuple[str, str, str]:
        return name, number(interval.mean), f"95 %: {bounds(interval)}" if interval.known else note

    ratio = card.repeat.signal_to_noise
    said = "no noise seen" if math.isinf(ratio) else f"signal to noise {number(ratio, 1)}"
    found = [
        of("reliability within prompts", card.repeat.reliability, said),
        of("noise share of a group's deviation", card.repeat.noise_share, said),
    ]
    worst = worst_change(card)
    if worst is not None:
        found.append(("order kept at worst", number(card.perturbed[worst].rank.mean, 2), PERTURBATIONS[worst][0]))
    if card.order is not None:
        found.append(of("first one wins beyond half", card.order.first_wins, ""))
    hours = f"{number(card.cost.hours_per_1000)} h, {calls(card)}"
    return tiles([*found, ("1000 images take", duration(1000 * card.cost.seconds.mean), hours)])


def _scatter(x: np.ndarray, y: np.ndarray, name: str) -> str:
    both = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    places = both[spread(len(both), POINTS)]
    points = [Dot(x=point(float(x[k])), y=point(float(y[k])), shape="raw") for k in places]
    said = f"Values of the {name} over those of the first pass"
    return scatter(points, x_label="first pass", y_label=name, description=said, same=True) if points else ""


def _gallery(card: CardMeasures) -> str:
    groups: dict[int, list[int]] = {}
    for place, item in enumerate(card.items):
        if math.isfinite(card.values[place]):
            groups.setdefault(item.index, []).append(place)
    rows = list(groups.values())
    figures = ""
    for places in (rows[index] for index in spread(len(rows), GROUPS)):
        order = sorted(places, key=lambda place: -card.values[place])
        shown = [order[index] for index in evenly(len(order), min(len(order), SHOWN))]
        images = ""
        for place in shown:
            value = number(float(card.values[place]))
            if element := image_element(card.items[place].path, f"value {value}"):
                images += f"<div>{element}<span>{value}</span></div>"
        prompt = esc(card.items[places[0]].prompt or card.items[places[0]].path.parent.name)
        figures += f'<figure class="pair"><div class="sides">{images}</div><figcaption>{prompt}</figcaption></figure>'
    return f'<div class="gallery">{figures}</div>' if figures else ""
