"""VBench: videos of its prompts, measured by its own package in an environment of its own.

    flowrl eval RUN --baseline base --benchmark vbench --option python=vb/bin/python
    flowrl eval RUN --benchmark vbench --option python=vb/bin/python --option dimensions=[human_action,scene]
    flowrl eval --images FOLDER --benchmark vbench --option python=vb/bin/python       # <prompt>-<k>.mp4 that exist

    subject.folder/vbench/videos/<prompt>-<k>.mp4      links to what was drawn, under the names of the package
    subject.folder/vbench/full_info.json               the prompts that it is given
    subject.folder/vbench/<dimension>/                 its result and log.txt

Start noise is a function of (--seed, prompt, k), another for every video: VBench asks for seeds that are random,
reproducible and not picked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrl.benchmarks.vbench import (
    DIMENSIONS,
    PROMPTS,
    SUMS,
    VIDEOS,
    Entry,
    Measured,
    aggregate,
    intervals,
    normalise,
    read_entries,
    video_name,
)
from flowrl.config.options import unknown_name
from flowrl.config.train import resolve_path
from flowrl.evaluation.benchmark import NO_TRAINING, Result
from flowrl.evaluation.runner_parts import metrics_of, options_of, score_table
from flowrl.evaluation.video.diagnosed import READ_AS, Faults, diagnosed, undiagnosed
from flowrl.evaluation.video.shown_clips import clips_section
from flowrl.evaluation.video.vbench_package import CHECKED, Package, find_package, measure
from flowrl.generation.folders import ImageFile
from flowrl.generation.generate import images_of, some
from flowrl.generation.journal import Journal
from flowrl.generation.layouts import put
from flowrl.generation.subject import Settings, Subject
from flowrl.media.lossless import PLAYED
from flowrl.prompts.loading import Prompt
from flowrl.rendering.markup import estimate, plural, signed
from flowrl.runtime.files import write_atomically
from flowrl.runtime.progress import progress
from flowrl.statistics.bootstrap import Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What `--option` sets."""

    python: str = ""
    """The Python of the environment that has the package vbench."""
    dimensions: tuple[str, ...] = tuple(DIMENSIONS)
    """Which are measured; quality, semantic and total score need all of theirs."""
    local: bool = False
    """Take weights only from the package's cache (its option load_ckpt_from_local)."""

    def __post_init__(self) -> None:
        if not self.python:
            raise ValueError(
                "vbench is measured by its own package in an environment of its own: give --option "
                f"python=ENVIRONMENT/bin/python of one with vbench {CHECKED}."
            )
        for name in self.dimensions:
            if name not in DIMENSIONS:
                raise ValueError(unknown_name("dimension", name, DIMENSIONS))
        if not self.dimensions or len(set(self.dimensions)) != len(self.dimensions):
            raise ValueError(f"dimensions must name each once and at least one, got {list(self.dimensions)}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class VBenchPlan:
    """What is measured on which prompts, by which package."""

    options: Options
    package: Package
    entries: tuple[Entry, ...]


def check(settings: Settings) -> None:
    """Refuses what can be known to be wrong before weights load.

    Raises:
        ValueError: no environment, other prompts than VBench's, too many samples, or videos that are missing.
    """
    plan = plan_of(settings)
    for subject in settings.subjects:
        if subject.images is not None:
            existing_videos(subject.images, plan.entries, settings.samples)


def plan_of(settings: Settings) -> VBenchPlan:
    """Reads the options and the prompts.

    Raises:
        ValueError: see `check`.
    """
    options = options_of(settings, Options)
    if settings.judge is not None:
        raise ValueError("vbench is measured by its package and has no judge: leave --judge out.")
    if settings.samples > VIDEOS:
        raise ValueError(f"--samples must be 1 to {VIDEOS}: the package reads {VIDEOS} videos of a prompt.")
    package = find_package(options.python)
    entries = read_entries(
        package.prompts if settings.prompts is None else resolve_path(settings.prompts), options.dimensions
    )
    chosen = some(entries, settings.num_prompts)
    lacking = set(options.dimensions) - {name for entry in chosen for name in entry.dimensions}
    if lacking:
        raise ValueError(
            f"--num-prompts {settings.num_prompts} leaves no prompt for {', '.join(sorted(lacking))}: raise it, or "
            "leave these out of --option dimensions."
        )
    return VBenchPlan(options=options, package=package, entries=tuple(chosen))


def run(settings: Settings) -> Result:
    """Draws or finds the videos of subject and base, has them measured, and adds up the published scores."""
    plan = plan_of(settings)
    clips = [_videos(settings, subject, plan.entries) for subject in settings.subjects]
    measured = [
        _measured(settings, subject, part, plan) for subject, part in zip(settings.subjects, clips, strict=True)
    ]
    faults = [
        diagnosed(subject, part, show=settings.show) for subject, part in zip(settings.subjects, clips, strict=True)
    ]
    labels = [subject.label for subject in settings.subjects]
    found = [_ordered(intervals(part, plan.entries)) for part in measured]
    change = _ordered(intervals(measured[0], plan.entries, measured[1])) if len(measured) > 1 else {}
    rows = [
        [{"file": clip.file, "prompt": clip.prompt, "sample": clip.sample,
          "values": {name: own.videos[key] for name, own in part.items()
                     if (key := video_name(clip.prompt, clip.sample)) in own.videos}
          | {name: float(column[place]) for name, column in fault.items()}}
         for place, clip in enumerate(listed)]
        for listed, part, fault in zip(clips, measured, faults, strict=True)
    ]  # fmt: skip
    means = [{name: float(column[column == column].mean()) for name, column in part.items() if (column == column).any()}
             for part in faults]  # fmt: skip
    sums = [{name: interval for name, interval in part.items() if name in SUMS} for part in found]
    shown = found if not sums[0] else sums
    scaled = {name: f"{normalise(name, part.score):.4f}" for name, part in measured[0].items()}
    return Result(
        headline=_headline(labels, found, change, len(clips[0]), len(plan.entries)),
        rows=tuple(rows[0]), base_rows=tuple(rows[1]) if change else (),
        metrics=_metrics(found[0], means[0]), base_metrics=_metrics(found[1], means[1]) if change else {},
        intervals=shown[0], base_intervals=shown[1] if change else {}, differences=change,
        claim=f"prompts of this kind{NO_TRAINING}",
        tables=(score_table(
            labels, [(name, [part[name] for part in found], change.get(name)) for name in found[0]],
            note="Quality, semantic and total score are of normalised dimensions; papers print all times 100. Bounds "
            "are of the mean over videos, by prompts.", paired_by="prompts and start noise",
            extra=("normalised", scaled),
        ),),
        notes=tuple(_notes(settings, plan, clips[0], measured[0], faults)),
        facts={"vbench": plan.package.version, "prompts": len(plan.entries), "videos": len(clips[0]),
               "seed": settings.seed, "dimensions": list(plan.options.dimensions)},
        sections=(clips_section(settings.subjects, clips, faults, settings.out),),
    )  # fmt: skip


def _videos(settings: Settings, subject: Subject, entries: Sequence[Entry]) -> list[ImageFile]:
    if subject.images is not None:
        return existing_videos(subject.images, entries, settings.samples)
    prompts = [Prompt(text=text, metadata={"prompt": text}) for text in dict.fromkeys(e.prompt for e in entries)]
    return images_of(settings, subject, prompts, PLAYED)


def existing_videos(folder: Path, entries: Sequence[Entry], samples: int) -> list[ImageFile]:
    """The videos `<prompt>-<k>.mp4` of a folder, k below `samples`.

    Raises:
        ValueError: some are missing; says which and how many.
    """
    texts = list(dict.fromkeys(entry.prompt for entry in entries))
    listed = [
        ImageFile(file=video_name(text, sample), path=folder / video_name(text, sample), prompt=text, index=index,
                  sample=sample)
        for index, text in enumerate(texts) for sample in range(samples)
    ]  # fmt: skip
    missing = [video.file for video in listed if not video.path.is_file()]
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} of {len(listed)} videos (such as {missing[0]!r}): draw them first, or "
            "lower --samples, --num-prompts or --option dimensions; nothing was measured."
        )
    return listed


