"""Shared parts of the benchmarks' results: options, overlap with training prompts, tables and sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from flowrl.config.options import build_options
from flowrl.config.strict_yaml import apply_override
from flowrl.generation.folders import ImageFile
from flowrl.generation.subject import Settings
from flowrl.prompts.loading import read_prompts
from flowrl.prompts.overlap import Overlap, overlap, request
from flowrl.rendering.markup import bounds, number, signed
from flowrl.rendering.terminal_text import Table
from flowrl.runtime.journal import Row
from flowrl.statistics.bootstrap import Interval
from flowrl.statistics.means import ScoreRow, claim

Options = TypeVar("Options")
Line = tuple[str, Sequence[Interval], Interval | None]
"""A score: its name, the intervals of the subject and the base (if any), and their paired difference."""


def options_of(settings: Settings, cls: type[Options]) -> Options:
    """Builds a benchmark's options as their dataclass."""
    return build_options(cls, option_values(settings), owner=f"`options` of {settings.benchmark}")


def option_values(settings: Settings) -> dict[str, Any]:
    """The options by name, read like values of a configuration."""
    values: dict[str, Any] = {}
    for name, text in settings.options.items():
        apply_override(values, f"{name}={text}")
    return values


def trained_on(settings: Settings, prompts: Iterable[str]) -> Overlap | None:
    """Prompts of the subject's training; None if unknown. `prompts` are texts, or `flowrl.prompts.overlap.request`."""
    if settings.train_prompts is None:
        return None
    return overlap(map(request, read_prompts(settings.train_prompts)), prompts)


def training_notes(settings: Settings, prompts: Iterable[str]) -> list[str]:
    """A note if prompts were trained on."""
    if not (shared := trained_on(settings, prompts)):
        return []
    count = len(shared.exact) + len(shared.swapped)
    return [f"{count} of {shared.total} prompts were trained on: the score is not one of unseen prompts."]


def skip_notes(label: str, skipped: int, images: int, answers: Sequence[Row], *, many: float) -> list[str]:
    """A note if images have no scores; it is a warning if their share exceeds `many`."""
    if not skipped:
        return []
    warning = " That is many: the rest may not be a fair sample." if skipped / images > many else ""
    return [
        f"{label}: {skipped} of {images} images have no scores ({errors_of(answers)}) and are in no number.{warning}"
    ]


def costs_of(answers: Mapping[str, Sequence[Row]]) -> dict[str, dict[str, float]]:
    """Cost of all answers about each subject: tokens, and seconds of the judge."""
    return {
        "tokens": {label: sum(row["tokens"] for row in rows) for label, rows in answers.items()},
        "judging_seconds": {label: round(sum(row["seconds"] for row in rows), 1) for label, rows in answers.items()},
    }


def errors_of(answers: Iterable[Row]) -> str:
    """Counts the answers that cannot be read, by reason."""
    words = Counter(str(row["error"]) for row in answers if row["error"])
    return ", ".join(f"{word} {count}" for word, count in words.most_common())


def add_difference(said: str, change: Interval, base: str) -> str:
    """Adds the established difference to the base to a sentence about a subject."""
    difference = f"{signed(change.mean)} (95 % {bounds(change, sign=True)})"
    if not change.excludes(0.0):
        return f"{said} No difference to {base} is established: {difference}."
    return f"{said} {'Better' if change.mean > 0 else 'Worse'} than {base}: {difference}."


def add_changes(said: str, changes: Mapping[str, Interval], labels: Sequence[str], nothing: str) -> str:
    """Adds the scores that surely changed from the base to a sentence about a subject's scores."""
    if not changes:
        return said
    moved = [f"{name} {signed(change.mean, 4)}" for name, change in changes.items() if change.excludes(0.0)]
    return f"{said} Against {labels[1]} the change is established for: {', '.join(moved) or nothing}."


def means_and_bounds(intervals: Mapping[str, Interval]) -> dict[str, float]:
    """Metrics of scores: the mean under its name, its bounds with `_low` and `_high`."""
    found: dict[str, float] = {}
    for name, interval in intervals.items():
        found |= {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
    return found


def lines_of(found: Sequence[Mapping[str, Interval]], changes: Mapping[str, Interval]) -> list[Line]:
    """Lines for the scores that all subjects have."""
    names = [name for name in found[0] if all(name in part for part in found)]
    return [(name, [part[name] for part in found], changes.get(name)) for name in names]


def score_table(
    labels: Sequence[str],
    lines: Iterable[Line],
    *,
    note: str,
    digits: int = 4,
    paired_by: str = "prompts and samples",
    extra: tuple[str, Mapping[str, str]] = ("", {}),
) -> Table:
    """Table of a subject's scores with intervals; with a base, the scores that have a paired change, and it.

    Args:
        paired_by: what the two have in common.
        extra: head and cells, by name, of a further column of a subject alone.
    """
    if len(labels) == 1:
        title, cells = extra
        rows = [
            (name, number(found[0].mean, digits), bounds(found[0]), *([cells.get(name, "")] if title else []))
            for name, found, _ in lines
        ]
        head = ("", "score", "95 %", *([title] if title else []))
        return Table(title=f"Scores of {labels[0]}", head=head, rows=tuple(rows), note=note)
    rows = [
        (name, number(found[1].mean, digits), number(found[0].mean, digits), signed(change.mean, digits),
         bounds(change, sign=True))
        for name, found, change in lines if change is not None
    ]  # fmt: skip
    title = f"{labels[0]} against {labels[1]}, same {paired_by}"
    return Table(title=title, head=("", "base", "model", "change", "95 %"), rows=tuple(rows), note=note)


def claim_of(images: Mapping[str, Sequence[ImageFile]]) -> str:
    """What the intervals cover, from images by their task (`flowrl.statistics.means.claim`)."""
    return claim(
        ScoreRow(task=task, prompt=image.asked_for, sample=image.sample, value=0.0)
        for task, listed in images.items()
        for image in listed
    )
