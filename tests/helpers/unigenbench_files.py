"""Prompt files with the structure of UniGenBench's: columns, JSON in cells, published counts, and the two defects."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from flowrl.benchmarks.unigenbench.items import NUM_PROMPTS, Language, published_counts

KEYS = {
    "en": ("Testpoints", "Testpoint Description", "Primary Categories", "Subjects"),
    "zh": ("考点", "考点对应描述", "一级垂类", "主体"),
}


def record(points: Sequence[str], language: Language = "en", descriptions: Sequence[str] | None = None) -> str:
    """The JSON of a row's test points."""
    names, described, theme, subject = KEYS[language]
    texts = [f"what {point} refers to" for point in points] if descriptions is None else list(descriptions)
    content = {theme: "Art", "Secondary Categories": "Art-Graphic", subject: "Animal", names: list(points),
               described: texts}  # fmt: skip
    return json.dumps(content, ensure_ascii=False)


def write(path: Path, rows: Mapping[int, tuple[str, str]], suffix: str = "_en") -> Path:
    """A CSV of index -> (prompt, JSON)."""
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["index", f"prompt{suffix}", f"sub_dims{suffix}"])
        writer.writerows([index, prompt, text] for index, (prompt, text) in rows.items())
    return path


def whole_file(path: Path, language: Language, *, long: bool) -> Path:
    """600 rows whose test points occur as often as in the published file, with that file's defect."""
    fixed: dict[int, list[str]] = {}
    if language == "en" and long:
        fixed[509] = ["Style", "Grammar - Negation", "Attribute - Color", "World Knowledge", "Action - State"]
    elif language == "en":
        fixed[428] = ["Style"]
    counts = published_counts(language, long=long)
    for points in fixed.values():
        for point in points:
            counts[point] -= 1
    pool = [point for point, count in counts.items() for _ in range(count)]
    free = [index for index in range(NUM_PROMPTS) if index not in fixed]
    dealt: dict[int, list[str]] = {index: list(pool[place :: len(free)]) for place, index in enumerate(free)}
    rows = {}
    for index in range(NUM_PROMPTS):
        text = record(fixed.get(index) or dealt[index], language)
        if index == 509 and index in fixed:
            text, places = re.subn('("Grammar - Negation"), ("Attribute - Color")', r"\1 \2", text)
            assert places == 1
        rows[index] = (f"prompt number {index}", text)
    return write(path, rows, f"_{language}")