def _measured(
    settings: Settings, subject: Subject, clips: Sequence[ImageFile], plan: VBenchPlan
) -> dict[str, Measured]:
    """Every dimension of a subject, from its journal where its videos are the ones that were measured."""
    folder = subject.folder / "vbench"
    names = [video_name(clip.prompt, clip.sample) for clip in clips]
    _clear(folder / "videos", names)
    put(clips, folder / "videos", names)
    prompts = folder / "full_info.json"
    write_atomically(prompts, json.dumps([dict(entry.record) for entry in plan.entries], indent=1, ensure_ascii=False))
    stamps = hashlib.sha256("\n".join(clip.stamp for clip in clips).encode() + prompts.read_bytes()).hexdigest()[:16]
    found: dict[str, Measured] = {}
    label = f"vbench of {subject.label}"
    with (
        Journal(subject.folder, {"benchmark": "vbench", "version": plan.package.version}) as journal,
        progress(label, len(plan.options.dimensions), enabled=settings.show) as advance,
    ):
        for name in plan.options.dimensions:
            key = f"{name}:{stamps}"
            if key in journal.rows:
                row = journal.rows[key]
                found[name] = Measured(score=row["score"], videos=row["videos"])
            else:
                found[name] = measure(plan.package, name, videos=folder / "videos", prompts=prompts,
                                      folder=folder / name, local=plan.options.local)  # fmt: skip
                journal.add(key, {"score": found[name].score, "videos": dict(found[name].videos)})
            advance(name)
    return found


