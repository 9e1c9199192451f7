"""Measures models, or folders of images, on a benchmark: `flowrl.evaluate`, `flowrl eval`.

Call it again to resume where it stopped. One model gets `OUT/model` and, with a baseline, `OUT/base`. Several models
are evaluated one after another in `OUT/<name>` and summed up with an interval over trainings.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from PIL import Image

from flowrl.config.bounds import check_counts
from flowrl.config.options import unknown_name
from flowrl.config.train import resolve_path
from flowrl.evaluation.benchmark import BENCHMARKS, Benchmark, Result
from flowrl.evaluation.evaluation_result import (
    as_text,
    over_models,
    refuse_foreign_files,
    with_notes,
    write,
    write_result,
)
from flowrl.evaluation.named_judges import judge_text
from flowrl.evaluation.runner import check, run
from flowrl.generation.drawing import find_device
from flowrl.generation.folders import IMAGES, is_folder_of_images, read_folder
from flowrl.generation.models import (
    EMBEDDED,
    EMBEDDED_VIDEO,
    WORLD_MODELS,
    Model,
    Source,
    check_source,
    find_source,
    label_of,
    place_of,
)
from flowrl.generation.sampling_options import SamplingOptions
from flowrl.generation.subject import Settings, Subject
from flowrl.media.lossless import CLIPS
from flowrl.media.reading import read_rgb
from flowrl.rendering.notebook import heading, images_row, rows_table, scores_table
from flowrl.rewards.networks.pretrained import look_for_models
from flowrl.runtime.public import public
from flowrl.runtime.scrubbing import say
from flowrl.statistics.bootstrap import Interval

__all__ = ["Evaluation", "evaluate"]


BASE = "base"
MODEL_FILES = ("model_index.json", "manifest.json", "config.yaml", "config.json", "adapter_config.json")
BATCH, SMALL_BATCH, VIDEO_BATCH = 64, 8, 16
SHOWN = 8  # images in a notebook


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Evaluation:
    """The result of a benchmark.

    Attributes:
        benchmark: its name.
        headline: the result in a sentence or two.
        metrics: `eval/<benchmark>/<metric>` -> number; for several models their mean.
        scores: the main scores with 95 % intervals.
        differences: differences to the baseline, paired by prompts; empty without one.
        claim: what the intervals cover.
        notes: what you need to know to read the numbers.
        rows: one mapping per image, with its prompt and verdict; empty for several models.
        folder: holds `page.html`, `result.json` and the images.
        text: headline, tables and notes for a terminal.
    """

    benchmark: str
    headline: str
    metrics: Mapping[str, float]
    scores: Mapping[str, Interval]
    differences: Mapping[str, Interval]
    claim: str
    notes: tuple[str, ...]
    rows: tuple[Mapping[str, Any], ...] = field(repr=False)
    folder: Path
    text: str = field(repr=False)
    files: tuple[Path, ...] = field(repr=False)
    """The judged images of the model, in order; empty for videos and for several models."""

    @property
    def images(self) -> list[Image.Image]:
        """The images of the model that were judged."""
        return [read_rgb(path) for path in self.files]

    def _repr_html_(self) -> str:
        first = self.files[:SHOWN]
        return (
            heading(self.headline, f"page: {self.folder / 'page.html'}")
            + scores_table(self.scores, self.differences)
            + rows_table(("note",), [(note,) for note in self.notes])
            + images_row([read_rgb(path) for path in first], [path.parent.parent.name for path in first])
        )


@public
def evaluate(
    models: Model | Sequence[Model] = (), benchmark: str = "geneval", *, baseline: Model | None = None,
    images: str | Path | None = None, out: str | Path | None = None, lora: str | Path | None = None,
    prompts: str | Path | None = None, num_prompts: int | None = None, samples: int | None = None,
    judge: str | Mapping[str, Any] | None = None, options: Mapping[str, object] | None = None,
    train_prompts: str | Path | None = None, dry_run: bool = False, seed: int = 0, steps: int | None = None,
    guidance: float | None = None, height: int | None = None, width: int | None = None, dtype: str | None = None,
    max_sequence_length: int | None = None, first_block_cache: float | None = None, batch_size: int | None = None,
    device: str | None = None, show: bool = True, page: Callable[..., str] | None = None,
) -> Evaluation:  # fmt: skip
    """Measures models on a benchmark. Call this again to continue where it stopped.

    Args:
        models: run folder or what `train` returned, LoRA or model folder, hub id or `asset:NAME`; several count as
            trainings of one method. Without any, the benchmark takes the embedded model that fits it.
        benchmark: its name (docs/benchmarks.md).
        baseline: the model to compare with; "base" is the run's model before training.
        images: a folder of images or clips to judge in place of `models`.
        out: folder to write; None is `evaluations/BENCHMARK-MODEL`.
        lora: folder of a LoRA to add.
        prompts: file of prompts, or "published" or "world"; None is the benchmark's.
        num_prompts: how many prompts to take, spread evenly over the file.
        samples: images per prompt; None is the published number.
        judge: a name that the benchmark knows, a mapping, or a YAML file with one.
        options: options of the benchmark, its judge or a reward.
        train_prompts: training prompts to check for overlap; None is the run's.
        dry_run: only estimate what judging would take (unigenbench).
        seed: the seed of every random draw.
        steps, guidance, height, width, dtype, max_sequence_length, first_block_cache: how to sample the models
            (`SamplingOptions`).
        batch_size: images drawn or scored at once.
        device: "cpu", "cuda" or "cuda:N".
        show: show progress.
        page: writes the page of a result.

    Raises:
        FlowrlError: an argument is wrong; most faults are found before weights load.

    >>> flowrl.evaluate(benchmark="genevil", show=False)
    Traceback (most recent call last):
    flowrl.runtime.failures.FlowrlError: `benchmark` genevil: unknown benchmark 'genevil' ... allowed: diversity, ...
    """
    if benchmark not in BENCHMARKS:
        raise ValueError(f"`benchmark` {benchmark}: {unknown_name('benchmark', benchmark, BENCHMARKS)}")
    known = BENCHMARKS[benchmark]
    sampling = SamplingOptions(
        steps=steps,
        guidance=guidance,
        height=height,
        width=width,
        dtype=dtype,
        max_sequence_length=max_sequence_length,
        first_block_cache=first_block_cache,
    )
    check_counts(num_prompts=num_prompts, samples=samples, batch_size=batch_size)
    folder, added = _path(images), _path(lora)
    if folder is not None:
        drawing = {} if baseline is not None else {**dict.fromkeys(sampling.given, True), "batch_size": batch_size}
        given = {"models": models, "lora": lora, **drawing}
        if beside := [f"`{name}`" for name, value in given.items() if value]:
            raise ValueError(
                f"`images` judges images that exist, so {', '.join(beside)} has no place beside it: leave it out."
            )
    named = _named(models, known, folder, added)
    home = _path(out) or Path("evaluations") / f"{benchmark}-{next(iter(named))}"
    plans = []
    for label, model in named.items():
        own = home if len(named) == 1 else home / label
        source = None if model is None else find_source(model, lora=added, sampling=sampling)
        base = _base(baseline, source, label, (own, home), known, sampling)
        plans.append(
            Settings(
                benchmark=benchmark, subject=Subject(label=label, folder=own / "model", source=source, images=folder),
                base=base, out=own, prompts=None if prompts is None else str(prompts), num_prompts=num_prompts,
                samples=samples or _samples(known, folder), seed=seed,
                batch_size=batch_size or _batch_size(known, source, None if base is None else base.source),
                judge=judge_text(judge), options=_texts(options, dry_run=dry_run),
                train_prompts=_train_prompts(train_prompts, source), device=str(find_device(device)),
            )
        )  # fmt: skip
    return _measure(plans, list(named), home, page, dry_run=dry_run)


def _measure(
    plans: Sequence[Settings], labels: list[str], home: Path, page: Callable[..., str] | None, *, dry_run: bool
) -> Evaluation:
    """Refuses known faults, evaluates one model after another, and sums up several."""
    for settings in plans:
        for subject in settings.subjects:
            if subject.source is not None:
                check_source(subject.source, judging="flowrl eval", videos=BENCHMARKS[settings.benchmark].videos)
        drawn = (one.source is not None and not (one.folder / "images").is_dir() for one in settings.subjects)
        fresh = not dry_run and any(drawn)
        with look_for_models() if fresh else nullcontext():
            size = check(settings)
        if fresh:
            say(size, file=sys.stderr)
    for place in dict.fromkeys([home, *(settings.out for settings in plans)]):
        refuse_foreign_files(place, ("result.json", "page.html"), {"benchmark", "headline"})
    results = []
    for settings in plans:
        results.append(with_notes(run(settings), settings))
        write(results[-1], settings, page)
        if len(plans) > 1:
            say(("\n" if len(results) > 1 else "") + as_text(replace(results[-1], tables=())))
    if len(plans) == 1:
        return _evaluation(results[0], plans, home)
    whole = over_models(results, labels)
    write_result(whole, home, plans[0].benchmark, [f"{len(plans)} models"], {}, page)
    return _evaluation(whole, plans, home)


def _texts(options: Mapping[str, object] | None, *, dry_run: bool) -> dict[str, str]:
    return {key: str(value) for key, value in (options or {}).items()} | ({"dry_run": "true"} if dry_run else {})


def _evaluation(whole: Result, plans: Sequence[Settings], home: Path) -> Evaluation:
    subject, of_videos = plans[0].subject, BENCHMARKS[plans[0].benchmark].videos
    folder = subject.images or subject.folder / "images"
    shown = bool(whole.rows) and not of_videos and is_folder_of_images(folder)  # rows are of one model, and judged
    files = read_folder(folder) if shown else []
    return Evaluation(
        benchmark=plans[0].benchmark, headline=whole.headline, metrics=dict(whole.metrics),
        scores=dict(whole.intervals), differences=dict(whole.differences), claim=whole.claim, notes=whole.notes,
        rows=whole.rows, folder=home, text=as_text(whole), files=tuple(image.path for image in files),
    )  # fmt: skip


def _path(given: str | Path | None) -> Path | None:
    return None if given is None else Path(given)


def _named(
    models: Model | Sequence[Model], known: Benchmark, images: Path | None, lora: Path | None
) -> dict[str, str | None]:
    """Models by label; with existing images, their folder's label and None."""
    if images is not None:
        return {_folder_label(images): None}
    if isinstance(models, str) or not isinstance(models, Sequence):
        given = [place_of(models)]
    else:
        given = [place_of(model) for model in models]
    listed = given or [EMBEDDED_VIDEO if known.videos else EMBEDDED]
    labels = [label_of(model, lora) for model in listed]
    if twice := [label for label, count in Counter(labels).items() if count > 1]:
        raise ValueError(f"two of `models` have the name {twice[0]!r}: evaluate each by itself, or rename.")
    return dict(zip(labels, listed, strict=True))


