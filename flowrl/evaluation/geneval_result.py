"""Computes numbers and tables from GenEval's verdicts, and chooses examples of failures for the page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.benchmarks.geneval.metadata import TASKS
from flowrl.benchmarks.geneval.published import published_records
from flowrl.config.strict_yaml import read_mapping
from flowrl.evaluation.benchmark import NO_TRAINING, Result, SideResult, result_of
from flowrl.evaluation.runner import SubjectVerdicts
from flowrl.evaluation.summing import Line, add_difference, score_table, trained_on
from flowrl.generation.folders import ImageFile, read_drawn
from flowrl.generation.subject import Settings
from flowrl.prompts.loading import spread
from flowrl.prompts.overlap import Overlap
from flowrl.rendering.embedded_images import image_element
from flowrl.rendering.markup import bounds, esc, number, plural, section
from flowrl.rendering.terminal_text import Table
from flowrl.rewards.networks.detectors import Detector
from flowrl.statistics.bootstrap import Interval
from flowrl.statistics.means import ScoreRow, claim, pooled
from flowrl.statistics.paired import Comparison, Summary, compare, detectable, summarise

Row = Mapping[str, Any]

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
