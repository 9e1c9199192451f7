"""Benchmarks in which a judge reads each image: draw (with source images), ask, read, sum up; one runner for all.

    flowrl eval MODEL --benchmark gedit_en --prompts GEdit-Bench --judge JUDGE
    flowrl eval MODEL --benchmark imgedit --prompts ImgEdit/Benchmark/Basic/basic_edit.json --judge JUDGE
    flowrl eval MODEL --benchmark geneval2 --prompts geneval2_data.jsonl --judge JUDGE
    flowrl eval --images FOLDER ...          images under the names that the benchmark's own scripts look for

Without a judge images are drawn and put under the published names, and nothing is asked. Rules are data in `PROTOCOLS`.
In the subject's folder: images and result files under the published names, and the journal of all replies.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from flowrl.benchmarks.judged.cases import Case, CaseFile, Judgement, Protocol
from flowrl.benchmarks.judged.protocols import PROTOCOLS
from flowrl.config.train import resolve_path
from flowrl.evaluation.benchmark import Result
from flowrl.evaluation.judged.judged_questions import Asking, WordsOf, ask_cases, find_words
from flowrl.evaluation.judged.judged_result import Judged, result_of
from flowrl.evaluation.named_judges import read_judge, weights_of
from flowrl.evaluation.runner_parts import options_of
from flowrl.generation.folders import ImageFile, is_folder_of_images, read_folder
from flowrl.generation.generate import images_of, some
from flowrl.generation.journal import Journal
from flowrl.generation.layouts import put
from flowrl.generation.subject import Settings, Subject
from flowrl.prompts.datasets import is_dataset
from flowrl.prompts.loading import Prompt
from flowrl.rendering.markup import plural
from flowrl.rewards.judges.chat import build_chat, identity_of
from flowrl.runtime.files import replacing, write_atomically

SOURCES = "sources"
"""In the command's folder: source images that a dataset holds."""
_VERSION = 1  # of questions and rows in the journal


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What `--option` sets."""

    template_dir: str | None = None
    """Folder with the judge's words: the user's copy of the benchmark's repository, or NAME.txt for some of them."""
    images_dir: str | None = None
    """Folder of source images, for benchmarks that keep them apart from the list of edits."""
    attempts: int = 3
    """Tries per question whose answer cannot be read."""
    max_tokens: int | None = None
    """Length of a reply; None takes the benchmark's."""
    temperature: float = 0.0
    """Of the first try; 0 is greedy."""

    def __post_init__(self) -> None:
        if self.attempts < 1 or (self.max_tokens is not None and self.max_tokens < 1):
            raise ValueError(f"attempts and max_tokens must be at least 1, got {self.attempts} and {self.max_tokens}.")
        if not 0 <= self.temperature <= 10:
            raise ValueError(f"temperature must be 0 (greedy) to 10, got {self.temperature:g}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything that is known before a model or a judge is loaded; `judge` is None where none is asked."""

    protocol: Protocol
    file: CaseFile
    cases: tuple[Case, ...]
    judge: dict[str, Any] | None
    words: WordsOf
    asking: Asking

    def identity(self, version: str) -> dict[str, Any]:
        """What an answer depends on besides the image and the question.

        A judge in this process is known by its version, with its weights, as a folder may come to hold others.
        """
        assert self.judge is not None
        return {
            "benchmark": self.protocol.title, "version": _VERSION, "judge": identity_of(self.judge),
            "attempts": self.asking.tries.attempts, "temperature": self.asking.tries.temperature,
            "max_tokens": self.asking.max_tokens, "seed": self.asking.seed, **weights_of(self.judge, version),
        }  # fmt: skip


def check(settings: Settings) -> None:
    """Refuses what can be known to be wrong before weights load.

    Raises:
        ValueError: no prompts or bad ones, an unknown option or judge, words or images that are missing.
    """
    plan = plan_of(settings)
    for subject in settings.subjects:
        if subject.images is not None:
            existing(subject.images, plan)


def run(settings: Settings) -> Result:
    """Draws or reads the images of subject and base, has them judged, and sums up; see `flowrl.commands.eval`."""
    plan = plan_of(settings)
    if plan.file.keep_sources:
        plan = replace(plan, cases=with_sources(plan.cases, settings.out / SOURCES))
    # All images of all subjects must be there before the first question costs anything.
    images = [images_for(settings, subject, plan) for subject in settings.subjects]
    if plan.judge is None:
        folder = str(settings.subject.folder / plan.protocol.folder)
        return Result(
            headline=f"{plan.protocol.title}: {plural(len(plan.cases), 'image')} in {folder}; no judge was named.",
            rows=(), metrics={}, tables=(),
            notes=("The benchmark's own scripts take this folder; or give --judge.",), facts={"folder": folder},
        )  # fmt: skip
    chat = build_chat(plan.judge, device=torch.device(settings.device), owner=f"{settings.benchmark}, --judge")
    judged = []
    for subject, of_subject in zip(settings.subjects, images, strict=True):
        with Journal(subject.folder, plan.identity(chat.version)) as journal:
            judgements, rows = ask_cases(
                chat, plan.protocol, plan.cases, of_subject, plan.words, plan.asking, journal, label=subject.label,
                show=settings.show,
            )  # fmt: skip
        _write_files(subject, plan, judgements)
        judged.append(Judged(label=subject.label, images=of_subject, judgements=judgements, answers=rows))
    return result_of(settings, plan.protocol, judged, judge=chat.version, model=str(plan.judge["model"]),
                     notes=plan.file.notes, published=plan.file.number or plan.protocol.number,
                     words=plan.words.origin, digest=plan.words.digest,
                     asking=plan.asking)  # fmt: skip


def plan_of(settings: Settings) -> Plan:
    """Reads cases, judge, words and options.

    Raises:
        ValueError: see `check`.
    """
    options, protocol = options_of(settings, Options), PROTOCOLS[settings.benchmark]
    if settings.prompts is None:
        raise ValueError(f"{settings.benchmark} needs --prompts: {protocol.where}; its data are not shipped.")
    if settings.samples != 1:
        raise ValueError(f"{settings.benchmark} judges 1 image of each prompt, got --samples {settings.samples}.")
    if options.images_dir is not None and not protocol.images_dir:
        raise ValueError(f"--option images_dir: {settings.benchmark} has no source images apart from its prompts.")
    given = settings.prompts if is_dataset(settings.prompts) else str(resolve_path(settings.prompts))
    file = protocol.read(given, _folder("images_dir", options.images_dir))
    judge = None if settings.judge is None else read_judge(settings.judge, {}, owner=settings.benchmark)
    beside: list[Path] = (
        [] if is_dataset(given) else [*([Path(given)] if Path(given).is_dir() else []), *Path(given).parents[:2]]
    )
    cases = tuple(some(file.cases, settings.num_prompts))
    names = {} if judge is None else {ask.words: ask for case in cases for ask in case.asks}
    words = find_words(protocol, names.values(), _folder("template_dir", options.template_dir), beside)
    asking = Asking.of(attempts=options.attempts, temperature=options.temperature, seed=settings.seed,
                       max_tokens=options.max_tokens or protocol.max_tokens)  # fmt: skip
    return Plan(protocol=protocol, file=file, cases=cases, judge=judge, words=words, asking=asking)


def _folder(name: str, given: str | None) -> Path | None:
    if given is None:
        return None
    path = Path(given).expanduser()
    if not path.is_dir():
        raise ValueError(f"--option {name}: there is no folder {path}.")
    return path


def existing(folder: Path, plan: Plan) -> list[ImageFile]:
    """The images of cases in a folder that exists, under the published names or as this command laid them out.

    Raises:
        ValueError: an image is missing.
    """
    names = [plan.protocol.image_name(case) for case in plan.cases]
    by_key: dict[str, ImageFile] = {}
    if is_folder_of_images(folder):
        by_key = {str(image.record.get("key", image.prompt)): image for image in reversed(read_folder(folder))}
    found, missing = [], []
    for index, (case, name) in enumerate(zip(plan.cases, names, strict=True)):
        image = by_key.get(case.key)
        if image is not None:
            found.append(replace(image, index=index, prompt=case.prompt, sample=0))
        elif (folder / name).is_file():
            found.append(ImageFile(file=name, path=folder / name, prompt=case.prompt, index=index))
        else:
            missing.append(name)
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} of {len(names)} images ({', '.join(missing[:3])}): draw them all first, or "
            f"lower --num-prompts; nothing was judged."
        )
    return found