def _folder_label(folder: Path) -> str:
    """The name of a folder of images; for one that this command drew (OUT/model/images), the name of OUT."""
    parts = folder.resolve().parts
    if len(parts) > 3 and parts[-1] == "images" and parts[-2] in ("model", BASE):
        return parts[-3]
    return parts[-1]


def _base(
    given: Model | None,
    own: Source | None,
    label: str,
    homes: tuple[Path, Path],
    known: Benchmark,
    sampling: SamplingOptions,
) -> Subject | None:
    """The base of a comparison; the word `base` means the model that the subject was trained from. `homes` are the
    subject's folder and the one that all subjects share."""
    if given is None:
        return None
    baseline, name = place_of(given), BASE
    images = Path(baseline)
    source: Source | None = None
    if baseline == BASE:
        if own is None or not own.tuned:
            raise ValueError(
                "`baseline` base is the model before training, so it needs `models` with a LoRA: give a run folder, or "
                "as `baseline` the model's own name."
            )
        source = own.before_training()
    elif is_folder_of_images(images) or (  # neither a run, nor a model, nor a LoRA
        known.own_names
        and images.is_dir()
        and not any(images.glob("*.safetensors"))
        and not any((images / file).is_file() for file in MODEL_FILES)
    ):
        name = _folder_label(images)
    else:
        source, name = find_source(baseline, sampling=sampling), label_of(baseline)
    return Subject(
        label=f"{name} (base)" if name == label else name,
        folder=homes[baseline != BASE] / BASE,
        source=source,
        images=images if source is None else None,
    )


def _samples(known: Benchmark, images: Path | None) -> int:
    """Samples per prompt: as many as a folder in GenEval's layout has, or else the benchmark's number."""
    if known.one_image or images is None or not is_folder_of_images(images):
        return known.samples
    listed = read_folder(images, CLIPS if known.videos else IMAGES)
    return sum(image.index == listed[0].index for image in listed)


def _batch_size(known: Benchmark, *given: Source | None) -> int:
    sources = [source for source in given if source is not None]
    if known.videos:
        return VIDEO_BATCH if sources and all(source.model == EMBEDDED_VIDEO for source in sources) else 1
    return BATCH if all(source.model in WORLD_MODELS for source in sources) else SMALL_BATCH


def _train_prompts(given: str | Path | None, source: Source | None) -> Path | None:
    """The given file, or the run's training prompts if the file still exists."""
    if given is not None:
        return resolve_path(str(given))
    if source is None or not source.tuned or source.train_prompts is None:
        return None
    try:
        return resolve_path(source.train_prompts)
    except ValueError:  # a run from another machine: overlap is then not looked for
        return None