def _clear(folder: Path, names: Sequence[str]) -> None:
    """Takes links of other prompts away, which the package would take for videos."""
    kept = set(names)
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name not in kept:
            path.unlink()


def _ordered(found: Mapping[str, Interval]) -> dict[str, Interval]:
    """The sums first, as the leaderboard has them, the total before its parts."""
    order = [*reversed(SUMS), *DIMENSIONS]
    return {name: found[name] for name in order if name in found}


def _metrics(found: Mapping[str, Interval], faults: Mapping[str, float]) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, interval in found.items():
        values |= {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
    return metrics_of("vbench", values | dict(faults))


def _headline(
    labels: Sequence[str], found: Sequence[Mapping[str, Interval]], change: Mapping[str, Interval], videos: int,
    prompts: int,
) -> str:  # fmt: skip
    first, interval = next(iter(found[0].items()))
    said = f"VBench: {first.replace('_', ' ')} {estimate(interval)} for {labels[0]}, {plural(videos, 'video')} of " \
           f"{plural(prompts, 'prompt')}."  # fmt: skip
    if not change:
        return said
    moved = [f"{name} {signed(part.mean, 4)}" for name, part in change.items() if part.excludes(0.0)]
    return f"{said} Against {labels[1]} the change is established for: {', '.join(moved) or 'nothing'}."


def _notes(
    settings: Settings, plan: VBenchPlan, clips: Sequence[ImageFile], measured: Mapping[str, Measured],
    faults: Sequence[Faults],
) -> list[str]:  # fmt: skip
    notes = []
    if len(plan.options.dimensions) < len(DIMENSIONS):
        lacking = [name for name in SUMS if name not in aggregate({name: 0.0 for name in plan.options.dimensions})]
        notes.append(f"{len(plan.options.dimensions)} of {len(DIMENSIONS)} dimensions were measured, so there is no "
                     f"{', '.join(lacking)} score." if lacking else "")  # fmt: skip
    elif len(plan.entries) != PROMPTS or settings.samples != VIDEOS:
        notes.append(f"{len(plan.entries)} prompts with {settings.samples} videos each; published numbers are of "
                     f"{PROMPTS} with {VIDEOS}: compare with the same ones only.")  # fmt: skip
    if plan.package.version != CHECKED:
        notes.append(f"vbench {plan.package.version} measured this; layout and constants were checked with {CHECKED}.")
    if "temporal_flickering" in measured:
        notes.append(
            "temporal_flickering is of all videos of its prompts; the published protocol draws 25 a prompt and keeps "
            "up to 5 that its static filter passes: compare with published numbers with care."
        )
    for name, part in measured.items():
        wanted = len({video_name(clip.prompt, clip.sample) for clip in clips} & _files_of(name, plan.entries))
        if len(part.videos) < wanted:
            notes.append(f"{name}: the package left out {wanted - len(part.videos)} of {wanted} videos.")
    if unread := sum(undiagnosed(part) for part in faults):
        notes.append(f"{plural(unread, 'clip')} could not be read or had too few frames for flicker, freeze, teleport "
                     f"and change, and took no part in their means.")  # fmt: skip
    return [*(note for note in notes if note), READ_AS]


def _files_of(name: str, entries: Sequence[Entry]) -> set[str]:
    return {
        video_name(entry.prompt, k) for entry in entries if name in entry.dimensions for k in range(VIDEOS)
    }  # fmt: skip
