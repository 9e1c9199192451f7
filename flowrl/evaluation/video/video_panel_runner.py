"""Any rewards that read videos, side by side on a prompt file, with temporal diagnostics.

    flowrl eval asset:tiny-wan --benchmark video_panel --baseline FOLDER
    flowrl eval RUN --baseline base --benchmark video_panel --prompts mine.txt --option rewards=video_align,physics
    flowrl eval RUN --benchmark video_panel --prompts mine.txt --option rewards=panel.yaml

A YAML file with a list `rewards:` gives options of rewards, and `frames:` to those that judge images. Clips are drawn
without loss (`flowrl.media.lossless`), so that rewards see what they would see in training, rounded to 8 bits.
Options: `rewards` and `REWARD.OPTION`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.benchmarks.panels import VIDEO_PANELS, Panel
from flowrl.config.options import unknown_name
from flowrl.config.train import resolve_path
from flowrl.evaluation.benchmark import Result
from flowrl.evaluation.panel_result import Scored, result_of
from flowrl.evaluation.panel_runner import scored_by
from flowrl.evaluation.video.diagnosed import READ_AS, VERSION, diagnosed
from flowrl.evaluation.video.shown_clips import clips_section
from flowrl.generation.folders import ImageFile, is_folder_of_images
from flowrl.generation.generate import choose, given_images, images_of
from flowrl.generation.models import EMBEDDED_VIDEO
from flowrl.generation.scorers import load_scorers, scorer_names, scorer_specs
from flowrl.generation.subject import Settings, Subject
from flowrl.media.lossless import CLIPS, LOSSLESS
from flowrl.prompts.loading import Prompt, read_prompts
from flowrl.rewards import Reward

WORLD_REWARDS = ("motion_verdict", "temporal_smoothness")
WORLD = "asset:prompts/motion_heldout.jsonl"
_OWN = Panel(title="Video panel", rewards=(), prompts=0, where="a file of your own", scale="")


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoPlan:
    """What is measured, known before anything is loaded: without rewards the diagnostics alone."""

    panel: Panel
    specs: list[dict[str, Any]]


def check(settings: Settings) -> None:
    """Refuses what can be known to be wrong before weights load.

    Raises:
        ValueError: unknown options or rewards, no prompts, or a folder of clips that is not one.
    """
    plan_of(settings)
    for subject in settings.subjects:
        if subject.images is None:
            video_prompts(settings, subject)
        else:
            existing_clips(settings, subject.images)


def run(settings: Settings) -> Result:
    """Draws or reads the clips of subject and base, scores and diagnoses them, and sums up."""
    plan = plan_of(settings)
    clips = [
        images_of(settings, subject, video_prompts(settings, subject), LOSSLESS) if subject.images is None
        else existing_clips(settings, subject.images)
        for subject in settings.subjects
    ]  # fmt: skip
    scorers = load_scorers(plan.specs, settings.device) if plan.specs else {}
    pairs = list(zip(settings.subjects, clips, strict=True))
    scored = with_columns(
        [scored_by(scorers, plan.specs, subject, part, batch_size=settings.batch_size) for subject, part in pairs],
        [diagnosed(subject, part, show=settings.show) for subject, part in pairs],
    )
    versions = {**{name: reward.version for name, reward in scorers.items()}, "diagnostics": VERSION}
    return result_of(
        settings, plan.panel, scored, [], versions, noun="clip",
        own_scorers=not plan.panel.rewards or scorer_names(plan.specs) == list(plan.panel.rewards),
        sections=[clips_section(settings.subjects, clips, [part.values for part in scored], settings.out)],
        notes=[*_notes(scorers), READ_AS],
    )  # fmt: skip


def with_columns(scored: Sequence[Scored], diagnostics: Sequence[Mapping[str, Any]]) -> list[Scored]:
    """Clips of all subjects with sub-scores beside their rewards and the diagnostics after them, as values and in rows.

    A sub-score that is the value itself, of all clips of all subjects, is left out.
    """
    columns: list[dict[str, Any]] = [{} for _ in scored]
    for name in scored[0].values:
        for found, part in zip(columns, scored, strict=True):
            found[name] = part.values[name]
        own = [key for part in scored for row in part.rows for key in row["parts"] if key.startswith(f"{name}.")]
        for key in dict.fromkeys(own):
            sides = [np.array([row["parts"].get(key) for row in part.rows], dtype=np.float64) for part in scored]
            if not all(np.array_equal(side, part.values[name], equal_nan=True)
                       for side, part in zip(sides, scored, strict=True)):  # fmt: skip
                for found, side in zip(columns, sides, strict=True):
                    found[key] = side
    for found, part, faults in zip(columns, scored, diagnostics, strict=True):
        found |= faults
        for place, row in enumerate(part.rows):
            row["values"] |= {name: float(column[place]) for name, column in faults.items()}
    return [replace(part, values=found) for part, found in zip(scored, columns, strict=True)]


def plan_of(settings: Settings) -> VideoPlan:
    """Reads the options.

    Raises:
        ValueError: see `check`.
    """
    panel = VIDEO_PANELS.get(settings.benchmark, _OWN)
    options = {name: text for name, text in settings.options.items() if "." in name}
    for name in settings.options.keys() - options.keys():
        if name != "rewards":
            raise ValueError(
                f"--option {name}: {unknown_name(f'option of {settings.benchmark}', name, ['rewards'])} Options of a "
                f"reward are written REWARD.OPTION."
            )
    if settings.judge is not None:
        raise ValueError(f"{settings.benchmark} has rewards and no judge: leave --judge out, and name rewards by "
                         f"--option rewards=NAME,NAME.")  # fmt: skip
    usual = WORLD_REWARDS if panel is _OWN and _of_world(settings, settings.subject) else panel.rewards
    rewards = settings.options.get("rewards", ",".join(usual))
    if not rewards and options:
        raise ValueError(f"--option {next(iter(options))}: no reward was given, name them by --option rewards=NAME.")
    return VideoPlan(panel=panel, specs=scorer_specs(rewards, options) if rewards else [])


def video_prompts(settings: Settings, subject: Subject) -> list[Prompt]:
    """The prompts of --prompts, or the embedded model's held-out ones.

    Raises:
        ValueError: none were given, or the file cannot be read.
    """
    if _of_world(settings, subject):
        return choose(read_prompts(resolve_path(WORLD)), settings.num_prompts)
    if settings.prompts is None:
        where = VIDEO_PANELS.get(settings.benchmark, _OWN).where
        raise ValueError(f"{settings.benchmark} needs --prompts FILE (.txt or .jsonl): {where}; none is shipped.")
    return choose(read_prompts(resolve_path(settings.prompts)), settings.num_prompts)


def _of_world(settings: Settings, subject: Subject) -> bool:
    shipped = subject.source is not None and subject.source.model == EMBEDDED_VIDEO
    return settings.prompts == "world" or (settings.prompts is None and shipped)


def existing_clips(settings: Settings, folder: Path) -> list[ImageFile]:
    """Clips of a folder in GenEval's layout.

    Raises:
        ValueError: another layout, no clips, or fewer than are asked for.
    """
    if not is_folder_of_images(folder):
        raise ValueError(
            f"{folder} is no folder of clips with their prompts: lay it out as NNNNN/metadata.jsonl (one JSON object "
            f"with a prompt) and NNNNN/samples/<digits>{LOSSLESS} or .mp4."
        )
    return given_images(settings, folder, CLIPS)


def _notes(scorers: dict[str, Reward]) -> Sequence[str]:
    stills = [name for name, reward in scorers.items() if "videos" not in reward.needs and "images" in reward.needs]
    if not stills:
        return []
    return [f"{', '.join(stills)} judged the first frame of each clip alone: a YAML file of rewards gives it frames:."]
