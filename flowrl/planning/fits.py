"""Finds the least changes that make a run fit a card.

Each setting is a ladder whose rungs save more and more; ladders are ordered by cost. All start at their last rung. The
most expensive ladder steps back as far as the run still fits with all cheaper ones at their last, then the next
follows. So an expensive setting changes only if cheaper ones do not suffice, and none further than necessary.

| setting | what it costs |
|---|---|
| `pipeline.free_text_encoders` | nothing but prompts that are known at the start |
| `pipeline.vae_slice`, `eval.batch_size` | a little time of decoding and evaluating |
| `rollout_batch_size`, `micro_batch_size` | time, once a GPU has too few tokens at once |
| `pipeline.gradient_checkpointing` | a forward pass for every backward pass |
| `optim.name`, `optim.offload` | moments in 8 bits; or their way to the host and back at every update |
| `pipeline.offload` | the way of reward models to the device and back in every iteration |
| `pipeline.options.vae_tiling` | seams in clips, which rewards see |
| `pipeline.quantize` | another model, rounded, and time to restore its weights |
| `parallel.shard` | more cards, and the way of all weights between them |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flowrl.planning.memory import CARDS, GIB, Facts, Memory, MemorySettings, memory_of

_BITS = {"none": 16, "int8": 8, "fp8": 8, "int8_bnb": 8, "nf4": 4}
"""Bits of a weight in each form of `pipeline.quantize`; only smaller forms are tried."""
SHARDS = (2, 4, 8, 16)
"""Numbers of processes for one copy of a denoiser to try; beyond a machine's only if a run has so many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingChange:
    """A setting at another value: `overrides` as `flowrl train` takes them, and the fields of `MemorySettings`."""

    overrides: tuple[str, ...] = ()
    settings: Mapping[str, Any]


Ladder = tuple[SettingChange, ...]
"""Values of one setting, each saving more than the one before; the first is the run's own."""
AS_IT_IS = SettingChange(settings={})


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """The changes that make a run fit a card of `card` GB."""

    card: int
    """Nominal GB."""
    overrides: tuple[str, ...] | None
    """Changed settings; None if nothing suffices."""
    memory: Memory
    """Memory with these changes, or with all that save memory."""
    settings: MemorySettings
    """Settings with the same changes."""
    gains: tuple[tuple[str, int], ...] = ()
    """Extra bytes without a change, by its overrides; all changes are needed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """What may change in a run besides its `MemorySettings`."""

    sizes: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Processes of one copy of the denoiser -> micro-batches that are then allowed."""
    encoders: bool = False
    """Whether there are text encoders."""
    checkpoints: bool = False
    """Whether the denoiser can be checkpointed."""
    videos: bool = False
    """Whether the model makes videos, whose decoder has tiles."""
    rewards: bool = False
    """Whether rewards have models."""
    splits: bool = False
    """Whether the denoiser may be split over processes."""
    forms: Sequence[str] = ()
    """Forms of `pipeline.quantize`, each smaller than the one before."""
    copies: int = 1
    """Copies of the denoiser that the run asks for (`parallel.replicate`)."""


def card_gib(card: int) -> float:
    """GiB of a card of so many GB: as drivers report, or 1.5 % less than its name says."""
    return CARDS.get(card, card * 0.985)


def fit(facts: Facts, chosen: MemorySettings, choices: Choices, card: int) -> Fit:
    """The least changes with which a process fits a card of so many GB."""
    room, ladders = card_gib(card) * GIB, list(_ladders(facts, chosen, choices))

    def at(places: Sequence[int]) -> MemorySettings | None:
        merged: dict[str, Any] = {}
        for ladder, place in zip(ladders, places, strict=True):
            merged |= ladder[place].settings
        settings = replace(chosen, **merged)
        return settings if settings.micro_batch_size in choices.sizes[settings.shard] else None

    def fits(places: Sequence[int]) -> bool:
        settings = at(places)
        return settings is not None and memory_of(facts, settings).peak <= room

    places = [len(ladder) - 1 for ladder in ladders]
    for k in reversed(range(len(ladders))):
        places[k] = next((rung for rung in range(len(ladders[k])) if fits([*places[:k], rung, *places[k + 1 :]])), -1)
        if places[k] < 0:
            return _least(
                facts, chosen, [at([*places[:k], rung, *places[k + 1 :]]) for rung in range(len(ladders[k]))], card
            )
    settings = at(places) or chosen
    overrides = tuple(text for ladder, place in zip(ladders, places, strict=True) for text in ladder[place].overrides)
    memory, gains = memory_of(facts, settings), list[tuple[str, int]]()
    for k, (ladder, place) in enumerate(zip(ladders, places, strict=True)):
        without = at([*places[:k], 0, *places[k + 1 :]]) if place else None
        if without is not None:
            gains.append((" ".join(ladder[place].overrides), memory_of(facts, without).peak - memory.peak))
    return Fit(card=card, overrides=overrides, memory=memory, settings=settings, gains=tuple(gains))


