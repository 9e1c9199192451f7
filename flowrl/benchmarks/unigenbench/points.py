"""UniGenBench's test points: 27 labels in two languages, how often each occurs, and what each means.

The counts are those of the published prompt files, of 600 prompts each; the English and the Chinese file of a length
agree. A label `Primary - Sub` belongs to the primary dimension before its first hyphen; one without is both.

The explanations are our own words, for `--option definitions=own`; judges are asked with the published ones, see
`flowrl.evaluation.unigenbench.wording`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flowrl.runtime.files import read_json

Language = Literal["en", "zh"]

NUM_PROMPTS = 600
NUM_IMAGES = 4
"""Prompts of a file, and images of each that the published scores are made of."""


@dataclass(frozen=True, slots=True)
class Point:
    """A test point: its label and meaning in English and Chinese, and its number in a short and in a long file."""

    en: str
    zh: str
    short: int
    long: int
    meaning_en: str
    meaning_zh: str


POINTS = tuple(Point(**row) for row in read_json(Path(__file__).with_suffix(".json"))["points"])
"""In the order of the published tables, from `points.json`."""

LABELS: dict[Language, tuple[str, ...]] = {"en": tuple(p.en for p in POINTS), "zh": tuple(p.zh for p in POINTS)}
MEANINGS: dict[Language, dict[str, str]] = {
    "en": {point.en: point.meaning_en for point in POINTS},
    "zh": {point.zh: point.meaning_zh for point in POINTS},
}


def primary_of(label: str) -> str:
    """The primary dimension of a label: what stands before its first hyphen, without the spaces around it."""
    return label.partition("-")[0].strip()


ENGLISH: dict[str, str] = {primary_of(point.zh): primary_of(point.en) for point in POINTS}
"""English name of a Chinese primary dimension."""

PRIMARIES = tuple(dict.fromkeys(primary_of(point.en) for point in POINTS))
"""The ten primary dimensions, in the order of the published tables."""


def published_counts(language: Language, *, long: bool, published: bool = False) -> dict[str, int]:
    """How often each test point occurs in a published file: the one with `long` prompts, or the English short one that
    the `published` scores are made of, which has one more test point."""
    labels = LABELS[language]
    counts = {label: point.long if long else point.short for label, point in zip(labels, POINTS, strict=True)}
    if published and language == "en" and not long:
        counts["Logical Reasoning"] += 1
    return counts
