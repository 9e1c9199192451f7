"""The benchmark GenEval (Ghosh et al. 2023, arXiv 2310.11513): does an image show what its prompt asks for?

`flowrl.benchmarks.geneval.rules` gives verdicts on what a judge of `flowrl.rewards.networks.detectors` finds. Two
different overall numbers are in use: the benchmark's own is the mean of the six task means (macro); Flow-GRPO logs the
mean over images (micro). The result has both, and Flow-GRPO's graded and strict rewards.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowrl.benchmarks.geneval.metadata import TASKS, parse_record
from flowrl.benchmarks.geneval.published import CLASSES, published_records
from flowrl.benchmarks.geneval.rules import Detection, graded, keep_detections, strict, verdict
from flowrl.config.strict_yaml import read_mapping
from flowrl.config.train import resolve_path
from flowrl.evaluation.benchmark import NO_TRAINING, Result, SideResult, result_of
from flowrl.evaluation.runner import Rules, SubjectVerdicts
from flowrl.evaluation.summing import Line, add_difference, option_values, score_table, trained_on
from flowrl.generation.folders import ImageFile, read_drawn
from flowrl.generation.generate import choose, given_images
from flowrl.generation.models import WORLD_MODELS
from flowrl.generation.subject import Settings, Subject
from flowrl.prompts.loading import Prompt, read_prompts, spread
from flowrl.prompts.overlap import Overlap
from flowrl.rendering.embedded_images import image_element
from flowrl.rendering.markup import bounds, esc, number, plural, section
from flowrl.rendering.terminal_text import Table
from flowrl.rewards.networks.detectors import Detector, DetectorOptions, detector_options
from flowrl.runtime.files import write_atomically
from flowrl.runtime.journal import Journal, Row
from flowrl.runtime.progress import progress
from flowrl.statistics.bootstrap import Interval
from flowrl.statistics.means import ScoreRow, claim, pooled
from flowrl.statistics.paired import Comparison, Summary, compare, detectable, summarise
from flowrl.training.model_files import named_files
from flowrl.world.scenes import SHAPES

REASONS: dict[str, str] = read_mapping(Path(__file__).with_name("geneval_reasons.yaml"))
"""Kind of failure -> pattern of the lines of a reason with this kind (GenEval's wording)."""

EXAMPLES = 6


def geneval_result(
    settings: Settings, plan: Any, judge: Detector, parts: Sequence[SubjectVerdicts[list[dict[str, Any]]]]
) -> Result:
    """The result of a subject, and of a base if there is one."""
    rows, names = [part.found for part in parts], [part.label for part in parts]
    summaries = [summarise(score_rows(part), order=TASKS) for part in rows]
    change = compare(score_rows(rows[1]), score_rows(rows[0]), order=TASKS) if len(rows) > 1 else None
    samples = len(rows[0]) / len({row["index"] for row in rows[0]})
    shared = trained_on(settings, (row["prompt"] for row in rows[0]))
    facts: dict[str, Any] = {}
    if change is not None:
        facts |= {"gained": change.gained, "lost": change.lost, "pairs": change.pairs}
    if shared is not None:
        facts["overlap"] = {"exact": shared.exact, "swapped": shared.swapped}
    spoken = claim(score_rows(rows[0]))
    prompts = len({row["prompt"] for row in rows[0]})
    macro = summaries[0].macro
    said = (
        f"GenEval overall {number(macro.mean)} (macro, 95 % {bounds(macro)}) for {names[0]}: "
        f"{plural(len(rows[0]), 'image')} of {plural(prompts, 'prompt')}."
    )
    return result_of(
        settings.benchmark, said if change is None else add_difference(said, change.macro, names[1]),
        [SideResult(rows=own, metrics=metrics(own, summary, samples), intervals=_intervals(summary))
         for own, summary in zip(rows, summaries, strict=True)],
        changes={} if change is None else _intervals(change), claim=spoken + NO_TRAINING,
        notes=_notes(settings, plan, judge, shared, spoken, samples),
        tables=(_scores(rows, names, summaries, change, samples), _failures(rows)),
        facts={
            "judge": judge.version, "prompts": prompts, "samples": samples, "seed": settings.seed,
            "seconds": {part.label: dict(part.seconds) for part in parts},
            "detectable_difference": _detectable(summaries[0], change),
            **facts,
        },
        sections=(failure_examples(rows[0], parts[0].images),),
    )  # fmt: skip


def _notes(
    settings: Settings, plan: Any, judge: Detector, shared: Overlap | None, spoken: str, samples: float
) -> list[str]:
    notes = [*judge.remarks]
    published = {record["prompt"] for record in published_records()}
    if samples != 4 or {prompt.text for prompt in plan.prompts} != published:
        notes.append("Not the benchmark's 553 prompts with 4 images each: compare only with the same prompts.")
    drawn = [read_drawn(subject.images or subject.folder / "images") for subject in settings.subjects]
    seeds = {None if note is None else note.get("seed") for note in drawn}  # images of other programs have none
    if len(drawn) > 1 and (len(seeds) > 1 or None in seeds):
        notes.append("The images share no known start noise: pairs share their prompts only.")
    if shared:
        found = {"word for word": shared.exact, "with the objects swapped": shared.swapped}
        how = ", ".join(f"{len(texts)} {words}" for words, texts in found.items() if texts)
        both = shared.exact + shared.swapped
        notes.append(
            f"{len(both)} of {shared.total} prompts were trained on ({how}), such as {both[0]!r}: this is not a score "
            f"of unseen prompts alone."
        )
    if spoken != "prompts of this kind":
        notes.append(f"Intervals cover {spoken}.")
    return notes


def score_rows(rows: Sequence[Row], key: str = "correct") -> list[ScoreRow]:
    """Rows for the statistics. Images of one text are numbered in order across folders, because folders made row by row
    hold a prompt several times with one image each."""
    seen: Counter[tuple[str, str]] = Counter()
    found = []
    for row in rows:
        prompt = (row["task"], row["prompt"])
        found.append(ScoreRow(task=row["task"], prompt=row["prompt"], sample=seen[prompt], value=float(row[key])))
        seen[prompt] += 1
    return found


def metrics(rows: Sequence[Row], summary: Summary, samples: float) -> dict[str, float]:
    """Numbers by name; `score` is the benchmark's own overall, as in the evaluations of a training run."""
    return {
        "score": summary.macro.mean,
        "score_low": summary.macro.low,
        "score_high": summary.macro.high,
        "micro": summary.micro.mean,
        f"pass_at_{samples:g}": summary.any_correct.mean,
        "graded": pooled(score_rows(rows, "graded")).mean,
        "strict": pooled(score_rows(rows, "strict")).mean,
        **{task: interval.mean for task, interval in summary.tasks.items()},
    }


def kinds(reason: str) -> list[str]:
    """The kinds of failure that a reason names, one per line."""
    lines = reason.splitlines()
    return [next((kind for kind, pattern in REASONS.items() if re.fullmatch(pattern, line)), "other") for line in lines]


def _intervals(summary: Summary | Comparison) -> dict[str, Interval]:
    return {**summary.tasks, "overall (macro)": summary.macro, "overall (micro)": summary.micro}


def _scores(
    rows: Sequence[Sequence[Row]],
    names: Sequence[str],
    summaries: Sequence[Summary],
    change: Comparison | None,
    samples: float,
) -> Table:
    """Table of tasks, both overall numbers, pass@samples and the rewards; with a base, also its and the changes."""
    sides: list[Summary | Comparison] = [*summaries, *([change] if change is not None else [])]
    listed = [
        {
            **part.tasks,
            "overall, macro": part.macro,
            "overall, micro": part.micro,
            f"pass@{samples:g}": part.any_correct,
        }
        for part in sides
    ]
    lines: list[Line] = [
        (name, [part[name] for part in listed[: len(names)]], listed[-1][name] if change is not None else None)
        for name in listed[0]
    ]
    for key in ("graded", "strict"):
        scored = [score_rows(part, key) for part in rows]
        difference = pooled(scored[0], base=scored[1]) if change is not None else None
        lines.append((f"{key} reward", [pooled(part) for part in scored], difference))
    note = (
        "macro: mean of the task means, the benchmark's own; micro: mean over images, as Flow-GRPO logs it; pass@n: "
        "prompts with at least one right image; graded and strict: Flow-GRPO's rewards, means over images."
    )
    limit = _detectable(summaries[0], change)
    if change is not None:
        note += f" Of {plural(change.pairs, 'pair')} {change.gained} became right and {change.lost} wrong."
    if limit > 1:
        note += " With so few images no difference can be relied on to be found: take more prompts."
    elif limit > 0 and change is None:
        note += f" Another model must differ by about {number(limit)} (macro) to be told apart."
    elif limit > 0:
        note += f" A change of about {number(limit)} (macro) is found in 4 of 5 such comparisons."
    return score_table(names, lines, note=note, digits=3)


def _detectable(summary: Summary, change: Comparison | None) -> float:
    return detectable((change or summary).macro, paired=change is not None)


def _failures(rows: Sequence[Sequence[Row]]) -> Table:
    """Counts the images that fail for each kind of reason; an image may fail for several."""
    counts = [Counter(kind for row in part for kind in set(kinds(row["reason"]))) for part in rows]
    order = [kind for kind in (*REASONS, "other") if any(count[kind] for count in counts)]
    columns = list(zip(counts, rows, strict=True))[::-1]  # base first
    body = [
        (kind, *(f"{count[kind]} ({100 * count[kind] / len(part):.0f} %)" for count, part in columns)) for kind in order
    ]
    head = ("", "images") if len(rows) == 1 else ("", "base", "model")
    note = "An image can fail for several reasons, and colour and position are judged only where the objects are there."
    return Table(title="Why images fail", head=head, rows=tuple(body), note=note if body else "None failed.")


def failure_examples(rows: Sequence[Row], images: Sequence[ImageFile]) -> str:
    """For each kind of failure, images spread evenly over those with it, with prompt and full reason."""
    body = ""
    for kind in (*REASONS, "other"):
        failed = [place for place, row in enumerate(rows) if kind in kinds(row["reason"])]
        figures = ""
        for place in (failed[k] for k in spread(len(failed), EXAMPLES)):
            row, image = rows[place], images[place]
            if element := image_element(image.path, row["prompt"]):
                reason = "<br>".join(esc(line) for line in row["reason"].splitlines())
                figures += (
                    f"<figure>{element}<figcaption><b>{esc(row['prompt'])}</b><br>"
                    f"{reason}<br><small>{esc(image.file)}</small></figcaption></figure>"
                )
        if figures:
            body += (
                f"<h3>{esc(kind)} <span>{plural(len(failed), 'image')}</span></h3><div class='fails'>{figures}</div>"
            )
    lead = "For every kind of reason: images spread evenly over all that failed for it, none picked by its look."
    return section("failures", "What went wrong", body, lead)


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
