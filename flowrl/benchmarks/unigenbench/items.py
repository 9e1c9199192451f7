"""UniGenBench's prompt files and test points: both lengths, both languages, known defects repaired and reported.

The files belong to the benchmark's authors (CC BY 4.0, Tencent) and are not shipped. Take `data/test_prompts_en.csv`,
`..._en_long.csv`, `..._zh.csv` or `..._zh_long.csv` from the repository CodeGoat24/UniGenBench: columns `index`,
`prompt_en` and `sub_dims_en`, or `prompt_zh` and `sub_dims_zh`, of which the last is a JSON object.

There are 27 points with a label in each language, `Primary - Sub` or, without a hyphen, both. Their explanations are
our own words, for `--option definitions=own`; judges are asked with the published ones.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from flowrl.benchmarks.csv_tables import Row, read_table
from flowrl.config.options import unknown_name
from flowrl.prompts.text_checks import check_text
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


POINTS = tuple(Point(**row) for row in read_json(Path(__file__).with_name("points.json"))["points"])
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


EnVariant = Literal["head", "published"]

WHERE = "take data/test_prompts_{en,en_long,zh,zh_long}.csv from the repository CodeGoat24/UniGenBench"

_KEYS: dict[Language, tuple[str, str, str, str]] = {
    "en": ("Testpoints", "Testpoint Description", "Primary Categories", "Subjects"),
    "zh": ("考点", "考点对应描述", "一级垂类", "主体"),
}
_MISSING_COMMA = re.compile(r'("Grammar - Negation")(\s*)("Attribute - Color")')
_VARIANT_INDEX, _VARIANT_POINT = 428, "Logical Reasoning"
_VARIANT_DESCRIPTION = "what the text implies without saying it is drawn accordingly"
_LONG = 4.75  # test points of a prompt on average: 3.02 in short files, 6.53 in long ones


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A prompt with its test points and, for each, what it refers to in this prompt."""

    index: int
    prompt: str
    points: tuple[str, ...]
    descriptions: tuple[str, ...]
    theme: str = ""
    subject: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptFile:
    """A prompt file that was read."""

    language: Language
    """Of prompts and labels."""
    long: bool
    """Whether its prompts are the long ones."""
    items: tuple[Item, ...]
    """In the file's order."""
    repairs: tuple[str, ...] = ()
    """What was repaired, one sentence each."""
    differences: tuple[str, ...] = ()
    """How the file departs from the published one, one sentence each; empty for a published file."""

    @property
    def track(self) -> str:
        """The benchmark's own name of the track: en, en_long, zh or zh_long."""
        return self.language + ("_long" if self.long else "")


def read_prompt_file(path: Path, *, en_variant: EnVariant = "head") -> PromptFile:
    """Reads a prompt file and checks it against the published counts of test points.

    Two defects are repaired, and reported in `repairs`:

    - English long, index 509: a comma between two test points is missing, so that the row is not JSON. It is inserted;
      published scores have the denominators of the repaired row.
    - English short, index 428: the repository's file has the test point Style alone, the one that the published scores
      are made of has Logical Reasoning too (110 in all, not 109).

    Args:
        en_variant: of index 428, `head`, the repository's file, or `published`. Where the point has to be added, its
            description is ours; the copy of the file in CodeGoat24/Pref-GRPO holds the original one.

    Raises ValueError: no such file, columns that are missing, or a row that cannot be read; names the row.
    """
    if en_variant not in ("head", "published"):
        raise ValueError(f"the variant of the English prompts must be head or published, got {en_variant!r}.")
    rows, language, suffix = _rows(path)
    repairs: list[str] = []
    items = [_item(row, language, suffix, where, repairs) for where, row in rows]
    indexes = Counter(item.index for item in items)
    if twice := [index for index, count in indexes.items() if count > 1]:
        raise ValueError(f"{path}: index {twice[0]} occurs {indexes[twice[0]]} times: images are named by it.")
    long = sum(len(item.points) for item in items) / len(items) > _LONG
    if language == "en" and not long:
        items = [_variant(item, en_variant, repairs) if item.index == _VARIANT_INDEX else item for item in items]
    found = Counter(point for item in items for point in item.points)
    differences = [
        f"{label} occurs {found[label]} times, in the published file {count}: another version of the file."
        for label, count in published_counts(language, long=long, published=en_variant == "published").items()
        if found[label] != count
    ]
    if len(items) != NUM_PROMPTS:
        differences = [
            f"The file has {len(items)} prompts, the published one {NUM_PROMPTS}: scores are not comparable."
        ]
    return PromptFile(
        language=language, long=long, items=tuple(items), repairs=tuple(repairs), differences=tuple(differences)
    )