def _least(facts: Facts, chosen: MemorySettings, tried: Sequence[MemorySettings | None], card: int) -> Fit:
    """The run at its smallest, which is still too large."""
    found = [(memory_of(facts, settings), settings) for settings in (chosen, *tried) if settings is not None]
    memory, settings = min(found, key=lambda entry: entry[0].peak)
    return Fit(card=card, overrides=None, memory=memory, settings=settings)


def _ladders(facts: Facts, chosen: MemorySettings, choices: Choices) -> Iterator[Ladder]:
    smaller = sorted({n for sizes in choices.sizes.values() for n in sizes if n < chosen.micro_batch_size})
    away = (*chosen.offload, "rewards")
    ladders: list[tuple[bool, list[tuple[str, dict[str, Any]]]]] = [
        (choices.encoders, [("pipeline.free_text_encoders=true", {"free_text_encoders": True})]),
        (True, [(f"pipeline.vae_slice={n}", {"vae_slice": n}) for n in _halves(chosen.vae_slice)]),
        (facts.evaluates, [(f"eval.batch_size={n}", {"eval_batch_size": n}) for n in _halves(chosen.eval_batch_size)]),
        (True, [
            (f"rollout_batch_size={n} micro_batch_size={n}", {"micro_batch_size": n, "rollout_batch_size": n})
            for n in reversed(smaller)
        ]),
        (choices.checkpoints and not facts.keeps,
         [("pipeline.gradient_checkpointing=true", {"gradient_checkpointing": True})]),
        (chosen.optimizer == "adamw" and not chosen.optim_offload,
         [("optim.name=adamw_8bit", {"optimizer": "adamw_8bit"}), ("optim.offload=true", {"optim_offload": True})]),
        (choices.rewards and "rewards" not in chosen.offload,
         [(f"pipeline.offload=[{','.join(away)}]", {"offload": away})]),
        (choices.videos, [("pipeline.options.vae_tiling=true", {"vae_tiling": True})]),
        (True, _forms(facts, chosen, choices)),
    ]  # fmt: skip
    for allowed, changes in ladders:
        news = [
            SettingChange(overrides=tuple(text.split()), settings=given)
            for text, given in changes
            if any(getattr(chosen, name) != value for name, value in given.items())
        ]
        if allowed:
            yield (AS_IT_IS, *news)


def _forms(facts: Facts, chosen: MemorySettings, choices: Choices) -> list[tuple[str, dict[str, Any]]]:
    """Forms of a denoiser: with fewer bits, then split over processes, then both."""
    forms = [form for form in choices.forms if _BITS[form] < _BITS[chosen.quantize] and not facts.full]
    smaller: list[tuple[str, dict[str, Any]]] = [(f"pipeline.quantize={form}", {"quantize": form}) for form in forms]
    split: list[tuple[str, dict[str, Any]]] = [
        (f"parallel.shard={n}", {"shard": n, "processes": max(n * choices.copies, chosen.processes)})
        for n in SHARDS
        if n > chosen.shard and choices.splits and choices.sizes.get(n)
    ]
    both = [(f"{form} {parts}", few | many) for form, few in smaller[-1:] for parts, many in split]
    return smaller + split + both


def _halves(size: int) -> Iterator[int]:
    while size > 1:
        size = (size + 1) // 2
        yield size
