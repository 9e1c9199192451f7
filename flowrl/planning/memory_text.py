"""The section of a plan about memory: what is held, what comes beside it, and what makes the run fit a card."""

from __future__ import annotations

from flowrl.planning.fits import Fit, fit
from flowrl.planning.gather import Plan
from flowrl.planning.memory import CARDS, OVERHEAD, Facts, Memory, fitting
from flowrl.planning.plan_words import in_bytes, note, pairs, table
from flowrl.planning.verdict import in_the_way

_TOLD = (24, 40, 80)
"""Cards, in GB, that a plan tells of unless it is asked for one."""


def memory_lines(plan: Plan, card: int | None = None) -> list[str]:
    """What a process takes, and what to change for a card of so many GB; of usual ones where None is named."""
    memory, facts = plan.memory, plan.facts
    if memory is None or facts is None:
        return note(f"not known: {plan.unknown}")
    lines = _held(memory)
    if memory.start and facts.at_once:
        lines += note(f"at the start {in_bytes(memory.start)} of all parts; the encoders are dropped then")
    elif memory.start:
        lines += note(
            f"at the start {in_bytes(memory.start)} of text encoders and autoencoder; the denoiser is loaded once the "
            "encoders are dropped"
        )
    if memory.worker is not None:
        lines += note(f"this is the process that learns; one that draws takes at most {in_bytes(memory.worker)}")
    lines += _micro_batches(plan, memory, facts)
    if plan.config.recipe == "backprop":
        lines += note("reward and decoder keep activations too, which are not counted")
    lines += ["To fit a card"]
    return lines + _cards(plan, facts, _TOLD if card is None else (card,))


def _held(memory: Memory) -> list[str]:
    rows = [(label, in_bytes(size)) for label, size in memory.held.items()]
    rows += [(name, "not known") for name in memory.unknown]
    rows.append(("all the time", in_bytes(sum(memory.held.values()))))
    rows += [(f"+ {name}", in_bytes(size)) for name, size in memory.stages.items()]
    rows.append((f"+ activations, {memory.micro_batch_size} images", in_bytes(memory.configured + memory.update)))
    rows.append(("reserve", in_bytes(OVERHEAD)))
    rows.append(("at most", in_bytes(memory.peak)))
    return table(rows)


def _micro_batches(plan: Plan, memory: Memory, facts: Facts) -> list[str]:
    lines = note(
        f"an image of a micro-batch takes {in_bytes(memory.image)}, with gradient checkpointing "
        f"{in_bytes(memory.image_checkpointed)}" if facts.network.blocks else
        f"an image of a micro-batch takes {in_bytes(memory.image)}; this network cannot be checkpointed"
    )  # fmt: skip
    if facts.keeps:
        return lines + note(f"keep_graphs keeps those of {facts.keeps} images at once")
    allowed = plan.choices.sizes[plan.settings.shard]
    suggested = [("largest micro_batch_size", *(f"{card} GB" for card in CARDS))]
    for label, checkpointed in (("plain", False), ("gradient_checkpointing", True)):
        if checkpointed and not facts.network.blocks:
            continue
        sizes = [fitting(memory, size, allowed, checkpointed=checkpointed) for size in CARDS.values()]
        suggested.append((label, *(str(size) if size else "-" for size in sizes)))
    return lines + table(suggested)


def _cards(plan: Plan, facts: Facts, cards: tuple[int, ...]) -> list[str]:
    return pairs((f"{card} GB", _words(fit(facts, plan.settings, plan.choices, card), plan)) for card in cards)


def _words(found: Fit, plan: Plan) -> str:
    most = in_bytes(found.memory.peak)
    if found.overrides is None:
        return f"does not fit with any setting: {in_the_way(found)}"
    most += " and what is not known" if found.memory.unknown else ""
    if not found.overrides:
        return f"fits as it is, at most {most}"
    more = max(found.settings.processes, plan.processes)
    where = f", on {more} such cards" if more > plan.processes else ""
    return f"{' '.join(found.overrides)}: at most {most}{where}"
