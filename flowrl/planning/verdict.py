"""Decides whether a run fits a card, and with which settings."""

from __future__ import annotations

import re

from flowrl.planning.fits import Fit, card_gib, fit
from flowrl.planning.gather import Plan
from flowrl.planning.memory import CARDS, GIB, OVERHEAD
from flowrl.planning.words import in_bytes, note, pairs

_NAMED = re.compile(r"_([1-9]\d*)gb$")


def card_of(name: str) -> int | None:
    """GB of the card that a configuration names at the end of its own name, as presets do (`flux_grpo_24gb`)."""
    found = _NAMED.search(name)
    return None if found is None else int(found[1])


def verdict(plan: Plan, card: int | None, *, gains: bool = True) -> list[str]:
    """Whether a process fits a card of so many GB (None as in `outlook_of`), and what each necessary change of a
    setting saves, if `gains` asks for that."""
    if plan.memory is None or plan.facts is None:
        return note(f"whether it fits a card is not known: {plan.unknown}")
    card = card_for(plan, card)
    found = fit(plan.facts, plan.settings, plan.choices, card)
    most = f"at most {in_bytes(found.memory.peak)} of {card_gib(card):.4g}"
    if found.memory.unknown:
        most += f", and {', '.join(found.memory.unknown)}, of unknown size"
    if found.overrides is None:
        return note(f"does not fit {card} GB with any setting, because {in_the_way(found)}")
    if not found.overrides:
        return note(f"fits {card} GB as it is: {most}")
    more = found.settings.processes
    cards = f", on {more} such cards" if more > plan.processes else ""
    words = f"fits {card} GB with {' '.join(found.overrides)}: {most}{cards}. As it is it takes "
    words += in_bytes(plan.memory.peak)
    if not gains:
        return note(words)
    lines = note(f"{words}. Each setting is needed; without it the run takes this much more:")
    return lines + pairs((in_bytes(gain), overrides) for overrides, gain in found.gains)


def card_for(plan: Plan, card: int | None) -> int:
    """GB of a card: the given one, or the smallest usual one that holds the run unchanged, or else the largest."""
    if card is not None:
        return card
    return next((gb for gb in CARDS if plan.memory is not None and plan.memory.peak <= card_gib(gb) * GIB), max(CARDS))


def changes_for(plan: Plan, card: int) -> tuple[str, ...]:
    """The least settings, as `key=value`, with which a process fits a card of so many GB; none if it fits already.
    Raises ValueError: no setting makes it fit, or the model is unknown."""
    if plan.facts is None:
        raise ValueError(f"whether {plan.name} fits {card} GB is not known: {plan.unknown}; leave `card` out")
    found = fit(plan.facts, plan.settings, plan.choices, card)
    if found.overrides is None:
        raise ValueError(f"{plan.name} does not fit {card} GB with any setting, because {in_the_way(found)}")
    return found.overrides


def in_the_way(found: Fit) -> str:
    """Why a run does not fit: its smallest memory, and the largest parts of that."""
    memory = found.memory
    moments = {**memory.stages, "the update": memory.configured + memory.update}
    most = max(moments, key=lambda name: moments[name])
    parts = {**memory.held, most: moments[most]}
    if memory.peak == memory.start + OVERHEAD:
        parts = {"what embeds the prompts at the start": memory.start}
    largest = sorted(parts.items(), key=lambda entry: -entry[1])[:2]
    words = " and ".join(f"{name} ({in_bytes(size)})" for name, size in largest)
    lacking = in_bytes(memory.peak - card_gib(found.card) * GIB)
    return f"it takes at least {in_bytes(memory.peak)}, {lacking} too much; most of it is {words}"
