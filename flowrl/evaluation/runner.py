"""Runs every benchmark: images of subject and base, their verdicts, and the result.

    check(settings)            refuses what can be known to be wrong before weights load
    run(settings) -> Result    draws or reads all images, has them judged, sums up

The `Rules` of a benchmark hold what is specific to it. With journals in `subject.folder`, the same call resumes.
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
from flowrl.rendering.markup import plural
from flowrl.rewards import load_target

Plan = TypeVar("Plan")
Judge = TypeVar("Judge")
Verdicts = TypeVar("Verdicts")


@dataclass(frozen=True, kw_only=True, slots=True)
class SubjectVerdicts(Generic[Verdicts]):
    """A subject with its images and their verdicts."""

    subject: Subject
    """A model, or a folder of images."""
    images: Sequence[ImageFile]
    """All images, in the order of prompts and samples."""
    found: Verdicts
    """What the benchmark's `ask` returned."""
    seconds: Mapping[str, float]
    """Seconds of drawing or reading, and of judging."""

    @property
    def label(self) -> str:
        """The subject's short name."""
        return self.subject.label


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules(Generic[Plan, Judge, Verdicts]):
    """The functions that are specific to a benchmark."""

    plan: Callable[[Settings], Plan]
    """Reads options, prompts and judge; raises ValueError for faults that can be found without weights."""
    prompts: Callable[[Settings, Subject, Plan], Sequence[Prompt]]
    ask: Callable[[Settings, Plan, Judge, Subject, Sequence[ImageFile]], Verdicts]
    """Judges a subject's images, with known verdicts from its journal; writes result files."""
    result: Callable[[Settings, Plan, Judge, Sequence[SubjectVerdicts[Verdicts]]], Result]
    """Numbers, tables and notes of a subject, and of a base if there is one."""
    judge: Callable[[Settings, Plan], Judge]
    """Loads the judge; None if none is named."""
    suffix: str = PNG
    """File ending of drawn files."""
    existing: Callable[[Settings, Plan, Path], list[ImageFile]] | None = None
    """Finds the images of an existing folder; by default in GenEval's layout."""
    place: Callable[[Subject, Plan, list[ImageFile]], list[ImageFile]] | None = None
    """Puts images under the published names."""
    prepare: Callable[[Settings, Plan], Plan] | None = None
    """Puts on disk what the plan needs; returns the plan."""
    estimate: Callable[[Settings, Plan], Result | None] | None = None
    """The result of a dry run; None if this is not one."""
    unjudged: Callable[[Plan], tuple[str, str]] | None = None
    """For a benchmark that only draws if no judge is named: what it drew, and where in the subject's folder."""


def rules_of(benchmark: str) -> Rules[Any, Any, Any]:
    """The rules of a benchmark by name."""
    found: Rules[Any, Any, Any] = load_target(f"{BENCHMARKS[benchmark].rules}:RULES")
    return found


def check(settings: Settings) -> str:
    """Finds faults before weights load; returns how much is to be drawn, in words. Raises ValueError: prompts, options,
    judge or images are wrong or missing."""
    rules, found = rules_of(settings.benchmark), [0]
    plan = rules.plan(settings)
    for subject in settings.subjects:
        if subject.images is not None:
            _existing(rules, settings, plan, subject.images)
        else:
            found.append(len(rules.prompts(settings, subject, plan)))
    count = plural(sum(found) * settings.samples, "image" if rules.suffix == PNG else "clip")
    each = f"{plural(found[-1], 'prompt')} x {settings.samples} a model"
    return f"{settings.benchmark}: {count} to draw, {each} (fewer: num_prompts, samples)"


def run(settings: Settings) -> Result:
    """Draws or reads the images of subject and base, judges them and sums up. Raises ValueError: as `check`, or the
    judge answers nothing; earlier answers are kept."""
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
