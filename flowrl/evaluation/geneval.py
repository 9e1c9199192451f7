"""The benchmark GenEval (Ghosh et al. 2023, arXiv 2310.11513): does an image show what its prompt asks for?

`flowrl.benchmarks.geneval.rules` gives verdicts on what a judge of `flowrl.rewards.networks.detectors` finds. Two
different overall numbers are in use: the benchmark's own is the mean of the six task means (macro); Flow-GRPO logs the
mean over images (micro). The result has both, and Flow-GRPO's graded and strict rewards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from typing import Any

import numpy as np
import torch

from flowrl.benchmarks.geneval.metadata import parse_record
from flowrl.benchmarks.geneval.published import CLASSES, published_records
from flowrl.benchmarks.geneval.rules import Detection, graded, keep_detections, strict, verdict
from flowrl.config.train import resolve_path
from flowrl.evaluation.geneval_result import geneval_result
from flowrl.evaluation.runner import Rules
from flowrl.evaluation.summing import option_values
from flowrl.generation.folders import ImageFile
from flowrl.generation.generate import choose, given_images
from flowrl.generation.models import WORLD_MODELS
from flowrl.generation.subject import Settings, Subject
from flowrl.prompts.loading import Prompt, read_prompts
from flowrl.rewards.networks.detectors import Detector, DetectorOptions, detector_options
from flowrl.runtime.files import write_atomically
from flowrl.runtime.journal import Journal, Row
from flowrl.runtime.progress import progress
from flowrl.training.model_files import named_files
from flowrl.world.scenes import SHAPES

WORLD, PUBLISHED = "world", "published"
JUDGE_BATCH = 32
_VERSION = 1  # of the rules and of the rows in the journal


@dataclass(frozen=True, kw_only=True, slots=True)
class GenevalPlan:
    """The prompts, and the judge that knows their objects."""

    prompts: tuple[Prompt, ...]
    options: DetectorOptions


def plan_of(settings: Settings) -> GenevalPlan:
    """Reads prompts and judge."""
    prompts = benchmark_prompts(settings)
    name = judge_name(settings.judge, [prompt.metadata for prompt in prompts])
    return GenevalPlan(prompts=tuple(prompts), options=detector_options(name, option_values(settings)))


def ask(
    settings: Settings, plan: GenevalPlan, judge: Detector, subject: Subject, images: Sequence[ImageFile]
) -> list[Row]:
    """Judges a subject's images; also writes the verdicts in the format that the original summary script reads."""
    rows = judge_images(images, judge, subject, files=named_files(settings.options))
    published = [
        {"filename": row["file"], "tag": row["task"], "prompt": row["prompt"], "correct": row["correct"],
         "reason": row["reason"], "metadata": json.dumps(image.record), "details": json.dumps(row["details"])}
        for row, image in zip(rows, images, strict=True)
    ]  # fmt: skip
    write_atomically(subject.folder / "results.jsonl", "".join(json.dumps(row) + "\n" for row in published))
    return rows


def benchmark_prompts(settings: Settings) -> list[Prompt]:
    """The prompts of existing images, of the named file, or the model's default ones."""
    if settings.subject.images is not None:
        if settings.prompts is not None:
            raise ValueError(f"the images of `images` name their own prompts: leave out `prompts` {settings.prompts}.")
        records = {image.index: image.record for image in given_images(settings, settings.subject.images)}
        return [Prompt(text=record["prompt"], metadata=record) for record in records.values()]
    source = settings.subject.source
    name = settings.prompts or (WORLD if source is not None and source.model in WORLD_MODELS else PUBLISHED)
    if name == PUBLISHED:
        listed = [Prompt(text=record["prompt"], metadata=record) for record in published_records()]
    else:
        listed = read_prompts(resolve_path("asset:prompts/world_heldout.jsonl" if name == WORLD else name))
    return choose(listed, settings.num_prompts)


def judge_name(given: str | None, records: Sequence[Mapping[str, Any]]) -> str:
    """The requested judge, or the one that knows the objects of the records."""
    parsed = [parse_record(record) for record in records]
    objects = {clause.label for record in parsed for clause in (*record.include, *record.exclude)}
    known = {"shapes": set(SHAPES), "mask2former": set(CLASSES), "openmmlab": set(CLASSES)}
    if given is None:
        fitting = [name for name, labels in known.items() if objects <= labels]
        if not fitting:
            strange = sorted(objects - known["mask2former"])
            raise ValueError(
                f"the prompts ask for {', '.join(strange[:5])}, which no judge knows: shapes sees {', '.join(SHAPES)}, "
                f"mask2former and openmmlab the 80 classes of COCO. Give other prompts, or `judge`."
            )
        return fitting[0]
    unseen = sorted(objects - known.get(given, objects))
    if unseen:
        raise ValueError(
            f"`judge` {given} does not know {', '.join(unseen[:5])}, so every such prompt would fail: "
            f"{'mask2former and openmmlab see photos' if given == 'shapes' else 'shapes sees the embedded world'}."
        )
    return given


def judge_images(
    images: Sequence[ImageFile], judge: Detector, subject: Subject, *, files: Mapping[str, str] | None = None
) -> list[Row]:
    """Judges images, one row per image in order; answers of earlier runs come from the journal. `files` are digests of
    the files that the judge's options name."""
    identity = {"benchmark": "geneval", "version": _VERSION, "judge": judge.version} | (
        {"files": files} if files else {}
    )
    with Journal(subject.folder, identity) as journal:
        keys = [image.key_with(json.dumps(image.record, sort_keys=True)) for image in images]
        missing = [(key, image) for key, image in zip(keys, images, strict=True) if key not in journal.rows]
        batches = [missing[first : first + JUDGE_BATCH] for first in range(0, len(missing), JUDGE_BATCH)]
        total = -(-len(images) // JUDGE_BATCH)
        with progress(f"judging {subject.label}", total, total - len(batches)) as advance:
            for batch in batches:
                pixels = [image.pixels() for _, image in batch]
                order = sorted(range(len(batch)), key=lambda place: pixels[place].shape)
                for _, group in groupby(order, key=lambda place: pixels[place].shape):  # all of one size together
                    places = list(group)
                    found = judge.detect(np.stack([pixels[place] for place in places]))
                    for place, detections in zip(places, found, strict=True):
                        key, image = batch[place]
                        journal.add(key, row_of(image, detections, partial(judge.color_of, pixels[place])))
                advance("")
        return [journal.rows[key] for key in keys]


def row_of(image: ImageFile, detections: Sequence[Detection], color_of: Any) -> Row:
    """Applies the rules to what a judge found in one image; `details` holds the kept detections as in the published
    result file: class -> [x1, y1, x2, y2, score]."""
    record, color = image.record, cache(color_of)  # three rules ask for the colours of the same objects
    official = verdict(detections, record, color)
    kept = keep_detections(detections, record["tag"])
    return {
        "file": image.file, "index": image.index, "sample": image.sample, "task": record["tag"],
        "prompt": image.prompt, "correct": official.correct, "reason": official.reason,
        "graded": graded(detections, record, color), "strict": strict(detections, record, color),
        "details": {label: [[*map(float, d.box), d.score] for d in objects] for label, objects in kept.items()},
    }  # fmt: skip


RULES: Rules[GenevalPlan, Detector, list[Row]] = Rules(
    plan=plan_of,
    prompts=lambda settings, subject, plan: plan.prompts,
    judge=lambda settings, plan: plan.options.build(torch.device(settings.device)),
    ask=ask,
    result=geneval_result,
)
