"""VBench: videos of its prompts, measured by its own package in a separate environment.

Options: `python=vb/bin/python` of that environment, `dimensions=[human_action,scene]`, `local`.

    subject.folder/vbench/videos/<prompt>-<k>.mp4      links to what was drawn, under the names of the package
    subject.folder/vbench/full_info.json               the prompts that it is given
    subject.folder/vbench/<dimension>/                 its result and log.txt

Start noise is a function of (seed, prompt, k): VBench asks for seeds that are random, reproducible and not picked.

The package needs library versions that exclude flowrl's. Each dimension runs in one process, `PYTHON -m
vbench.launch.evaluate`, which takes any path and returns its exit status; only one, because over several GPUs version
0.1.5 takes appearance_style from the last frames instead of all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

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
    read_measured,
    video_name,
)
from flowrl.config.options import unknown_name
from flowrl.config.train import resolve_path
from flowrl.evaluation.benchmark import Result, SideResult, result_of
from flowrl.evaluation.runner import Rules, SubjectVerdicts
from flowrl.evaluation.summing import add_changes, means_and_bounds, options_of, score_table
from flowrl.evaluation.video.shown_clips import READ_AS, Faults, clips_section, diagnose_clips
from flowrl.generation.folders import ImageFile
from flowrl.generation.generate import some
from flowrl.generation.layouts import put
from flowrl.generation.subject import Settings, Subject
from flowrl.media.lossless import PLAYED
from flowrl.prompts.loading import Prompt
from flowrl.rendering.markup import estimate, plural
from flowrl.runtime.files import write_atomically
from flowrl.runtime.journal import Journal
from flowrl.runtime.progress import progress
from flowrl.statistics.bootstrap import Interval

CHECKED = "0.1.5"
"""The version whose files and arithmetic were checked."""
_FIND = (
    "import importlib.metadata as m, importlib.util as u, json\n"
    "found = u.find_spec('vbench')\n"
    "try: version = m.version('vbench')\n"
    "except m.PackageNotFoundError: version = None\n"
    "print(json.dumps({'folder': list(found.submodule_search_locations)[0] if found else None, 'version': version}))"
)
_PATIENCE = 120  # seconds in which an environment has to say whether it has the package
_LAST = 12  # lines of its output that an error quotes


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """The package: the Python that has it, its version, and its list of prompts."""

    python: str
    version: str
    prompts: Path


def find_package(python: str) -> Package:
    """Finds an environment's package without an import. Raises ValueError: no such Python runs, or it has no vbench."""
    path = shutil.which(Path(python).expanduser())
    advice = (
        f"make an environment for it (python3 -m venv vb && vb/bin/pip install vbench=={CHECKED}) and give "
        f"`options` python=vb/bin/python"
    )
    if path is None:
        raise ValueError(f"`options` python={python} is no program on this machine: {advice}.")
    path = os.path.abspath(path)  # as it is: a link leads to its environment
    try:
        answer = subprocess.run(
            [path, "-c", _FIND], capture_output=True, text=True, timeout=_PATIENCE, env=_environment(), check=False
        )
        if answer.returncode != 0:
            last = answer.stderr.strip().rpartition("\n")[2] or "it said nothing"
            raise ValueError(f"`options` python={python} ended with status {answer.returncode} ({last}): {advice}.")
        said = json.loads(answer.stdout.strip().rpartition("\n")[2])
    except (OSError, subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        raise ValueError(f"`options` python={python} is no Python that runs ({error}): {advice}.") from error
    if not said.get("folder"):
        raise ValueError(f"the Python {python} has no package vbench: {advice}.")
    prompts = Path(said["folder"]) / "VBench_full_info.json"
    return Package(python=path, version=str(said["version"] or "unknown"), prompts=prompts)


def measure(
    package: Package, dimension: str, *, videos: Path, prompts: Path, folder: Path, local: bool = False
) -> Measured:
    """Runs the package on one of `flowrl.benchmarks.vbench.DIMENSIONS`.

    Args:
        videos: a folder that holds only `<prompt>-<k>.mp4`.
        prompts: the list of prompts that it reads.
        folder: output folder; `log.txt` has its output.
        local: take weights only from its own cache.

    Raises ValueError: it failed; the message has the last lines of its output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*_eval_results.json"):  # of a run that was cut off, or of other videos
        old.unlink()
    command = [
        package.python, "-m", "vbench.launch.evaluate", "--videos_path", str(videos.resolve()), "--output_path",
        str(folder.resolve()), "--full_json_dir", str(prompts.resolve()), "--dimension", dimension,
        *(["--load_ckpt_from_local", "true"] if local else []),
    ]  # fmt: skip
    with socket.socket() as probe:  # a free port: two evaluations at once would fight over the package's own default
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "log.txt"
    with log.open("wb") as stream:
        done = subprocess.run(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            check=False,
            env=_environment() | {"MASTER_PORT": str(port)},
        )
    found = sorted(folder.glob("*_eval_results.json"))
    if done.returncode != 0 or not found:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_LAST:]
        ended = f"ended with status {done.returncode}" if done.returncode else "wrote no result"
        raise ValueError(
            f"vbench {ended} on {dimension} (the whole output is in {log}). What is measured already is kept: the same "
            f"command goes on. Its last lines:\n" + "\n".join(last)
        )
    return read_measured(found[-1], dimension)


def _environment() -> dict[str, str]:
    """This process's environment, without the variables of its own Python."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


@dataclass(frozen=True, kw_only=True, slots=True)
class VBenchOptions:
    """The benchmark's `options`."""

    python: str = ""
    """The Python of the environment that has the package vbench."""
    dimensions: tuple[str, ...] = tuple(DIMENSIONS)
    """Dimensions to measure; quality, semantic and total score need all of theirs."""
    local: bool = False
    """Take weights only from the package's cache (its option load_ckpt_from_local)."""

    def __post_init__(self) -> None:
        if not self.python:
            raise ValueError(
                "vbench is measured by its own package in an environment of its own: give `options` "
                f"python=ENVIRONMENT/bin/python of one with vbench {CHECKED}."
            )
        for name in self.dimensions:
            if name not in DIMENSIONS:
                raise ValueError(unknown_name("dimension", name, DIMENSIONS))
        if not self.dimensions or len(set(self.dimensions)) != len(self.dimensions):
            raise ValueError(f"dimensions must name each once and at least one, got {list(self.dimensions)}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class VBenchPlan:
    """The dimensions, prompts and package of a measurement."""

    options: VBenchOptions
    package: Package
    entries: tuple[Entry, ...]

    @property
    def texts(self) -> list[str]:
        """Prompts, each once."""
        return list(dict.fromkeys(entry.prompt for entry in self.entries))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Measures:
    """All dimensions of a subject's videos, and their diagnostics."""

    dimensions: Mapping[str, Measured]
    faults: Faults


def plan_of(settings: Settings) -> VBenchPlan:
    """Reads the options and the prompts."""
    options = options_of(settings, VBenchOptions)
    if settings.judge is not None:
        raise ValueError("vbench is measured by its package and has no judge: leave `judge` out.")
    if settings.samples > VIDEOS:
        raise ValueError(f"`samples` must be 1 to {VIDEOS}: the package reads {VIDEOS} videos of a prompt.")
    package = find_package(options.python)
    entries = read_entries(
        package.prompts if settings.prompts is None else resolve_path(settings.prompts), options.dimensions
    )
    chosen = some(entries, settings.num_prompts)
    lacking = set(options.dimensions) - {name for entry in chosen for name in entry.dimensions}
    if lacking:
        raise ValueError(
            f"`num_prompts` {settings.num_prompts} leaves no prompt for {', '.join(sorted(lacking))}: raise it, or "
            "leave these out of `options` dimensions."
        )
    return VBenchPlan(options=options, package=package, entries=tuple(chosen))


def result(settings: Settings, plan: VBenchPlan, judge: None, parts: Sequence[SubjectVerdicts[Measures]]) -> Result:
    """The published scores of a subject, and of a base if there is one, and the diagnostics of their clips."""
    labels, clips = [part.label for part in parts], [part.images for part in parts]
    measured, faults = [part.found.dimensions for part in parts], [part.found.faults for part in parts]
    found = [_ordered(intervals(part, plan.entries)) for part in measured]
    changes = _ordered(intervals(measured[0], plan.entries, measured[1])) if len(parts) > 1 else {}
    sides = [_side(part, own) for part, own in zip(parts, found, strict=True)]
    first, interval = next(iter(found[0].items()))
    said = (
        f"VBench: {first.replace('_', ' ')} {estimate(interval)} for {labels[0]}, {plural(len(clips[0]), 'video')} of "
        f"{plural(len(plan.entries), 'prompt')}."
    )
    return result_of(
        settings.benchmark, add_changes(said, changes, labels, "nothing"), sides if changes else sides[:1],
        changes=changes,
        tables=(score_table(
            labels, [(name, [part[name] for part in found], changes.get(name)) for name in found[0]],
            note="Quality, semantic and total score are of normalised dimensions; papers print all times 100. Bounds "
            "are of the mean over videos, by prompts.", paired_by="prompts and start noise",
            extra=("normalised", {name: f"{normalise(name, own.score):.4f}" for name, own in measured[0].items()}),
        ),),
        notes=_notes(settings, plan, clips[0], measured[0], faults),
        facts={"vbench": plan.package.version, "prompts": len(plan.entries), "videos": len(clips[0]),
               "seed": settings.seed, "dimensions": list(plan.options.dimensions)},
        sections=(clips_section(settings.subjects, clips, faults, settings.out),),
    )  # fmt: skip


def _side(part: SubjectVerdicts[Measures], found: Mapping[str, Interval]) -> SideResult:
    """Rows and metrics of a subject; only the published sums are drawn, if there are any."""
    rows, faults = [], part.found.faults
    for place, clip in enumerate(part.images):
        key = video_name(clip.prompt, clip.sample)
        values = {name: own.videos[key] for name, own in part.found.dimensions.items() if key in own.videos}
        values |= {name: float(column[place]) for name, column in faults.items()}
        rows.append({"file": clip.file, "prompt": clip.prompt, "sample": clip.sample, "values": values})
    means = {
        name: float(column[column == column].mean()) for name, column in faults.items() if (column == column).any()
    }
    sums = {name: interval for name, interval in found.items() if name in SUMS}
    return SideResult(rows=rows, metrics=means_and_bounds(found) | means, intervals=sums or found)


def existing(settings: Settings, plan: VBenchPlan, folder: Path) -> list[ImageFile]:
    """The videos `<prompt>-<k>.mp4` of a folder, k below the number of samples."""
    listed = [
        ImageFile(file=video_name(text, sample), path=folder / video_name(text, sample), prompt=text, index=index,
                  sample=sample)
        for index, text in enumerate(plan.texts) for sample in range(settings.samples)
    ]  # fmt: skip
    missing = [video.file for video in listed if not video.path.is_file()]
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} of {len(listed)} videos (such as {missing[0]!r}): draw them first, or "
            "lower `samples`, `num_prompts` or `options` dimensions; nothing was measured."
        )
    return listed


