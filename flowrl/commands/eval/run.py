"""`flowrl eval`: from the command line to a benchmark, and from its result to a table, result.json and a page.

The same command resumes where it stopped. One MODEL gets `OUT/model` and, with --baseline, `OUT/base`; several are
evaluated one after the other in `OUT/<name>` and summarised with an interval over trainings.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from flowrl.commands.eval.board.run_board import card, compare
from flowrl.commands.sampling_arguments import SAMPLING, given_flags, sampling_options
from flowrl.config.options import unknown_name
from flowrl.config.train import resolve_path
from flowrl.evaluation.benchmark import BENCHMARKS, OF_ONE_IMAGE, OF_OWN_NAMES, OF_VIDEOS, USUAL_SAMPLES, Result
from flowrl.evaluation.evaluation_result import (
    as_text,
    over_models,
    refuse_foreign_result,
    with_notes,
    write,
    write_result,
)
from flowrl.generation.drawing import find_device
from flowrl.generation.folders import IMAGES, is_folder_of_images, read_folder
from flowrl.generation.models import (
    EMBEDDED,
    EMBEDDED_VIDEO,
    WORLD_MODELS,
    Source,
    check_source,
    find_source,
    label_of,
)
from flowrl.generation.subject import Settings, Subject
from flowrl.media.lossless import CLIPS
from flowrl.rewards import load_target
from flowrl.rewards.networks.looked_for import looked_for
from flowrl.runtime.scrubbing import say as print

BASE = "base"
MODEL_FILES = ("model_index.json", "manifest.json", "config.yaml", "config.json", "adapter_config.json")
SAMPLES, BATCH, SMALL_BATCH, VIDEO_BATCH = 4, 64, 8, 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """What `flowrl eval` found: the result of each model, their means (that of one is its own), and the folder."""

    out: Path
    whole: Result
    plans: tuple[Settings, ...]
    results: tuple[Result, ...]


def run(parsed: argparse.Namespace) -> int:
    """Evaluates, prints the tables, writes result.json and page.html; returns 0.

    Args:
        parsed: the command line.

    Raises:
        ValueError: before weights load for what can be known then.
    """
    if parsed.compare is not None:
        return compare(parsed)
    if parsed.model_card is not None:
        return card(parsed)
    evaluated(parsed)
    return 0


def evaluated(parsed: argparse.Namespace) -> Evaluated:
    """Draws, judges, prints the tables and writes result.json and page.html.

    Raises:
        ValueError: before weights load for what can be known then.
    """
    if parsed.across is not None:
        raise ValueError("--across says what may differ under --compare: give that, or leave --across out.")
    if parsed.benchmark not in BENCHMARKS:
        raise ValueError(f"--benchmark {parsed.benchmark}: {unknown_name('benchmark', parsed.benchmark, BENCHMARKS)}")
    check = load_target(f"{BENCHMARKS[parsed.benchmark]}:check")
    judged = load_target(f"{BENCHMARKS[parsed.benchmark]}:run")
    plans = settings_of(parsed)
    for settings in plans:
        for subject in (settings.subject, settings.base):
            if subject is not None and subject.source is not None:
                check_source(subject.source, judging="flowrl eval", videos=parsed.benchmark in OF_VIDEOS)
        fresh = any(one.source is not None and not (one.folder / "images").is_dir() for one in settings.subjects)
        with looked_for() if fresh and not parsed.dry_run else nullcontext():
            check(settings)
    for out in dict.fromkeys([plans[0].out if len(plans) == 1 else plans[0].out.parent, *(one.out for one in plans)]):
        refuse_foreign_result(out)
    command = shlex.join(["flowrl", *sys.argv[1:]])
    results = []
    for settings in plans:
        result = with_notes(judged(settings), settings)
        write(result, settings, command)
        results.append(result)
        print(("\n" if len(results) > 1 else "") + as_text(result if len(plans) == 1 else replace(result, tables=())))
    if len(plans) > 1:
        out = plans[0].out.parent
        whole = over_models(results, [settings.subject.label for settings in plans])
        write_result(whole, out, parsed.benchmark, [f"{len(plans)} models"], command, {})
        print("\n" + as_text(whole))
        print(f"\nwrote {out / 'page.html'} and result.json")
    else:
        out, whole = plans[0].out, results[0]
        print(f"\nwrote {out / 'page.html'} and result.json")
    return Evaluated(out=out, whole=whole, plans=tuple(plans), results=tuple(results))


def settings_of(parsed: argparse.Namespace) -> list[Settings]:
    """What the benchmark is to do: one `Settings` for every MODEL.

    Raises:
        ValueError: arguments that contradict each other, or models that cannot be told apart.
    """
    if parsed.images is not None:
        given = given_flags(parsed, ["lora"] if parsed.baseline is not None else ["lora", *SAMPLING, "batch_size"])
        if words := ", ".join([*(["MODEL"] if parsed.models else []), *given]):
            raise ValueError(f"--images judges images that exist, so {words} has no place beside it: leave it out.")
    shipped = EMBEDDED_VIDEO if parsed.benchmark in OF_VIDEOS else EMBEDDED
    models = parsed.models or ([shipped] if parsed.images is None else [None])
    labels = _labels(parsed, models)
    out = parsed.out or Path("evaluations") / f"{parsed.benchmark}-{labels[0]}"
    plans = []
    options = _options([*parsed.option, *(["dry_run=true"] if parsed.dry_run else [])])
    for model, label in zip(models, labels, strict=True):
        place = out if len(models) == 1 else out / label
        source = None if model is None else find_source(model, lora=parsed.lora, sampling=sampling_options(parsed))
        subject = Subject(label=label, folder=place / "model", source=source, images=parsed.images)
        base = _base(parsed, source, label, place if parsed.baseline == BASE else out)
        plans.append(
            Settings(
                benchmark=parsed.benchmark, subject=subject, base=base, out=place, prompts=parsed.prompts,
                num_prompts=parsed.num_prompts, samples=_samples(parsed), seed=parsed.seed,
                batch_size=_batch_size(parsed, subject, base), judge=parsed.judge, options=options,
                train_prompts=_train_prompts(parsed, source), device=str(find_device(parsed.device)),
            )
        )  # fmt: skip
    return plans


def _labels(parsed: argparse.Namespace, models: Sequence[str | None]) -> list[str]:
    labels = [_folder_label(parsed.images) if model is None else label_of(model, parsed.lora) for model in models]
    twice = [label for label, count in Counter(labels).items() if count > 1]
    if twice:
        raise ValueError(f"two MODELs have the name {twice[0]!r}: evaluate them with commands of their own, or rename.")
    return labels


def _folder_label(folder: Path) -> str:
    """The name of a folder of images; of one that this command drew, OUT/model/images, that of OUT."""
    parts = folder.resolve().parts
    if len(parts) > 3 and parts[-1] == "images" and parts[-2] in ("model", "base"):
        return parts[-3]
    return parts[-1]


def _base(parsed: argparse.Namespace, own: Source | None, label: str, out: Path) -> Subject | None:
    """What the subject is compared to; the word `base` is the model that the subject was trained from."""
    if parsed.baseline is None:
        return None
    folder = out / "base"
    if parsed.baseline != BASE:
        images = Path(parsed.baseline)
        if is_folder_of_images(images) or (parsed.benchmark in OF_OWN_NAMES and _holds_no_model(images)):
            return Subject(label=_other(_folder_label(images), label), folder=folder, images=images)
        source = find_source(parsed.baseline, sampling=sampling_options(parsed))
        return Subject(label=_other(label_of(parsed.baseline), label), folder=folder, source=source)
    if own is None or not own.tuned:
        raise ValueError(
            "--baseline base is the model before training, so it needs a MODEL with a LoRA: give a run folder as "
            "MODEL, or --baseline with the model's own name."
        )
    return Subject(label=_other(BASE, label), folder=folder, source=own.before_training())


def _holds_no_model(folder: Path) -> bool:
    """Whether a folder is neither a run, nor a model, nor a LoRA."""
    return (
        folder.is_dir()
        and not any((folder / name).is_file() for name in MODEL_FILES)
        and not any(folder.glob("*.safetensors"))
    )


def _other(label: str, taken: str) -> str:
    return f"{label} (base)" if label == taken else label


def _samples(parsed: argparse.Namespace) -> int:
    """As given, else as many as a folder in GenEval's layout has that a benchmark takes, else the benchmark's."""
    if parsed.samples is not None:
        return int(parsed.samples)
    if parsed.benchmark in OF_ONE_IMAGE or parsed.images is None or not is_folder_of_images(parsed.images):
        return USUAL_SAMPLES.get(parsed.benchmark, SAMPLES)
    images = read_folder(parsed.images, CLIPS if parsed.benchmark in OF_VIDEOS else IMAGES)
    return sum(image.index == images[0].index for image in images)


def _batch_size(parsed: argparse.Namespace, *subjects: Subject | None) -> int:
    if parsed.batch_size is not None:
        return int(parsed.batch_size)
    sources = [subject.source for subject in subjects if subject is not None and subject.source is not None]
    if parsed.benchmark in OF_VIDEOS:
        return VIDEO_BATCH if sources and all(source.model == EMBEDDED_VIDEO for source in sources) else 1
    return BATCH if all(source.model in WORLD_MODELS for source in sources) else SMALL_BATCH


def _options(texts: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ValueError(f"--option {text!r} must be KEY=VALUE, such as --option detector=FOLDER.")
        found[key] = value
    return found


def _train_prompts(parsed: argparse.Namespace, source: Source | None) -> Path | None:
    """The file given, or the one that a run was trained on if it is still there."""
    if parsed.train_prompts is not None:
        return resolve_path(parsed.train_prompts)
    if source is None or not source.tuned or source.train_prompts is None:
        return None
    try:
        return resolve_path(source.train_prompts)
    except ValueError:  # a run from another machine: overlap is then not looked for
        return None
