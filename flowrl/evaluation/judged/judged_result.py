"""Computes a benchmark's numbers with intervals, tables and examples from a judge's answers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from flowrl.benchmarks.judged.cases import Judgement, Protocol, Score
from flowrl.evaluation.benchmark import NO_TRAINING, Result, SideResult, result_of
from flowrl.evaluation.runner import SubjectVerdicts
from flowrl.evaluation.summing import Line, add_difference, costs_of, errors_of, score_table, skip_notes, training_notes
from flowrl.generation.subject import Settings
from flowrl.prompts.loading import Prompt, spread
from flowrl.prompts.overlap import request
from flowrl.rendering.embedded_images import image_element
from flowrl.rendering.markup import bounds, esc, number, plural, section
from flowrl.rewards.judges.chat import Chat
from flowrl.runtime.journal import Row
from flowrl.statistics import means
from flowrl.statistics.bootstrap import Interval

EXAMPLES = 12
SHOWN = 400  # characters of a reply
MANY_SKIPPED = 0.05
_DATE = re.compile(r"-(\d{4}-\d{2}-\d{2}|\d{8}|\d{4})")  # what servers put after a model's name


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseVerdicts:
    """Verdicts on a subject's images, in the order of cases; `answers` are the rows of all questions."""

    judgements: Sequence[Judgement]
    answers: Sequence[Row]

    @property
    def skipped(self) -> int:
        """Images without scores."""
        return sum(one.values is None for one in self.judgements)


def judged_result(settings: Settings, plan: Any, chat: Chat, parts: Sequence[SubjectVerdicts[CaseVerdicts]]) -> Result:
    """The result of a subject, and of a base if there is one."""
    protocol, labels, judged = plan.protocol, [part.label for part in parts], [part.found for part in parts]
    for label, part in zip(labels, judged, strict=True):
        if part.skipped == len(part.judgements):
            raise ValueError(
                f"the judge gave no readable answer about any image of {label} ({errors_of(part.answers)}): look at "
                f"the replies in the journal, and at the words."
            )
    lines = _lines(protocol, judged)
    named = [{name: found[k] for name, found, _ in lines if k < len(found)} for k in range(len(judged))]
    changes = {name: change for name, _, change in lines if change is not None}
    score, cases = protocol.scores[0], len(judged[0].judgements)
    found = named[0][score.name]
    said = (
        f"{protocol.title} {score.name} {number(found.mean)} of {score.high:g} (95 % {bounds(found)}) for {labels[0]}: "
        f"{plural(cases, 'image')}, {judged[0].skipped} of them without scores."
    )
    return result_of(
        settings.benchmark, add_difference(said, changes[score.name], labels[1]) if score.name in changes else said,
        [_side(protocol, part, own) for part, own in zip(parts, named, strict=True)],
        changes=changes, claim=f"prompts of the same kinds{NO_TRAINING}",
        tables=(score_table(labels, lines, note=protocol.note, digits=3, paired_by="prompts and start noise"),),
        notes=(*_notes(settings, plan, parts), *plan.file.notes),
        facts={
            "judge": chat.version, "published_judges": list(protocol.judges), "words": plan.words.origin,
            "words_digest": plan.words.digest, **plan.asking.facts, "prompts": cases,
            "skipped": {label: part.skipped for label, part in zip(labels, judged, strict=True)},
            **costs_of({part.label: part.found.answers for part in parts}),
        },
        sections=(examples(protocol, parts),),
    )  # fmt: skip


def _lines(protocol: Protocol, judged: Sequence[CaseVerdicts]) -> list[Line]:
    """Overall numbers and numbers of tasks, each with its interval and its paired change."""
    lines: list[Line] = []
    for score in protocol.scores:
        rows = [score_rows(score, part.judgements) for part in judged]
        if not all(rows):
            continue
        change = None
        if len(rows) > 1 and (both := means.partners(*rows))[0]:
            change = _overall(score, *both)
        lines.append((score.name, [_overall(score, part) for part in rows], change))
        if score.tasks:
            lines += _task_lines(score, rows)
    return lines


def score_rows(score: Score, judgements: Sequence[Judgement]) -> list[means.ScoreRow]:
    """A score of all images that have it, scaled to 0 to 1; several numbers of one image count as samples."""
    found = []
    for one in judgements:
        value = None if one.values is None else score.of(one.case, one.values)
        for sample, single in enumerate(_several(value)):
            unit = (single - score.low) / (score.high - score.low)
            found.append(means.ScoreRow(task=one.case.task, prompt=one.case.key, sample=sample, value=unit))
    return found


def _several(value: float | Sequence[float] | None) -> Sequence[float]:
    return () if value is None else value if isinstance(value, Sequence) else (value,)


def _single(score: Score, one: Judgement) -> float | None:
    """A score of one image; the mean if it has several numbers."""
    values = () if one.values is None else _several(score.of(one.case, one.values))
    return fmean(values) if values else None


def _overall(score: Score, rows: Sequence[means.ScoreRow], base: Sequence[means.ScoreRow] | None = None) -> Interval:
    """The score's overall number on its own scale; with a base, the change to it."""
    if score.shares == "images":
        found = means.pooled(rows, base=base)
    elif score.shares == "tasks":
        found = means.stratified_score(rows, base=base)
    else:
        assert not isinstance(score.shares, str)
        shares = score.shares({row.task for row in rows}) if callable(score.shares) else score.shares
        found = means.weighted_score(rows, shares, base=base)
    return scale(found, score.low, score.high, change=base is not None)


