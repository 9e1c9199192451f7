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
    """A subject with its images and what was found of them.

    Attributes:
        subject: a model, or a folder of images.
        images: all of them, in the order of prompts and samples.
        found: what the benchmark's `ask` returned.
        seconds: of drawing or reading, and of judging.
    """

    subject: Subject
    images: Sequence[ImageFile]
    found: Verdicts
    seconds: Mapping[str, float]

    @property
    def label(self) -> str:
        """The subject's short name."""
        return self.subject.label


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules(Generic[Plan, Judge, Verdicts]):
    """What a benchmark does of its own.

    Attributes:
        plan: reads options, prompts and judge; raises ValueError for what can be known to be wrong without weights.
        prompts: what is drawn of a subject.
        ask: what the judge says of a subject's images, from its journal where it is known; writes result files.
        result: numbers, tables and notes of a subject, or of a subject and a base.
        judge: loads who judges; None where nobody is named.
        suffix: how drawn files end.
        existing: the images of a folder that exists; without it those of GenEval's layout.
        place: puts images under the published names.
        prepare: the plan with what it needs on disk.
        estimate: the result of a dry run; None where it is none.
        unjudged: of a benchmark that only draws where no judge is named: what was drawn, and where in the subject's
            folder.
    """

    plan: Callable[[Settings], Plan]
    prompts: Callable[[Settings, Subject, Plan], Sequence[Prompt]]
    ask: Callable[[Settings, Plan, Judge, Subject, Sequence[ImageFile]], Verdicts]
    result: Callable[[Settings, Plan, Judge, Sequence[SubjectVerdicts[Verdicts]]], Result]
    judge: Callable[[Settings, Plan], Judge]
    suffix: str = PNG
    existing: Callable[[Settings, Plan, Path], list[ImageFile]] | None = None
    place: Callable[[Subject, Plan, list[ImageFile]], list[ImageFile]] | None = None
    prepare: Callable[[Settings, Plan], Plan] | None = None
    estimate: Callable[[Settings, Plan], Result | None] | None = None
    unjudged: Callable[[Plan], tuple[str, str]] | None = None


def rules_of(benchmark: str) -> Rules[Any, Any, Any]:
    """The rules of a benchmark by name."""
    found: Rules[Any, Any, Any] = load_target(f"{BENCHMARKS[benchmark].rules}:RULES")
    return found


def check(settings: Settings) -> None:
    """Refuses what can be known to be wrong before weights load.

    Raises:
        ValueError: no prompts or bad ones, an unknown option or judge, or images that are missing from a folder.
    """
    rules = rules_of(settings.benchmark)
    plan = rules.plan(settings)
    for subject in settings.subjects:
        if subject.images is not None:
            _existing(rules, settings, plan, subject.images)
        else:
            rules.prompts(settings, subject, plan)


def run(settings: Settings) -> Result:
    """Draws or reads the images of subject and base, has them judged, and sums up.

    Raises:
        ValueError: see `check`; or a judge that answers nothing, whose answers before are kept.
    """
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
