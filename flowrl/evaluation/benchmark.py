"""The benchmarks of `flowrl eval` by name, with all that is known of each before anything heavy loads; and results.

A benchmark is an entry of `benchmarks.yaml`, whose module has `RULES` (`flowrl.evaluation.runner`): how to read options
and prompts, where existing images lie, who judges, and how verdicts become numbers. The runner does the rest.

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
    """What a caller must know of a benchmark before running it."""

    rules: str
    """Module with `RULES`; if several benchmarks share it, `settings.benchmark` says which one runs."""
    samples: int = 4
    """Default number of images or clips per prompt: the published one."""
    videos: bool = False
    """Whether it takes video models instead of image models."""
    one_image: bool = False
    """Whether it takes one image per prompt, however many a folder has."""
    own_names: bool = False
    """Whether it also takes a folder in which images or clips have the published names."""
    reproduces: str | None = None
    """For a published name: what it reproduces and what that was checked against, in one line for result.json and
    docs/published.md, like `reproduces` of rewards."""


BENCHMARKS: dict[str, Benchmark] = {
    name: Benchmark(**known) for name, known in read_mapping(Path(__file__).with_name("benchmarks.yaml")).items()
}


def are_shares(metrics: Iterable[str]) -> bool:
    """Whether metrics `eval/<benchmark>/...` from 0 to 1 are shares; a panel's scorers may have any range."""
    names = {name.split("/")[1] for name in metrics}
    return not any(known.rules.endswith("panel") for name, known in BENCHMARKS.items() if name in names)


NO_TRAINING = ", not another training of the same model"


@dataclass(frozen=True, kw_only=True, slots=True)
class SideResult:
    """Findings about the subject, or about the base."""

    rows: Sequence[Mapping[str, Any]]
    metrics: Mapping[str, float]
    intervals: Mapping[str, Interval]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of a benchmark; the output, result.json and the page are made from it."""

    headline: str
    """The result in one or two sentences of plain text; it opens the output and the page."""
    rows: tuple[Mapping[str, Any], ...]
    """One mapping per image of the subject, of plain JSON values (NaN is written as null)."""
    base_rows: tuple[Mapping[str, Any], ...] = ()
    metrics: Mapping[str, float]
    """`eval/<benchmark>/<metric>` -> number of the subject. Results of several models are means of these."""
    base_metrics: Mapping[str, float] = field(default_factory=dict)
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    """Scores with intervals, in the order in which the page draws them."""
    base_intervals: Mapping[str, Interval] = field(default_factory=dict)
    differences: Mapping[str, Interval] = field(default_factory=dict)
    """Paired differences, subject minus base, in the same order."""
    claim: str = f"prompts of this kind{NO_TRAINING}"
    """What the intervals cover."""
    tables: tuple[Table, ...]
    notes: tuple[str, ...] = ()
    """Warnings and facts without which the numbers mislead; printed, and at the top of the page."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Judge, versions, settings: plain JSON values for result.json and the page's last section."""
    sections: tuple[str, ...] = ()
    """Further parts of the page as HTML, made by `flowrl.rendering.markup.section`; they stand after the tables."""


def result_of(
    benchmark: str, headline: str, sides: Sequence[SideResult], *, changes: Mapping[str, Interval] | None = None,
    tables: Sequence[Table], notes: Sequence[str] = (), facts: Mapping[str, Any], claim: str = "",
    sections: Sequence[str] = (),
) -> Result:  # fmt: skip
    """The result of a subject, or of a subject and a base. `notes` are facts without which the numbers mislead; `claim`
    is what the intervals cover, empty for prompts of this kind."""
    named = [{f"eval/{benchmark}/{name}": value for name, value in side.metrics.items()} for side in sides]
    base = sides[1:]
    return Result(
        headline=headline, rows=tuple(sides[0].rows), base_rows=tuple(base[0].rows) if base else (),
        metrics=named[0], base_metrics=named[1] if base else {}, intervals=sides[0].intervals,
        base_intervals=base[0].intervals if base else {}, differences=dict(changes or {}),
        claim=claim or f"prompts of this kind{NO_TRAINING}", tables=tuple(tables), notes=tuple(notes), facts=facts,
        sections=tuple(sections),
    )  # fmt: skip
