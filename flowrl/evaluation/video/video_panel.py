"""Any rewards that read videos, side by side on a prompt file, with temporal diagnostics.

A YAML file with a list `rewards:` gives options of rewards, and `frames:` to those that judge images. Clips are drawn
without loss (`flowrl.media.lossless`), so that rewards see what they would see in training, rounded to 8 bits.
Options: `rewards` and `REWARD.OPTION`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.benchmarks.panels import VIDEO_PANELS, Panel
from flowrl.evaluation import panel
from flowrl.evaluation.benchmark import Result
from flowrl.evaluation.panel import (
    WORLD,
    PanelPlan,
    ScoredImages,
    Scorers,
    find_prompts,
    panel_result,
    scorer_options,
    specs_of,
)
from flowrl.evaluation.runner import Rules, SubjectVerdicts
from flowrl.evaluation.video.shown_clips import READ_AS, VERSION, Faults, clips_section, diagnose_clips
from flowrl.generation.folders import ImageFile, is_folder_of_images
from flowrl.generation.generate import given_images
from flowrl.generation.models import EMBEDDED_VIDEO
from flowrl.generation.scorers import load_scorers
from flowrl.generation.subject import Settings, Subject
from flowrl.media.lossless import CLIPS, LOSSLESS
from flowrl.prompts.loading import Prompt

WORLD_REWARDS = ("motion_verdict", "temporal_smoothness")
_OWN = Panel(title="Video panel", rewards=(), prompts=0, where="a file of your own", scale="")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ClipScores:
    """What scorers and diagnostics say of a subject's clips."""

    scored: ScoredImages
    faults: Faults


def plan_of(settings: Settings) -> PanelPlan:
    """Reads the options; without rewards the diagnostics alone are measured."""
    known = VIDEO_PANELS.get(settings.benchmark, _OWN)
    options = scorer_options(settings, ("rewards",), "rewards")
    usual = WORLD_REWARDS if known is _OWN and _of_world(settings, settings.subject) else known.rewards
    return PanelPlan(panel=known, specs=specs_of(settings.options.get("rewards", ",".join(usual)), options))


def video_prompts(settings: Settings, subject: Subject, plan: PanelPlan) -> list[Prompt]:
    """The prompts of the file that is named, or the embedded model's held-out ones."""
    named = WORLD if _of_world(settings, subject) else settings.prompts
    return find_prompts(settings, named, plan.panel.where, "asset:prompts/motion_heldout.jsonl")


def _of_world(settings: Settings, subject: Subject) -> bool:
    shipped = subject.source is not None and subject.source.model == EMBEDDED_VIDEO
    return settings.prompts == WORLD or (settings.prompts is None and shipped)


def existing(settings: Settings, plan: PanelPlan, folder: Path) -> list[ImageFile]:
    """Clips of a folder in GenEval's layout."""
    if not is_folder_of_images(folder):
        raise ValueError(
            f"{folder} is no folder of clips with their prompts: lay it out as NNNNN/metadata.jsonl (one JSON object "
            f"with a prompt) and NNNNN/samples/<digits>{LOSSLESS} or .mp4."
        )
    return given_images(settings, folder, CLIPS)


def ask(
    settings: Settings, plan: PanelPlan, scorers: Scorers, subject: Subject, clips: Sequence[ImageFile]
) -> ClipScores:
    """What every scorer and diagnostic says of a subject's clips, from journals where it is known."""
    scored = panel.ask(settings, plan, scorers, subject, clips)
    return ClipScores(scored=scored, faults=diagnose_clips(subject, clips))


def result(
    settings: Settings, plan: PanelPlan, scorers: Scorers, parts: Sequence[SubjectVerdicts[ClipScores]]
) -> Result:
    """Means of scorers, their sub-scores and the diagnostics; with clips to look at."""
    scored = with_columns(parts)
    notes = [READ_AS]
    stills = [name for name, reward in scorers.items() if "videos" not in reward.needs and "images" in reward.needs]
    if stills:
        notes.insert(
            0,
            f"{', '.join(stills)} judged the first frame of each clip alone: a YAML file of rewards gives it frames:.",
        )
    return panel_result(
        settings, plan.panel, scored, [],
        {**{name: reward.version for name, reward in scorers.items()}, "diagnostics": VERSION}, noun="clip",
        own_scorers=plan.own_scorers, notes=notes,
        sections=[clips_section(settings.subjects, [part.images for part in scored],
                                [part.found.values for part in scored], settings.out)],
    )  # fmt: skip


def with_columns(parts: Sequence[SubjectVerdicts[ClipScores]]) -> list[SubjectVerdicts[ScoredImages]]:
    """All subjects' clips with sub-scores (unless equal to the reward) and diagnostics, as values and in rows."""
    scored = [part.found.scored for part in parts]
    columns: list[dict[str, Any]] = [{} for _ in scored]
    for name in scored[0].values:
        for found, part in zip(columns, scored, strict=True):
            found[name] = part.values[name]
        for key, sides in sub_scores(scored, name).items():
            for found, side in zip(columns, sides, strict=True):
                found[key] = side
    for found, one in zip(columns, parts, strict=True):
        found |= one.found.faults
        for place, row in enumerate(one.found.scored.rows):
            row["values"] |= {name: float(column[place]) for name, column in one.found.faults.items()}
    return [
        SubjectVerdicts(
            subject=one.subject, images=one.images, found=replace(one.found.scored, values=found), seconds=one.seconds
        )
        for one, found in zip(parts, columns, strict=True)
    ]


def sub_scores(scored: Sequence[ScoredImages], name: str) -> dict[str, list[np.ndarray]]:
    """The sub-scores of a scorer, one column for each subject, but those that are the value itself."""
    own = [key for part in scored for row in part.rows for key in row["parts"] if key.startswith(f"{name}.")]
    found = {}
    for key in dict.fromkeys(own):
        sides = [np.array([row["parts"].get(key) for row in part.rows], dtype=np.float64) for part in scored]
        pairs = zip(sides, scored, strict=True)
        if not all(np.array_equal(side, part.values[name], equal_nan=True) for side, part in pairs):
            found[key] = sides
    return found


RULES: Rules[PanelPlan, Scorers, ClipScores] = Rules(
    plan=plan_of,
    prompts=video_prompts,
    suffix=LOSSLESS,
    existing=existing,
    judge=lambda settings, plan: load_scorers(plan.specs, settings.device) if plan.specs else {},
    ask=ask,
    result=result,
)