def images_for(settings: Settings, subject: Subject, plan: Plan) -> list[ImageFile]:
    """The image of every case, in their order; drawn ones are put under the published names."""
    if subject.images is not None:
        return existing(subject.images, plan)
    prompts = [_prompt(case) for case in plan.cases]
    drawn = images_of(settings, subject, prompts)
    protocol, folder = plan.protocol, subject.folder / plan.protocol.folder
    put(drawn, folder, [protocol.image_name(case) for case in plan.cases])
    if protocol.source_name is not None:
        for case in plan.cases:
            assert case.source is not None
            _copy(case.source, folder / protocol.source_name(case))
    return drawn


def _prompt(case: Case) -> Prompt:
    metadata = {"key": case.key, "task": case.task}
    if case.source is None:
        return Prompt(text=case.prompt, metadata=metadata)
    return Prompt(text=case.prompt, metadata=metadata, sources=(str(case.source),), source_names=(case.source.name,))


def with_sources(cases: Sequence[Case], folder: Path) -> tuple[Case, ...]:
    """The cases with their source images in a folder that stays."""
    kept = []
    for case in cases:
        assert case.source is not None
        path = (folder / f"{case.key}{case.source.suffix}").resolve()
        _copy(case.source, path)
        kept.append(replace(case, source=path))
    return tuple(kept)


def _copy(source: Path, path: Path) -> None:
    """Leaves a copy of this content, one that was cut short or is of other data is replaced."""
    if path.suffix == source.suffix:
        content = source.read_bytes()
    else:
        stream = io.BytesIO()
        pixels = ImageFile(file=source.name, path=source, prompt="", index=0).pixels()
        Image.fromarray(pixels).save(stream, format="PNG")
        content = stream.getvalue()
    if not path.is_file() or path.read_bytes() != content:
        with replacing(path) as file:
            file.write(content)


def _write_files(subject: Subject, plan: Plan, judgements: Sequence[Judgement]) -> None:
    for name, text in plan.protocol.files(judgements, subject.folder.name).items():
        path = subject.folder / plan.protocol.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