def _rows(path: Path) -> tuple[list[tuple[str, Row]], Language, str]:
    if path.suffix != ".csv" or not path.is_file():
        what = "is not a .csv file" if path.suffix != ".csv" else "is not there"
        raise ValueError(f"the UniGenBench prompt file {path} {what}: {WHERE}; it is not shipped.")
    columns, rows = read_table(path, source=WHERE)
    suffixes = [s for s in ("_en", "_zh", "") if {"index", f"prompt{s}", f"sub_dims{s}"} <= set(columns)]
    if not suffixes:
        raise ValueError(
            f"{path}: needs rows with the columns index, prompt_en and sub_dims_en (or _zh), got {len(rows)} rows with "
            f"{', '.join(columns) or 'no columns'}: {WHERE}."
        )
    suffix = suffixes[0]
    if suffix:
        return rows, "zh" if suffix == "_zh" else "en", suffix
    return rows, "zh" if _KEYS["zh"][0] in (rows[0][1]["sub_dims"]) else "en", suffix


def _item(row: Row, language: Language, suffix: str, where: str, repairs: list[str]) -> Item:
    index, prompt, text = row["index"], row[f"prompt{suffix}"], row[f"sub_dims{suffix}"]
    # Tables that passed through other programs write whole numbers as 7.0.
    if not re.fullmatch(r"\d+(\.0)?", index.strip()) or not prompt.strip():
        raise ValueError(f"{where}: needs a whole number as index and a prompt, got {index!r} and {prompt[:60]!r}.")
    check_text(prompt, where)
    number = int(float(index))
    where += f" (index {number})"
    record = _record(text, number, where, repairs)
    points_key, descriptions_key, theme, subject = _KEYS[language]
    for key in (points_key, descriptions_key):
        value = record.get(key)
        if not isinstance(value, list) or not value or not all(isinstance(entry, str) for entry in value):
            raise ValueError(f"{where}: {key!r} must be a list of texts, got {value!r}.")
    points, descriptions = record[points_key], record[descriptions_key]
    if len(points) != len(descriptions):
        raise ValueError(
            f"{where}: {len(points)} test points have {len(descriptions)} descriptions: it must be one each."
        )
    labels = [point.strip() for point in points]
    if unknown := [label for label in labels if label not in LABELS[language]]:
        raise ValueError(f"{where}: {unknown_name('test point', unknown[0], LABELS[language])}")
    return Item(
        index=number,
        prompt=prompt,
        points=tuple(labels),
        descriptions=tuple(descriptions),
        theme=str(record.get(theme, "")),
        subject=str(record.get(subject, "")),
    )


def _record(text: str, index: int, where: str, repairs: list[str]) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        repaired, number = _MISSING_COMMA.subn(r"\1,\2\3", text)
        try:
            record = json.loads(repaired)
        except json.JSONDecodeError:
            number = 0
        if not number:
            raise ValueError(f"{where}: the test points are not JSON ({error}).") from error
        repairs.append(f"Index {index}: a comma was missing between two test points and was inserted.")
    if not isinstance(record, dict):
        raise ValueError(f"{where}: the test points must be a JSON object, got {text[:60]!r}.")
    return record


def _variant(item: Item, variant: EnVariant, repairs: list[str]) -> Item:
    kept = [(p, d) for p, d in zip(item.points, item.descriptions, strict=True) if p != _VARIANT_POINT]
    has = len(kept) < len(item.points)
    if has == (variant == "published"):
        return item
    if variant == "published":
        kept.append((_VARIANT_POINT, _VARIANT_DESCRIPTION))
        repairs.append(
            f"Index {item.index}: the test point {_VARIANT_POINT} of the published scores was added, with a "
            f"description of ours; the file's copy in CodeGoat24/Pref-GRPO has the original one."
        )
    else:
        repairs.append(
            f"Index {item.index}: the test point {_VARIANT_POINT} was left out, as in the repository's file."
        )
    return replace(item, points=tuple(p for p, _ in kept), descriptions=tuple(d for _, d in kept))
