"""The benchmarks of `flowrl eval` by name, with what is known of each before anything heavy is loaded; and results.

A benchmark is an entry of `benchmarks.yaml`, whose module has `RULES` (`flowrl.evaluation.runner`): how options and
prompts are read, where images lie that exist, who judges, and how verdicts become numbers. Drawing, journals,
baselines and resuming are the runner's.

    out/result.json  out/page.html            `flowrl.evaluation.evaluate`
    out/model/, out/base/                     `subject.folder`: images/, journals, a benchmark's own result files
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.config.strict_yaml import read_mapping
from flowrl.rendering.terminal_text import Table

if TYPE_CHECKING:  # names of commands and options are asked for before anything heavy is loaded
    from flowrl.statistics.bootstrap import Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """What a caller has to know of a benchmark before it is run."""

    rules: str
    """Module with `RULES`; several benchmarks may share it, and `settings.benchmark` says which is meant."""
    samples: int = 4
    """Images or clips per prompt where nobody says: the published number."""
    videos: bool = False
    """Whether it takes models of videos; all others take models of images."""
    one_image: bool = False
    """Whether it takes one image of each prompt, however many a folder has."""
    own_names: bool = False
    """Whether it also takes a folder in which images or clips have the published names."""
    reproduces: str | None = None
    """Of a published name: what it reproduces, and against what that was checked here, in a line; it goes into
    result.json and docs/published.md, as does `reproduces` of the rewards."""


BENCHMARKS: dict[str, Benchmark] = {
    name: Benchmark(**known) for name, known in read_mapping(Path(__file__).with_name("benchmarks.yaml")).items()
}


def are_shares(metrics: Iterable[str]) -> bool:
    """Whether metrics `eval/<benchmark>/...` that lie from 0 to 1 have to: a panel's are those of any scorer."""
    names = {name.split("/")[1] for name in metrics}
    return not any(known.rules.endswith("panel") for name, known in BENCHMARKS.items() if name in names)


NO_TRAINING = ", not another training of the same model"


@dataclass(frozen=True, kw_only=True, slots=True)
class SideResult:
    """What was found of a subject, or of the base."""

    rows: Sequence[Mapping[str, Any]]
    metrics: Mapping[str, float]
    intervals: Mapping[str, Interval]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What a benchmark found; the command prints it, result.json and the page are written of it."""

    headline: str
    """The result in one or two sentences of plain text; it opens the output and the page."""
    rows: tuple[Mapping[str, Any], ...]
    """One mapping per image of the subject, of plain JSON values (NaN is written as null)."""
    base_rows: tuple[Mapping[str, Any], ...] = ()
    metrics: Mapping[str, float]
    """`eval/<benchmark>/<metric>` -> number of the subject. Means over several models are taken of these."""
    base_metrics: Mapping[str, float] = field(default_factory=dict)
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    """Scores with intervals, in the order in which the page draws them."""
    base_intervals: Mapping[str, Interval] = field(default_factory=dict)
    differences: Mapping[str, Interval] = field(default_factory=dict)
    """Paired differences, subject minus base, likewise."""
    claim: str = f"prompts of this kind{NO_TRAINING}"
    """What the intervals speak of."""
    tables: tuple[Table, ...]
    notes: tuple[str, ...] = ()
    """Warnings and facts without which the numbers mislead; printed, and on top of the page."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Judge, versions, settings: plain JSON values for result.json and the page's last section."""
    sections: tuple[str, ...] = ()
    """Further parts of the page as HTML, made by `flowrl.rendering.markup.section`; they stand after the tables."""


def result_of(
    benchmark: str, headline: str, sides: Sequence[SideResult], *, changes: Mapping[str, Interval] | None = None,
    tables: Sequence[Table], notes: Sequence[str] = (), facts: Mapping[str, Any], claim: str = "",
    sections: Sequence[str] = (),
) -> Result:  # fmt: skip
    """The result of a subject, or of a subject and a base.

    Args:
        benchmark: which begins the full names of metrics.
        sides: the subject, and the base if there is one.
        notes: without which the numbers mislead.
        claim: what the intervals speak of; empty for prompts of this kind.
    """
    named = [{f"eval/{benchmark}/{name}": value for name, value in side.metrics.items()} for side in sides]
    base = sides[1:]
    return Result(
        headline=headline, rows=tuple(sides[0].rows), base_rows=tuple(base[0].rows) if base else (),
        metrics=named[0], base_metrics=named[1] if base else {}, intervals=sides[0].intervals,
        base_intervals=base[0].intervals if base else {}, differences=dict(changes or {}),
        claim=claim or f"prompts of this kind{NO_TRAINING}", tables=tuple(tables), notes=tuple(notes), facts=facts,
        sections=tuple(sections),
    )  # fmt: skip
