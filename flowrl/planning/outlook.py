"""The verdict at the top of a plan: whether the run fits, when it ends, what it costs, and what shortens it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flowrl.config.train import ConfigError, TrainConfig
from flowrl.planning.disk import disk_line
from flowrl.planning.fits import Fit, fit
from flowrl.planning.gather import Plan
from flowrl.planning.hours import (
    LINKS,
    NETWORK,
    TOO_LONG,
    Hours,
    Speed,
    changed,
    gathered_bytes,
    in_time,
    rounded,
    speed_of,
    usual_card,
    work_of,
)
from flowrl.planning.memory import NODE, MemorySettings
from flowrl.planning.recommended import is_recommended, recommended
from flowrl.planning.shorter import GIVES_UP, RESERVE, SMALLER, SPANS, Length, batches_of, length_within
from flowrl.planning.verdict import card_for, verdict
from flowrl.planning.words import in_bytes, note, span, table
from flowrl.rendering.markup import plural
from flowrl.session.advice import few_step_advice, is_few_step, reference_notes

MOST_CARDS = 512
"""Largest number of cards to propose."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A run by one recipe: its configuration, its time, and the length that ends within each of `SPANS`."""

    config: TrainConfig
    hours: Hours
    lengths: Mapping[str, Length | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """The numbers of the verdict."""

    card: int
    """Memory of the card for the run, in GB."""
    found: Fit | None = None
    """What makes it fit; None if its memory is unknown."""
    speed: Speed | None = None
    """Speed of the cards; None if unknown."""
    own: Recipe | None = None
    """The run as it fits; None if its time is unknown."""
    other: Recipe | None = None
    """The same run by the recommended recipe; None if it has that already, or none is to be recommended."""
    price: float | None = None
    """Price of one card for an hour, in your currency."""
    advice: tuple[str, ...] = field(default=())


def outlook_of(plan: Plan, card: int | None, price: float | None = None) -> Outlook:
    """The verdict's numbers, for a card of so many GB (None takes the smallest usual one that holds the run unchanged,
    or else the largest) at a price per hour."""
    card = card_for(plan, card)
    advice = (*few_step_advice(plan.config), *reference_notes(plan.config))
    if plan.facts is None or plan.cost is None:
        return Outlook(card=card, price=price, advice=advice)
    found = fit(plan.facts, plan.settings, plan.choices, card)
    if found.overrides is None:  # what does not fit takes no time
        return Outlook(card=card, found=found, price=price, advice=advice)
    speed = speed_of(plan, card, found.settings.processes)
    config, other = changed(plan.config, found.overrides) if found.overrides else plan.config, None
    if not is_recommended(config) and not is_few_step(plan.config.pipeline):
        try:
            other = recipe_of_run(plan, recommended(config, plan.passes), speed)
        except ConfigError:  # no run by this recipe has these settings
            other = None
    own = recipe_of_run(plan, config, speed)
    return Outlook(card=card, found=found, speed=speed, own=own, other=other, price=price, advice=advice)


def recipe_of_run(plan: Plan, config: TrainConfig, speed: Speed) -> Recipe:
    """A run's time by the settings of a configuration, and the lengths that end within each of `SPANS`."""
    work = work_of(plan, config)
    batches = batches_of(config, max(1, speed.cards // config.parallel.context))
    lengths = {name: length_within(work, speed, batch=batches, within=within) for name, within in SPANS.items()}
    return Recipe(config=config, hours=speed.hours(work.total), lengths=lengths)


# ---- words -----------------------------------------------------------------------------------------------------------


def headline(plan: Plan, outlook: Outlook) -> str:
    """The first line: whether it fits, and how long it takes."""
    if outlook.found is None:
        words = "whether it fits a card is not known"
    elif outlook.found.overrides is None:
        words = f"does not fit {outlook.card} GB"
    else:
        words = f"fits {outlook.card} GB{' with other settings' * bool(outlook.found.overrides)}"
    if outlook.own is not None and outlook.speed is not None:
        hours = outlook.own.hours
        words += f"{', but' if hours.middle > TOO_LONG else ';'} takes {str(hours).split(' (')[0]} on {outlook.speed}"
    return "\n".join(line[2:] for line in note(f"{plan.name}: {words}"))


def outlook_lines(plan: Plan, outlook: Outlook, *, gains: bool = False) -> list[str]:
    """Memory, time, cost, disk, downloads and known problems of the model; `gains` adds what each setting saves."""
    memory = verdict(plan, outlook.card, gains=gains)
    return memory + [line for said in (*time_words(plan, outlook), *outlook.advice) for line in note(said)]


def outlook_words(plan: Plan, outlook: Outlook) -> list[str]:
    """The same in sentences, without the savings of each setting and without known problems of the model."""
    memory = " ".join(line.strip() for line in verdict(plan, outlook.card, gains=False))
    return [memory, *time_words(plan, outlook)]


def time_words(plan: Plan, outlook: Outlook) -> list[str]:
    """Sentences on time, cost and disk."""
    said = list[str]()
    if outlook.own is not None and outlook.speed is not None:
        hours, speed = outlook.own.hours, outlook.speed
        words = f"takes {hours} on {speed}, without rewards and text encoders"
        if plan.run.evaluations and plan.run.evaluation_rows is None:
            words = f"{words}, and without evaluations, whose prompts are not here"
        said.append(f"{words}: too long to wait for" if hours.middle > TOO_LONG else words)
        if outlook.price is not None:
            costs = (value * speed.cards * outlook.price for value in (hours.least, hours.middle, hours.most))
            least, middle, most = map(rounded, costs)
            said.append(f"costs about {middle} ({least} to {most}) at {outlook.price:g} an hour of a card")
    return [*said, *process_words(plan, outlook), disk_line(plan)]


def process_words(plan: Plan, outlook: Outlook) -> list[str]:
    """Sentences on how several processes lie, what they take of a machine's host, and how long they move weights."""
    found = outlook.found
    if found is None or found.overrides is None or found.settings.processes == 1:
        return []
    chosen, copy = found.settings, found.settings.shard * found.settings.context
    copies = chosen.processes // copy
    words = f"{chosen.processes} processes hold {copies} cop{'y' if copies == 1 else 'ies'} of the model"
    words += f", {'each ' * (copies > 1)}in {chosen.shard} parts" * (chosen.shard > 1)
    words += f", {chosen.context} of them to each {plan.drawn}" * (chosen.context > 1)
    if chosen.processes > NODE and copy > 1:
        words += " on one machine" if copy <= NODE else f" on {math.ceil(copy / NODE)} machines"
    words += f"; a machine of {min(chosen.processes, NODE)} needs at most {in_bytes(found.memory.machine(chosen))} of "
    return [f"{words}host memory", *traffic_words(plan, outlook.card, chosen)]


def traffic_words(plan: Plan, card: int, chosen: MemorySettings) -> list[str]:
    """Sentences on what a card of so many GB receives in an iteration, at half of its link's pace to all of it."""
    link = LINKS[usual_card(card)] if chosen.shard * chosen.context <= NODE else NETWORK
    moved, exchanged = gathered_bytes(plan, chosen)
    amounts = (
        (moved, link, "its copy's weights and gradients, less with larger batches"),
        (exchanged * (chosen.processes > NODE), NETWORK, "gradients of other copies"),
    )
    return [
        f"in an iteration a card receives {in_bytes(size)} of {what}: {span(size, (pace / 2000, pace / 1000))} at "
        f"{pace / 2:g} to {pace:g} GB/s, partly while it computes"
        for size, pace, what in amounts
        if size and plan.pace.processor == "GPU"
    ]


def sooner_lines(plan: Plan, outlook: Outlook) -> list[str]:
    """How much of the run ends within an evening, a weekend and a week; empty if an evening is enough for all of it."""
    own, other, speed = outlook.own, outlook.other, outlook.speed
    if own is None or speed is None or own.hours.most <= min(SPANS.values()) * (1 - RESERVE):
        return []
    recipes = [("this recipe", own), *([("recommended recipe", other)] if other is not None else [])]
    head = ("prompts x group x iterations", *(title for title, _ in recipes))
    lines = table([head, *length_rows([one for _, one in recipes], speed)]) + note(GIVES_UP)
    if other is not None:
        lines += note(
            f"Recommended: {other.config.objective.name}, {plural(other.config.updates_per_rollout, 'update')} a "
            "rollout. It learned most for its cost on the embedded models, and is unproven at this size."
        )
    ends = [within for name, within in SPANS.items() if own.lengths[name] is not None]
    if not ends:
        return lines + note(SMALLER)
    return lines + note(f"Add `card` {outlook.card} `hours` {ends[0]:.0f} to write such a run.")


def length_rows(recipes: Sequence[Recipe], speed: Speed) -> list[tuple[str, ...]]:
    """A column per recipe: what ends within each of `SPANS`, the time of the whole, and the cards for a week."""
    rows = [
        (f"{name}, {within:.0f} h", *(str(one.lengths[name] or "-") for one in recipes))
        for name, within in SPANS.items()
    ]
    rows.append(("whole", *(in_time(one.hours.middle) for one in recipes)))
    week = SPANS["a week"] * (1 - RESERVE)
    counts = [math.ceil(one.hours.most * speed.cards / week) for one in recipes]
    if max(counts) > speed.cards:
        rows.append(("whole in a week", *(f"{n} card{'s' * (n > 1)}" if n <= MOST_CARDS else "-" for n in counts)))
    return rows
