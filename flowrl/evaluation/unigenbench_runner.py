"""The benchmark UniGenBench: 600 prompts, four images each, and a judge that scores each test point of each image.

    flowrl eval MODEL --benchmark unigenbench --prompts test_prompts_en.csv --judge vllm
    flowrl eval --images FOLDER ...          images {index}_{sample}.png, or in GenEval's layout with these prompts

The prompt files are not shipped, see `flowrl.benchmarks.unigenbench.items`. Judges by name are in `JUDGES`, others
are given as a mapping. Judges are asked in the published words. **Numbers of another judge than Gemini-2.5-Pro, or in
other words, are not leaderboard numbers**; see `flowrl.evaluation.unigenbench_judge` and docs/unigenbench.md.

In the subject's folder: `<track>/{index}_{sample}.png`, the journal of all replies, and `results/<label>_<track>.csv`
and `.json` in the published format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from flowrl.benchmarks.unigenbench.items import EnVariant, Item, PromptFile, read_prompt_file
from flowrl.benchmarks.unigenbench.point_scores import aggregate
from flowrl.benchmarks.unigenbench.result_files import Judged, results_text, score_rows, summary_text
from flowrl.config.train import resolve_path
from flowrl.evaluation.benchmark import Result
from flowrl.evaluation.named_judges import read_judge, weights_of
from flowrl.evaluation.runner_parts import options_of
from flowrl.evaluation.unigenbench_estimate import estimate_of
from flowrl.evaluation.unigenbench_judge import Asking, Wording, ask_images, read_wording, reply_of
from flowrl.evaluation.unigenbench_result import Judging, result_of
from flowrl.generation.folders import ImageFile, is_folder_of_images, read_folder
from flowrl.generation.generate import images_of, some
from flowrl.generation.journal import Journal, Row
from flowrl.generation.layouts import numbered_name, put, read_numbered
from flowrl.generation.subject import Settings, Subject
from flowrl.prompts.loading import Prompt
from flowrl.rewards.judges.chat import Chat, build_chat, identity_of
from flowrl.runtime.files import write_atomically

JUDGES: dict[str, dict[str, Any]] = {
    "offline": {
        "model": "CodeGoat24/UniGenBench-EvalModel-qwen3vl-32b-v1", "dtype": "bfloat16", "batch_size": 4,
    },
    "vllm": {
        "server": "http://127.0.0.1:8080/v1", "model": "QwenVL", "image_format": "jpeg95", "timeout": 200.0,
        "deadline": 600.0, "concurrency": 20,
    },
    "gemini": {
        "server": "https://generativelanguage.googleapis.com/v1beta/openai", "model": "gemini-2.5-pro",
        "api_key_env": "GEMINI_API_KEY", "timeout": 200.0, "deadline": 600.0, "concurrency": 20, "image_format": "png",
    },
}  # fmt: skip
"""`offline`: the benchmark's 32B judge in this process, in about 64 GB; `vllm`: the same, or the 72B one, behind a
server that offers it as QwenVL; `gemini`: the published judge, whose answers cost money."""

_VERSION = 1  # of questions and rows in the journal


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What `--option` sets."""

    en_variant: EnVariant = "head"
    """Which version of the English file is meant, see `flowrl.benchmarks.unigenbench.items`."""
    template: str | None = None
    """Text file with the question instead of the published one, or `own`."""
    definitions: str | None = None
    """JSON file {test point: what it means} instead of the published ones, or `own`."""
    attempts: int = 11
    """Tries per image whose answer cannot be read."""
    max_tokens: int = 4096
    """Length of an answer."""
    temperature: float = 0.0
    """Of the first try; 0 is greedy."""
    dry_run: bool = False
    """Estimate calls, tokens and time; draw and ask nothing."""

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.max_tokens < 1:
            raise ValueError(f"attempts and max_tokens must be at least 1, got {self.attempts} and {self.max_tokens}.")
        if not 0 <= self.temperature <= 10:
            raise ValueError(f"temperature must be 0 (greedy) to 10, got {self.temperature:g}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything that is known before a model or a judge is loaded."""

    file: PromptFile
    items: tuple[Item, ...]
    judge: dict[str, Any]
    wording: Wording
    asking: Asking
    dry_run: bool

    @property
    def identity(self) -> dict[str, Any]:
        """What an answer depends on besides the image and the item."""
        return {
            "benchmark": "unigenbench", "version": _VERSION, "judge": identity_of(self.judge),
            "wording": self.wording.digest, "attempts": self.asking.attempts, "max_tokens": self.asking.max_tokens,
            "temperature": self.asking.temperature, "seed": self.asking.seed,
        }  # fmt: skip


def check(settings: Settings) -> None:
    """Refuses what can be known to be wrong before weights load.

    Raises:
        ValueError: no prompt file or a bad one, an unknown option or judge, a template that lacks a field, or images
            that are missing from a folder.
    """
    plan = plan_of(settings)
    for subject in settings.subjects:
        if subject.images is not None:
            existing(subject.images, plan.items, settings.samples)


def run(settings: Settings) -> Result:
    """Draws or reads the images of subject and base, has them judged, and sums up; see `flowrl.commands.eval`.

    With the option dry_run nothing is drawn or asked, and the result is an estimate of calls, tokens and time.
    """
    plan = plan_of(settings)
    if plan.dry_run:
        return estimate_of(settings, plan.items, plan.file, plan.judge, plan.wording, plan.identity, plan.asking)
    # All images of all subjects must be there before the first question costs anything.
    images = [images_for(settings, subject, plan) for subject in settings.subjects]
    chat = build_chat(plan.judge, device=torch.device(settings.device), owner="unigenbench, --judge")
    judgings = []
    for subject, of_subject in zip(settings.subjects, images, strict=True):
        judgings.append(judged(subject, of_subject, plan, chat, show=settings.show))
    return result_of(
        settings, plan.file, judgings, judge=chat.version, model=str(plan.judge["model"]),
        own_words=plan.wording.own, whole=len(plan.items) == len(plan.file.items), asking=plan.asking,
        digest=plan.wording.digest,
    )  # fmt: skip


def plan_of(settings: Settings) -> Plan:
    """Reads prompt file, judge, template and options.

    Raises:
        ValueError: see `check`.
    """
    options = options_of(settings, Options)
    if settings.prompts is None:
        raise ValueError(
            "unigenbench needs --prompts FILE.csv: take data/test_prompts_en.csv (or _en_long, _zh, _zh_long) from the "
            "repository CodeGoat24/UniGenBench; the files are not shipped."
        )
    file = read_prompt_file(resolve_path(settings.prompts), en_variant=options.en_variant)
    judge = read_judge(settings.judge, JUDGES, owner="unigenbench")
    # As the published code asks: Gemini is shown the text first, judges behind vLLM the image.
    image_last = str(judge["model"]).startswith("gemini")
    return Plan(
        file=file, items=tuple(some(file.items, settings.num_prompts)), judge=judge,
        wording=read_wording(file.language, options.template, options.definitions, image_last=image_last),
        asking=Asking(
            attempts=options.attempts, max_tokens=options.max_tokens, temperature=options.temperature,
            seed=settings.seed,
        ),
        dry_run=options.dry_run,
    )  # fmt: skip


def existing(folder: Path, items: Sequence[Item], samples: int) -> list[ImageFile]:
    """The images of items in a folder that exists, named {index}_{sample}.png or laid out as GenEval does.

    Raises:
        ValueError: an image is missing.
    """
    if not is_folder_of_images(folder):
        return read_numbered(folder, {item.index: item.prompt for item in items}, samples)
    by_text: dict[str, list[ImageFile]] = {}
    for image in read_folder(folder):
        by_text.setdefault(image.prompt, []).append(image)
    found = []
    for item in items:
        images = by_text.get(item.prompt, [])[:samples]
        if len(images) < samples:
            raise ValueError(
                f"{folder} has {len(images)} images of prompt {item.index} ({item.prompt[:60]!r}), {samples} are "
                f"needed: draw them all first, or lower --samples or --num-prompts; nothing was judged."
            )
        found += [replace(image, index=item.index, sample=sample) for sample, image in enumerate(images)]
    return found


def images_for(settings: Settings, subject: Subject, plan: Plan) -> list[ImageFile]:
    """All images of a subject in the order of items and samples; drawn ones are put under the published names."""
    if subject.images is not None:
        return existing(subject.images, plan.items, settings.samples)
    prompts = [Prompt(text=item.prompt, metadata={"index": item.index}) for item in plan.items]
    drawn = images_of(settings, subject, prompts)
    keys = [(item.index, sample) for item in plan.items for sample in range(settings.samples)]
    folder = subject.folder / plan.file.track
    put(drawn, folder, (numbered_name(*key) for key in keys))
    return read_numbered(folder, {item.index: item.prompt for item in plan.items}, settings.samples)


def judged(subject: Subject, images: Sequence[ImageFile], plan: Plan, chat: Chat, *, show: bool = True) -> Judging:
    """Asks about every image and writes the result files in the published format."""
    by_index = {item.index: item for item in plan.items}
    work = [(image, by_index[image.index]) for image in images]
    with Journal(subject.folder, plan.identity | weights_of(plan.judge, chat.version)) as journal:
        answers = ask_images(chat, plan.wording, work, journal, plan.asking, label=subject.label, show=show)
    rows = [_judged(image, item, row) for (image, item), row in zip(work, answers, strict=True)]
    scores = aggregate(score_rows(rows))
    folder = subject.folder / "results"
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{subject.label}_{plan.file.track}".replace("/", "-")
    write_atomically(folder / f"{name}.csv", results_text(rows))
    write_atomically(folder / f"{name}.json", summary_text(scores))
    return Judging(label=subject.label, images=tuple(images), rows=tuple(rows), answers=tuple(answers))


def _judged(image: ImageFile, item: Item, row: Row) -> Judged:
    return Judged(
        index=item.index, prompt=item.prompt, points=item.points, output=row["output"], reply=reply_of(row, item),
        image=str(image.path),
    )  # fmt: skip
