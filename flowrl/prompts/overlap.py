"""Finds benchmark prompts that were trained on: word for word, or with their two objects swapped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from flowrl.prompts.identity import asked_for
from flowrl.prompts.prompt_files import Prompt

_OPPOSITE = {"and": "and", "left of": "right of", "right of": "left of", "above": "below", "below": "above"}
_TWO_THINGS = re.compile(
    r"(?P<head>an? (?:photo|picture|image|drawing|painting|print|sketch|poster|view|scene) of )?"
    r"(?P<first>.+?) (?P<link>and|left of|right of|above|below) (?P<second>.+)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """The prompts in common, and how many distinct ones were checked."""

    exact: tuple[str, ...]
    swapped: tuple[str, ...]
    total: int

    def __bool__(self) -> bool:
        return bool(self.exact or self.swapped)


def overlap(train: Iterable[str], benchmark: Iterable[str]) -> Overlap:
    """Prompts in common, whatever letter case, spaces and a final full stop. Swapped: "a photo of a dog and a cat" is
    "a photo of a cat and a dog", "... a dog left of a cat" is "... a cat right of a dog"; exact ones are left out."""
    known = {_plain(text) for text in train}
    unique = list(dict.fromkeys(benchmark))
    exact = tuple(text for text in unique if _plain(text) in known)
    rest = [text for text in unique if _plain(text) not in known]
    in_other_order = tuple(text for text in rest if swapped(_plain(text)) in known)
    return Overlap(exact=exact, swapped=in_other_order, total=len(unique))


def overlap_of_rows(train: Iterable[Prompt], held_out: Iterable[Prompt]) -> Overlap:
    """The `overlap` of rows of prompt files. An instruction about another source image is another prompt."""
    return overlap(map(request, train), map(request, held_out))


def request(row: Prompt) -> str:
    """The key of a row for `overlap`: its text, with the content of the files that it is about."""
    whole = asked_for(row)
    return whole if whole == row.text else asked_for(replace(row, text=_plain(row.text)))


def shared_words(trained_on: int, number: int) -> str:
    """Says how many prompts of an evaluation are not held out."""
    return f"{trained_on} of {number} evaluation prompts {'were' if trained_on > 1 else 'was'} also trained on"


def held_out_or_shared(counted: Mapping[str, int] | None) -> tuple[str, str]:
    """The word for a run's evaluation prompts, and a note on how many are not held out; "" if all are. `counted` is
    `eval_prompts` of the run's manifest, None if nothing was counted."""
    if not counted or not counted.get("trained_on"):
        return "held-out", ""
    return "evaluation", shared_words(int(counted["trained_on"]), int(counted["number"]))


def swapped(text: str) -> str | None:
    """The same request with its two things swapped; None if there are not two."""
    match = _TWO_THINGS.fullmatch(text)
    if match is None:
        return None
    return f"{match['head'] or ''}{match['second']} {_OPPOSITE[match['link']]} {match['first']}"


def _plain(text: str) -> str:
    return " ".join(text.lower().split()).rstrip(".")