def ask(settings: Settings, plan: VBenchPlan, judge: None, subject: Subject, clips: Sequence[ImageFile]) -> Measures:
    """Measures every dimension of a subject; values come from the journal if it measured the same videos."""
    folder = subject.folder / "vbench"
    names = [video_name(clip.prompt, clip.sample) for clip in clips]
    kept = set(names)
    for path in (folder / "videos").iterdir() if (folder / "videos").is_dir() else ():
        if path.name not in kept:  # a link of another prompt, which the package would take for a video
            path.unlink()
    put(clips, folder / "videos", names)
    prompts = folder / "full_info.json"
    write_atomically(prompts, json.dumps([dict(entry.record) for entry in plan.entries], indent=1, ensure_ascii=False))
    stamps = hashlib.sha256("\n".join(clip.stamp for clip in clips).encode() + prompts.read_bytes()).hexdigest()[:16]
    found: dict[str, Measured] = {}
    label = f"vbench of {subject.label}"
    with (
        Journal(subject.folder, {"benchmark": "vbench", "version": plan.package.version}) as journal,
        progress(label, len(plan.options.dimensions)) as advance,
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
    return Measures(dimensions=found, faults=diagnose_clips(subject, clips))


def _ordered(found: Mapping[str, Interval]) -> dict[str, Interval]:
    """The sums first, as the leaderboard has them, the total before its parts."""
    return {name: found[name] for name in (*reversed(SUMS), *DIMENSIONS) if name in found}


def _notes(
    settings: Settings,
    plan: VBenchPlan,
    clips: Sequence[ImageFile],
    measured: Mapping[str, Measured],
    faults: Sequence[Faults],
) -> list[str]:
    notes, count = [], len(plan.options.dimensions)
    lacking = [name for name in SUMS if name not in aggregate(dict.fromkeys(plan.options.dimensions, 0.0))]
    if lacking:
        notes.append(
            f"{count} of {len(DIMENSIONS)} dimensions were measured, so there is no {', '.join(lacking)} score."
        )
    elif count == len(DIMENSIONS) and (len(plan.entries) != PROMPTS or settings.samples != VIDEOS):
        notes.append(
            f"{len(plan.entries)} prompts with {settings.samples} videos each; published numbers are of "
            f"{PROMPTS} with {VIDEOS}: compare with the same ones only."
        )
    if plan.package.version != CHECKED:
        notes.append(f"vbench {plan.package.version} measured this; layout and constants were checked with {CHECKED}.")
    if "temporal_flickering" in measured:
        notes.append(
            "temporal_flickering is of all videos of its prompts; the published protocol draws 25 a prompt and keeps "
            "up to 5 that its static filter passes: compare with published numbers with care."
        )
    for name, part in measured.items():
        own = {entry.prompt for entry in plan.entries if name in entry.dimensions}
        wanted = len({video_name(clip.prompt, clip.sample) for clip in clips if clip.prompt in own})
        if len(part.videos) < wanted:
            notes.append(f"{name}: the package left out {wanted - len(part.videos)} of {wanted} videos.")
    if unread := sum(np.isnan(list(part.values())).all(axis=0).sum() for part in faults):
        notes.append(
            f"{plural(unread, 'clip')} could not be read or had too few frames for flicker, freeze, teleport "
            f"and change, and took no part in their means."
        )
    return [*notes, READ_AS]


RULES: Rules[VBenchPlan, None, Measures] = Rules(
    plan=plan_of,
    prompts=lambda settings, subject, plan: [Prompt(text=text, metadata={"prompt": text}) for text in plan.texts],
    suffix=PLAYED,
    existing=existing,
    judge=lambda settings, plan: None,
    ask=ask,
    result=result,
)