def scale(interval: Interval, low: float, high: float, *, change: bool = False) -> Interval:
    """Maps an interval of numbers from 0 to 1, or of their changes, to `low` to `high`, and cuts it there."""
    start, least = (0.0, -1.0) if change else (low, 0.0)
    mean, lower, upper = (
        start + (high - low) * min(max(value, least), 1.0) if math.isfinite(value) else math.nan
        for value in (interval.mean, interval.low, interval.high)
    )
    return Interval(mean=mean, low=lower, high=upper)


def _task_lines(score: Score, rows: Sequence[Sequence[means.ScoreRow]]) -> list[Line]:
    found = [means.task_scores(part) for part in rows]
    both = means.partners(*rows) if len(rows) > 1 else []
    changes = means.task_scores(both[0], base=both[1]) if both and both[0] else {}
    order = dict.fromkeys(row.task for row in rows[0])

    def by_number(task: str) -> tuple[int, str]:
        """Sorts tasks that begin with a number by that number, and others by their letters."""
        head = task.partition(" ")[0]
        return (int(head) if head.isdecimal() else 0, task)

    return [
        (
            task,
            [scale(part[task], score.low, score.high) for part in found],
            scale(changes[task], score.low, score.high, change=True) if task in changes else None,
        )
        for task in sorted(order, key=by_number)
        if all(task in part for part in found)
    ]


def _side(protocol: Protocol, part: SubjectVerdicts[CaseVerdicts], named: Mapping[str, Interval]) -> SideResult:
    first = protocol.scores[0].name
    head = named[first]
    metrics = {first: head.mean, f"{first}_low": head.low, f"{first}_high": head.high}
    metrics |= {name.replace(" ", "_"): interval.mean for name, interval in named.items() if name != first}
    rows = [
        {"file": image.file, "index": place, "prompt": one.case.prompt, "key": one.case.key, "task": one.case.task,
         "scores": {score.name: _single(score, one) for score in protocol.scores},
         "values": None if one.values is None else {name: dict(found) for name, found in one.values.items()}}
        for place, (image, one) in enumerate(zip(part.images, part.found.judgements, strict=True))
    ]  # fmt: skip
    return SideResult(rows=rows, metrics={**metrics, "skipped": float(part.found.skipped)}, intervals=named)


def _notes(settings: Settings, plan: Any, parts: Sequence[SubjectVerdicts[CaseVerdicts]]) -> list[str]:
    notes, protocol, model, words = [], plan.protocol, str(plan.judge["model"]), plan.words.origin
    judgements = parts[0].found.judgements
    if not any(is_model(model, known) for known in protocol.judges):
        known = " or ".join(protocol.judges)
        notes.append(
            f"The judge is {model}; published numbers are of {known}. Numbers of different judges do not compare."
        )
    if words.startswith("own"):
        notes.append(f"The judge was asked in other words than the published ones ({words}).")
    if len(judgements) != (published := plan.file.number or protocol.number):
        notes.append(f"{len(judgements)} of {published} published prompts took part: compare with the same ones only.")
    for part in parts:
        found = part.found
        if protocol.remarks is not None:
            notes += [f"{part.label}: {remark}" for remark in protocol.remarks(found.judgements)]
        notes += skip_notes(part.label, found.skipped, len(found.judgements), found.answers, many=MANY_SKIPPED)
    first = protocol.scores[0]
    if len(parts) > 1 and not means.partners(*(score_rows(first, part.found.judgements) for part in parts))[0]:
        notes.append(
            f"{parts[0].label} and {parts[1].label} have no image in common that has scores, so there is no difference."
        )
    asked = []
    for one in judgements:
        sources = () if one.case.source is None else (str(one.case.source),)
        asked.append(request(Prompt(text=one.case.prompt, metadata={}, sources=sources)))
    return notes + training_notes(settings, asked)


def is_model(given: str, known: str) -> bool:
    """Whether a name, hub id or folder belongs to a known model, whatever its date."""
    name, wanted = (text.rstrip("/").rpartition("/")[2].casefold() for text in (given, known))
    return name.startswith(wanted) and (name == wanted or _DATE.fullmatch(name, len(wanted)) is not None)


# ---- examples --------------------------------------------------------------------------------------------------------


def examples(protocol: Protocol, parts: Sequence[SubjectVerdicts[CaseVerdicts]]) -> str:
    """Images spread evenly over the cases, with their sources, scores and the judge's words."""
    figures = ""
    for place in spread(len(parts[0].found.judgements), EXAMPLES):
        case = parts[0].found.judgements[place].case
        shown = [] if case.source is None else [image_element(case.source, f"source of: {case.prompt}")]
        shown += [image_element(part.images[place].path, f"{part.label}: {case.prompt}") for part in parts]
        said = ""
        for part in parts:
            one = part.found.judgements[place]
            if one.values is None:
                said += f"<br>{esc(part.label)}: no scores"
                continue
            values = [(score.name, _single(score, one)) for score in protocol.scores if not score.subset]
            listed = ", ".join(f"{name} {number(value, 2)}" for name, value in values if value is not None)
            about = {ask.name: ask.fields.get("question", ask.name) for ask in one.case.asks}
            replies = " ".join(f"{about[name]}: {text}" for name, text in one.replies.items())
            cut = replies if len(replies) <= SHOWN else f"{replies[:SHOWN]}…"
            said += f"<br>{esc(part.label)}: {esc(listed)}<br><small>{esc(cut)}</small>"
        figures += (
            f"<figure>{''.join(shown)}<figcaption><b>{esc(case.prompt)}</b><br>{esc(case.task)}{said}"
            f"<br><small>{esc(case.key)}</small></figcaption></figure>"
        )
    lead = "Spread evenly over the prompts in their order, not picked by looks or score."
    if protocol.edits:
        lead += f" From top to bottom: source, {', '.join(part.label for part in parts)}."
    return section("examples", "Examples", f"<div class='fails'>{figures}</div>" if figures else "", lead)
