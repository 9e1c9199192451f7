"""Computes numbers, tables and notes from a judge's answers about UniGenBench's test points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from flowrl.benchmarks.unigenbench.items import ENGLISH, NUM_IMAGES, PRIMARIES
from flowrl.benchmarks.unigenbench.point_scores import OVERALL, Scores, aggregate, paired_intervals, score_intervals
from flowrl.benchmarks.unigenbench.replies import Judged, score_rows
from flowrl.evaluation import summing
from flowrl.evaluation.benchmark import Result, SideResult, result_of
from flowrl.evaluation.runner import SubjectVerdicts
from flowrl.generation.subject import Settings
from flowrl.rendering.markup import bounds, number, plural
from flowrl.rendering.terminal_text import Table
from flowrl.rewards.judges.chat import Chat
from flowrl.runtime.journal import Row
from flowrl.statistics.bootstrap import Interval

LEADERBOARD_JUDGE = "gemini-2.5-pro"
NOT_LEADERBOARD = "The judge is {judge}, the leaderboard's is Gemini-2.5-Pro: compare numbers of one judge only."
OWN_WORDS = (
    "The judge was asked in other than the published words (options template and definitions). Numbers are not those "
    "of the published wording until the agreement of the two was measured on one set of images."
)
MANY_SKIPPED = 0.02
NOTE = (
    "A dimension pools its test points; overall is the unweighted mean of the dimensions, as on the leaderboards. "
    "Intervals resample prompts."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Judging:
    """A judge's answers on a subject's images, one entry per image: as scored, and as kept."""

    rows: tuple[Judged, ...]
    answers: tuple[Row, ...]

    @property
    def prompts(self) -> list[int]:
        """The index of each row's prompt."""
        return [row.index for row in self.rows]


def points_result(settings: Settings, plan: Any, chat: Chat, parts: Sequence[SubjectVerdicts[Judging]]) -> Result:
    """The result of a subject, and of a base if there is one."""
    judgings, labels = [part.found for part in parts], [part.label for part in parts]
    scores = [aggregate(score_rows(part.rows)) for part in judgings]
    if any(not found.primary for found in scores):
        why = summing.errors_of(row for part in judgings for row in part.answers)
        raise ValueError(
            f"the judge gave no readable answer to any image ({why}): look at the replies in the journal, "
            f"and at the template."
        )
    sides = [(score_rows(part.rows), part.prompts) for part in judgings]
    named = [_english(score_intervals(*side, seed=settings.seed)) for side in sides]
    changes: dict[str, Interval] = {}
    if len(sides) > 1:
        changes = _english(paired_intervals(sides[1], sides[0], seed=settings.seed))
    overall, prompts = named[0][OVERALL], len(set(judgings[0].prompts))
    said = (
        f"UniGenBench ({plan.file.track}) overall {number(overall.mean, 4)} (95 % {bounds(overall)}) for {labels[0]}: "
        f"{plural(len(judgings[0].rows), 'image')} of {plural(prompts, 'prompt')}, {scores[0].skipped} of them without "
        f"scores."
    )
    return result_of(
        settings.benchmark, summing.add_difference(said, changes[OVERALL], labels[1]) if changes else said,
        [_side(*found) for found in zip(parts, scores, named, strict=True)],
        changes=changes,
        tables=_tables(labels, scores, named, changes),
        notes=_notes(settings, plan, parts, scores),
        facts={
            "judge": chat.version, "track": plan.file.track, "prompts": prompts, "samples": settings.samples,
            "repairs": list(plan.file.repairs), **plan.asking.facts, "words_digest": plan.wording.digest,
            "skipped": {label: found.skipped for label, found in zip(labels, scores, strict=True)},
            **_effort({part.label: part.found.answers for part in parts}),
        },
    )  # fmt: skip


def _english(intervals: Mapping[str, Interval]) -> dict[str, Interval]:
    """Primary dimensions by their English names in the published order, then the overall."""
    by_name = {ENGLISH.get(name, name): interval for name, interval in intervals.items()}
    return {name: by_name[name] for name in (*PRIMARIES, OVERALL) if name in by_name}


def _side(part: SubjectVerdicts[Judging], scores: Scores, intervals: Mapping[str, Interval]) -> SideResult:
    rows, overall = [], intervals[OVERALL]
    for image, judged, answer in zip(part.images, part.found.rows, part.found.answers, strict=True):
        met = None
        if judged.reply is not None:
            met = [isinstance(score, int | float) and score == 1 for score in judged.reply.score]
        rows.append({
            "file": image.file, "index": judged.index, "sample": image.sample, "prompt": judged.prompt,
            "points": list(judged.points), "met": met, "error": answer["error"], "attempts": answer["attempts"],
        })  # fmt: skip
    metrics = {OVERALL: overall.mean, "overall_low": overall.low, "overall_high": overall.high}
    metrics |= {name.lower().replace(" ", "_"): i.mean for name, i in intervals.items() if name != OVERALL}
    metrics |= {"skipped": float(scores.skipped), "skipped_ratio": scores.skipped / len(rows)}
    return SideResult(rows=rows, metrics=metrics, intervals=intervals)


def _tables(
    labels: Sequence[str], scores: Sequence[Scores], named: Sequence[Mapping[str, Interval]],
    changes: Mapping[str, Interval],
) -> tuple[Table, Table]:  # fmt: skip
    """The dimensions, and the test points by label."""
    tallies = {ENGLISH.get(name, name): _count(tally) for name, tally in scores[0].primary.items()}
    rows = [
        (
            label,
            *(number(part.sub[label].accuracy) if label in part.sub else "-" for part in reversed(scores)),
            _count(scores[0].sub[label]) if label in scores[0].sub else "-",
        )
        for label in sorted({label for part in scores for label in part.sub})
    ]
    head = ("", "score", "test points") if len(scores) == 1 else ("", "base", "model", "test points")
    points = Table(title="Test points", head=head, rows=tuple(rows), note="Test points that are met, of those judged.")
    lines = summing.lines_of(named, changes)
    return summing.score_table(labels, lines, note=NOTE, paired_by="prompts", extra=("test points", tallies)), points


def _effort(answers: Mapping[str, Sequence[Row]]) -> dict[str, dict[str, float]]:
    """Tries and costs of the answers, by subject."""
    tries = {label: round(fmean(row["attempts"] for row in rows), 3) for label, rows in answers.items()}
    return {"attempts": tries, **summing.costs_of(answers)}


def _count(tally: Any) -> str:
    return f"{tally.correct}/{tally.total}"


def _notes(
    settings: Settings, plan: Any, parts: Sequence[SubjectVerdicts[Judging]], scores: Sequence[Scores]
) -> list[str]:
    notes, rows = [], parts[0].found.rows
    if plan.judge["model"] != LEADERBOARD_JUDGE:
        notes.append(NOT_LEADERBOARD.format(judge=plan.judge["model"]))
    if plan.wording.own:
        notes.append(OWN_WORDS)
    for part, found in zip(parts, scores, strict=True):
        answers = part.found.answers
        notes += summing.skip_notes(part.label, found.skipped, len(answers), answers, many=MANY_SKIPPED)
    notes += [*plan.file.repairs, *plan.file.differences]
    if len(plan.items) != len(plan.file.items) or settings.samples != NUM_IMAGES:
        notes.append(
            f"{len(set(parts[0].found.prompts))} prompts with {settings.samples} images each took part, not 600 with "
            f"{NUM_IMAGES}: compare with the same ones only."
        )
    return notes + summing.training_notes(settings, (row.prompt for row in rows))
