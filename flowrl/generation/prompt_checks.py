"""Finds faults of prompts for a model and for rewards from the whole files, before anything loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flowrl.generation.models import Source
from flowrl.pipelines import GENERIC, ModelFamily, family_for
from flowrl.pipelines.shared.family_pipeline import Family
from flowrl.pipelines.shared.prompt_embeddings import source_fault
from flowrl.prompts import foreign_rows
from flowrl.prompts.loading import Prompt
from flowrl.prompts.prompt_files import CLIPS, REFERENCES, SOURCES, say_once
from flowrl.rewards.base.prompt_needs import lack_of
from flowrl.rewards.base.specs import CheckedReward
from flowrl.runtime.failures import Faults

_SHOWN = 60  # characters of a prompt in a message


def sources_taken(family: ModelFamily, model: str, options: Mapping[str, Any]) -> tuple[int, int] | None:
    """Fewest and most source images of a prompt besides its clips; None if only the loaded model knows."""
    if family.name in GENERIC and isinstance(own := options.get("num_sources"), int):
        return own, own
    card = family.card(model) if isinstance(family, Family) else None
    if not isinstance(family, Family) or family.count_sources is None or card is None:
        return family.num_sources
    chosen = family.chosen(options)
    loaded = replace(card, index={**card.index, "_class_name": family.stock_class(card, chosen)})
    least, most = family.count_sources(loaded, chosen)
    images = most - len(family.clips)
    return min(least, images), images


def source_faults(rows: Sequence[Prompt], family: ModelFamily, allowed: tuple[int, int] | None) -> list[str]:
    """Finds prompts of one file with source images or clips that the model does not take (`allowed`: see
    `sources_taken`), or without those that it needs; prints the keys that name ignored images."""
    unread = {name: row for row in reversed(rows) if not row.sources for name in _unread(row)}
    for name, row in unread.items():
        if names := foreign_rows.image_names(row.metadata[name]):
            say_once(
                f"{row.where}: {name!r} names {names[0]}, and is metadata alone: a source image stands under 'source'"
            )
    found = [_told(rows, lambda row: _clip_fault(row, family))]
    if allowed is not None:
        found.append(_told(rows, lambda row: _count_fault(row, family, allowed)))
    return [fault for fault in found if fault]


def refuse_sources(rows: Sequence[Prompt], source: Source) -> None:
    """As `source_faults`, before a model draws."""
    family, model, options = family_for(source.family, source.model), source.model, source.options
    if found := source_faults(rows, family, sources_taken(family, model, options)):
        raise Faults(*found)


def reward_faults(
    rows: Sequence[Prompt], rewards: Sequence[CheckedReward], *, trained: bool, alone: bool
) -> Iterator[str]:
    """Finds prompts that lack what a reward needs, so that their images can never get its value.

    Args:
        rows: of one file.
        rewards: that score their images.
        trained: whether they are trained on, not only evaluated.
        alone: whether an image needs every reward's value; if not, prompts pass that any weighted reward can score.
    """
    for number, reward in enumerate(rewards):
        others = [] if alone else [one for k, one in enumerate(rewards) if k != number and one.entry.weight]

        def fault(row: Prompt, reward: CheckedReward = reward, others: Sequence[CheckedReward] = others) -> str:
            lack = lack_of(reward.options, row, trained=trained)
            if lack is None or any(lack_of(one.options, row, trained=trained) is None for one in others):
                return ""
            return f"can get no value of reward {reward.entry.called}: it {lack}"

        if found := _told(rows, fault):
            yield found


def _told(rows: Sequence[Prompt], fault: Callable[[Prompt], str]) -> str:
    """The fault of the first prompt with one, and how many others have one; empty if none has."""
    bad = [(row, said) for row in rows if (said := fault(row))]
    if not bad:
        return ""
    (row, said), count = bad[0], len(bad)
    text = row.text if len(row.text) <= _SHOWN else f"{row.text[:_SHOWN]}..."
    place = f"{row.where}: " if row.where else ""
    more = (
        ""
        if len(rows) == 1
        else f" (one of {count} such among {len(rows)} prompts)"
        if count > 1
        else (f" (the only such among {len(rows)} prompts)")
    )
    return f"{place}prompt {text!r}{more} {said}"


def _clip_fault(row: Prompt, family: ModelFamily) -> str:
    for key in row.videos:
        if key not in family.clips:
            taking = "wan_animate" if key in CLIPS[:2] else "wan_vace or lucy_edit" if key == CLIPS[2] else "wan_vace"
            return (
                f"names a {key}, which family {family.name} does not take: remove it, give the frame to start from "
                f"under 'source', or take a model of family {taking}"
            )
    lacking = [key for key in family.needed_clips if key not in row.videos]
    return f"has no {' and no '.join(lacking)}, and family {family.name} draws from one" if lacking else ""


def _count_fault(row: Prompt, family: ModelFamily, allowed: tuple[int, int]) -> str:
    names = [*SOURCES, *foreign_rows.SOURCES]
    key = next((name for name in names if row.metadata.get(name) is not None), "") if row.sources else ""
    said = source_fault(len(row.sources), allowed, family.name, family.sources_option, key)
    if not said or row.sources:
        return said
    if not (other := _unread(row)):
        return said
    found = " and ".join(f"{name!r}" for name in other)
    return f"{said.partition(': ')[0]}; its row has {found}, which is not read as one: rename the key to 'source'"


def _unread(row: Prompt) -> list[str]:
    """Unread keys of a row without source images that may name some."""
    return [
        name
        for name, value in row.metadata.items()
        if name not in (*REFERENCES, "file") and (name in foreign_rows.SOURCES or foreign_rows.image_names(value))
    ]
