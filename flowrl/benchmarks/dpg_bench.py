"""DPG-Bench: dense prompts and, for each, yes-no questions that depend on each other.

Hu et al. 2024, ELLA (arXiv 2403.05135); repository TencentQQGYLab/ELLA, whose `dpg_bench/dpg_bench.csv` the user brings
(its licence is not known). An image file holds four samples of a prompt as a 2 x 2 grid and is named by the item's id.
The published judge is mPLUG-large; the answers of any other are a metric of another name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from flowrl.benchmarks.csv_tables import read_table
from flowrl.prompts.text_checks import check_text

_COLUMNS = ("item_id", "text", "proposition_id", "dependency", "tuple")
YES = "yes"
"""An answer counts only if it is exactly this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A yes-no question; `parents` are the ids of those that must be yes for it to count, `category` is "L1 - L2"."""

    id: int
    text: str
    parents: tuple[int, ...]
    category: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A prompt and its questions, in the file's order, which matters."""

    id: str
    prompt: str
    questions: tuple[Question, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """`score` is the mean over items, in [0, 100]; `categories` those of L1 and `details` of "L1 - L2", the same."""

    score: float
    categories: dict[str, float]
    details: dict[str, float]
    skipped: int


def read_items(path: Path, *, skip_first: bool = True) -> list[Item]:
    """Reads the published CSV.

    Args:
        path: columns item_id, text, proposition_id, dependency, tuple and question_natural_language.
        skip_first: the published loader leaves out the file's first row, and with it the first question of the first
            item. True does so too, for the published numbers; False keeps it.

    Raises ValueError: no such file, columns, or a row that cannot be read; an item whose questions do not stand
    together, or a question that is there twice.
    """
    columns, rows = read_table(path, _COLUMNS, source="take dpg_bench/dpg_bench.csv from TencentQQGYLab/ELLA")
    asked = next((name for name in ("question_natural_language", "question") if name in columns), "")
    if not asked:
        raise ValueError(f"{path}: lacks the column question_natural_language.")
    found: dict[str, tuple[str, list[Question]]] = {}
    last = ""
    for where, row in rows[1:] if skip_first else rows:
        name = row["item_id"]
        if name in found and name != last:
            raise ValueError(f"{where}: questions of item {name!r} do not stand together: sort the file.")
        check_text(row["text"], where)
        prompt, questions = found.setdefault(name, (row["text"], []))
        try:
            parents = tuple(parent for parent in map(int, row["dependency"].split(",")) if parent)
            number = int(row["proposition_id"])
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{where}: proposition_id and dependency must be whole numbers ({error}).") from error
        if not name.strip() or row["text"] != prompt or any(number == other.id for other in questions):
            raise ValueError(
                f"{where}: an item has one id, one text, and each proposition_id once, got item {name!r} with "
                f"{number} of {row['text'][:40]!r}: repair the row."
            )
        category = row["tuple"].partition("(")[0].strip()
        questions.append(Question(id=number, text=row[asked], parents=parents, category=category))
        last = name
    if not found:
        raise ValueError(f"{path}: has one row, which the published loader leaves out: take the whole file.")
    return [Item(id=name, prompt=text, questions=tuple(questions)) for name, (text, questions) in found.items()]


def boxes(size: tuple[int, int], count: int = 4) -> list[tuple[int, int, int, int]]:
    """The first `count` samples of a 2 x 2 grid (width, height) as (left, top, right, bottom), row by row. Raises
    ValueError: sides that are odd, or a count that is not 1 to 4."""
    width, height = size
    if width % 2 or height % 2 or not 1 <= count <= 4:
        raise ValueError(
            f"an image of DPG-Bench is a grid of 2 x 2 samples, of which 1 to 4 are used, got {width} x "
            f"{height} pixels and {count}."
        )
    w, h = width // 2, height // 2
    return [(x, y, x + w, y + h) for y in (0, h) for x in (0, w)][:count]


def after_dependencies(answers: Mapping[int, float], questions: Sequence[Question]) -> dict[int, float]:
    """Answers (1 or 0 by id) where a question with a parent at 0 becomes 0, in one pass in order. Zeros count
    for later questions only: parents come first. An absent parent (the published loader loses one) does not count."""
    found = dict(answers)
    for question in questions:
        if any(found.get(parent) == 0 for parent in question.parents):
            found[question.id] = 0.0
    return found


def item_score(crops: Sequence[Mapping[int, float]], questions: Sequence[Question]) -> float:
    """The mean over samples of the mean over questions, after dependencies."""
    return fmean(fmean(after_dependencies(answers, questions).values()) for answers in crops)


def aggregate(items: Sequence[Item], answers: Mapping[str, Sequence[Mapping[int, float]] | None]) -> Scores:
    """Sums up the answers of all items.

    As in the published script categories take the answers of an item's last sample, before dependencies.

    Args:
        answers: by item id, for each sample 1 or 0 by question id; None (skipped) if one could not be read.

    Raises ValueError: an item without an entry, answers to other questions, or every item skipped.
    """
    scores: list[float] = []
    details: dict[str, list[float]] = {}
    skipped = 0
    for item in items:
        if item.id not in answers:
            raise ValueError(f"item {item.id!r} has no answers: judge every item, or leave it out of the items.")
        crops = answers[item.id]
        if crops is None:
            skipped += 1
            continue
        wanted = {question.id for question in item.questions}
        if not crops or any(set(crop) != wanted for crop in crops):
            raise ValueError(f"item {item.id!r}: every sample needs an answer to each of its {len(wanted)} questions.")
        scores.append(item_score(crops, item.questions))
        for question in item.questions:
            details.setdefault(question.category, []).append(crops[-1][question.id])
    if not scores:
        raise ValueError(f"none of the {len(items)} items was judged, so there is no score.")
    broad: dict[str, list[float]] = {}
    for category, values in details.items():
        broad.setdefault(category.partition("-")[0].strip(), []).extend(values)
    return Scores(
        score=100 * fmean(scores),
        categories={name: 100 * fmean(values) for name, values in sorted(broad.items())},
        details={name: 100 * fmean(values) for name, values in sorted(details.items())},
        skipped=skipped,
    )
