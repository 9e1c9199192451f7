"""How every benchmark runs: images of subject and base, their verdicts, and what both come to.

    check(settings)            refuses what can be known to be wrong before weights load
    run(settings) -> Result    draws or reads all images, has them judged, sums up

What a benchmark does of its own is its `Rules`. Journals of verdicts in `subject.folder` make the same call resume
where it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from flowrl.evaluation.benchmark import BENCHMARKS, Result
from flowrl.generation.folders import IMAGES, ImageFile
from flowrl.generation.generate import PNG, given_images, images_of
from flowrl.generation.subject import Settings, Subject
from flowrl.media.lossless import CLIPS
from flowrl.prompts.loading import Prompt
from flowrl.rewards import load_target

Plan = TypeVar("Plan")
Judge = TypeVar("Judge")
Verdicts = TypeVar("Verdicts")


@dataclass(frozen=True, kw_only=True, slots=True)
class SubjectVerdicts(Generic[Verdicts]):
    """A subject with its images and what was found of them."""

    subject: Subject
    """A model, or a folder of images."""
    images: Sequence[ImageFile]
    """All of them, in the order of prompts and samples."""
    found: Verdicts
    """What the benchmark's `ask` returned."""
    seconds: Mapping[str, float]
    """Of drawing or reading, and of judging."""

    @property
    def label(self) -> str:
        """The subject's short name."""
        return self.subject.label


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules(Generic[Plan, Judge, Verdicts]):
    """What a benchmark does of its own."""

    plan: Callable[[Settings], Plan]
    """Reads options, prompts and judge; raises ValueError for what can be known to be wrong without weights."""
    prompts: Callable[[Settings, Subject, Plan], Sequence[Prompt]]
    """What is drawn of a subject."""
    ask: Callable[[Settings, Plan, Judge, Subject, Sequence[ImageFile]], Verdicts]
    """What the judge says of a subject's images, from its journal where it is known; writes result files."""
    result: Callable[[Settings, Plan, Judge, Sequence[SubjectVerdicts[Verdicts]]], Result]
    """Numbers, tables and notes of a subject, or of a subject and a base."""
    judge: Callable[[Settings, Plan], Judge]
    """Loads who judges; None where nobody is named."""
    suffix: str = PNG
    """How drawn files end."""
    existing: Callable[[Settings, Plan, Path], list[ImageFile]] | None = None
    """The images of a folder that exists; without it those of GenEval's layout."""
    place: Callable[[Subject, Plan, list[ImageFile]], list[ImageFile]] | None = None
    """Puts images under the published names."""
    prepare: Callable[[Settings, Plan], Plan] | None = None
    """The plan with what it needs on disk."""
    estimate: Callable[[Settings, Plan], Result | None] | None = None
    """The result of a dry run; None where it is none."""
    unjudged: Callable[[Plan], tuple[str, str]] | None = None
    """Of a benchmark that only draws where no judge is named: what was drawn, and where in the subject's folder."""


def rules_of(benchmark: str) -> Rules[Any, Any, Any]:
    """The rules of a benchmark by name."""
    found: Rules[Any, Any, Any] = load_target(f"{BENCHMARKS[benchmark].rules}:RULES")
    return found


def check(settings: Settings) -> None:
    """Refuses what can be known to be wrong before weights load. Raises ValueError: no prompts or bad ones, an unknown
    option or judge, or images that are missing from a folder."""
    rules = rules_of(settings.benchmark)
    plan = rules.plan(settings)
    for subject in settings.subjects:
        if subject.images is not None:
            _existing(rules, settings, plan, subject.images)
        else:
            rules.prompts(settings, subject, plan)


def run(settings: Settings) -> Result:
    """Draws or reads the images of subject and base, has them judged, and sums up. Raises ValueError: see `check`; or a
    judge that answers nothing, whose answers before are kept."""
    rules = rules_of(settings.benchmark)
    plan = rules.plan(settings)
    if rules.estimate is not None and (estimate := rules.estimate(settings, plan)) is not None:
        return estimate
    if rules.prepare is not None:
        plan = rules.prepare(settings, plan)
    images, seconds = [], []
    for subject in settings.subjects:  # all of them must be there before the first question costs anything
        start = time.monotonic()
        if subject.images is not None:
            listed = _existing(rules, settings, plan, subject.images)
        else:
            listed = images_of(settings, subject, rules.prompts(settings, subject, plan), rules.suffix)
        images.append(listed if rules.place is None else rules.place(subject, plan, listed))
        seconds.append({"drawing": round(time.monotonic() - start, 2)})
    judge = rules.judge(settings, plan)
    if judge is None and rules.unjudged is not None:
        what, place = rules.unjudged(plan)
        folder = str(settings.subject.folder / place)
        return Result(
            headline=f"{what} in {folder}; no judge was named.",
            rows=(),
            metrics={},
            tables=(),
            notes=("The benchmark's own scripts take this folder; or name a judge.",),
            facts={"folder": folder},
        )
    parts = []
    for subject, listed, spent in zip(settings.subjects, images, seconds, strict=True):
        start = time.monotonic()
        found = rules.ask(settings, plan, judge, subject, listed)
        spent["judging"] = round(time.monotonic() - start, 2)
        parts.append(SubjectVerdicts(subject=subject, images=listed, found=found, seconds=spent))
    return rules.result(settings, plan, judge, parts)


def _existing(rules: Rules[Any, Any, Any], settings: Settings, plan: Any, folder: Path) -> list[ImageFile]:
    if rules.existing is not None:
        return rules.existing(settings, plan, folder)
    return given_images(settings, folder, IMAGES if rules.suffix == PNG else CLIPS)
