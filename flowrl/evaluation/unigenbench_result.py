"""From a judge's answers about UniGenBench's test points to numbers, tables and notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from flowrl.benchmarks.unigenbench.items import PromptFile
from flowrl.benchmarks.unigenbench.point_scores import OVERALL, Scores, aggregate, paired_intervals, score_intervals
from flowrl.benchmarks.unigenbench.points import ENGLISH, NUM_IMAGES, PRIMARIES
from flowrl.benchmarks.unigenbench.result_files import Judged, score_rows
from flowrl.evaluation.benchmark import Result
from flowrl.evaluation.runner_parts import compared, metrics_of, score_table, trained_on
from flowrl.evaluation.unigenbench_judge import Asking
from flowrl.generation.folders import ImageFile
from flowrl.generation.journal import Row
from flowrl.generation.subject import Settings
from flowrl.rendering.markup import bounds, number, plural
from flowrl.rendering.terminal_text import Table
from flowrl.statistics.bootstrap import Interval

LEADERBOARD_JUDGE = "gemini-2.5-pro"
NOT_LEADERBOARD = "The judge is {judge}, the leaderboard's is Gemini-2.5-Pro: compare numbers of one judge only."
OWN_WORDS = (
    "The judge was asked in other than the published words (options template and definitions). Numbers are not those "
    "of the published wording until the agreement of the two was measured on one set of images."
)
MANY_SKIPPED = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Judging:
    """What a judge said of one subject's images, one entry per image in each."""

    label: str
    images: tuple[ImageFile, ...]
    rows: tuple[Judged, ...]
    answers: tuple[Row, ...]

    @property
    def prompts(self) -> list[int]:
        return [row.index for row in self.rows]


def result_of(
    settings: Settings, file: PromptFile, judgings: Sequence[Judging], *, judge: str, model: str, own_words: bool,
    whole: bool, asking: Asking, digest: str,
) -> Result:  # fmt: skip
    """The result of a subject, or of a subject and a base.

    Args:
        settings: of the command.
        file: the prompt file.
        judgings: of the subject, and then of the base.
        judge: its version, for the facts.
        model: its name.
        own_words: whether it was asked in other than the published words.
        whole: whether all prompts of the file took part.
        asking: how replies were asked for.
        digest: a hash of the words.
    """
    scores = [aggregate(score_rows(part.rows)) for part in judgings]
    if any(not found.primary for found in scores):
        raise ValueError(f"the judge gave no readable answer to any image ({_errors(judgings)}): look at the "
                         f"replies in the journal, and at the template.")  # fmt: skip
    found = [score_intervals(score_rows(part.rows), part.prompts, seed=settings.seed) for part in judgings]
    change = None
    if len(judgings) > 1:
        sides = [(score_rows(part.rows), part.prompts) for part in (judgings[1], judgings[0])]
        change = paired_intervals(sides[0], sides[1], seed=settings.seed)
    named = [_english(part) for part in found]
    return Result(
        headline=_headline(file, judgings, scores, named, change),
        rows=tuple(_rows(judgings[0])),
        base_rows=tuple(_rows(judgings[1])) if change is not None else (),
        metrics=_metrics(scores[0], named[0], len(judgings[0].rows)),
        base_metrics=_metrics(scores[1], named[1], len(judgings[1].rows)) if change is not None else {},
        intervals=named[0],
        base_intervals=named[1] if change is not None else {},
        differences=_english(change) if change is not None else {},
        tables=(_primaries(judgings, scores, named, change), _subs(judgings, scores)),
        notes=tuple(_notes(settings, file, judgings, scores, model=model, own_words=own_words, whole=whole)),
        facts={
            "judge": judge, "track": file.track, "prompts": len(set(judgings[0].prompts)),
            "samples": settings.samples, "repairs": list(file.repairs), "temperature": asking.temperature,
            "tries": asking.attempts, "max_tokens": asking.max_tokens, "words_digest": digest,
            "skipped": {part.label: found.skipped for part, found in zip(judgings, scores, strict=True)},
            "attempts": {part.label: round(fmean(row["attempts"] for row in part.answers), 3) for part in judgings},
            "tokens": {part.label: sum(row["tokens"] for row in part.answers) for part in judgings},
            "judging_seconds": {part.label: round(sum(r["seconds"] for r in part.answers), 1) for part in judgings},
        },
    )  # fmt: skip


def _english(intervals: Mapping[str, Interval]) -> dict[str, Interval]:
    """Primary dimensions by their English names in the published order, then the overall."""
    by_name = {ENGLISH.get(name, name): interval for name, interval in intervals.items()}
    return {name: by_name[name] for name in (*PRIMARIES, OVERALL) if name in by_name}


def _rows(judging: Judging) -> list[dict[str, Any]]:
    rows = []
    for image, judged, answer in zip(judging.images, judging.rows, judging.answers, strict=True):
        met = None
        if judged.reply is not None:
            met = [isinstance(score, int | float) and score == 1 for score in judged.reply.score]
        rows.append({
            "file": image.file, "index": judged.index, "sample": image.sample, "prompt": judged.prompt,
            "points": list(judged.points), "met": met, "error": answer["error"], "attempts": answer["attempts"],
        })  # fmt: skip
    return rows


def _metrics(scores: Scores, intervals: Mapping[str, Interval], images: int) -> dict[str, float]:
    overall = intervals[OVERALL]
    found = {OVERALL: overall.mean, "overall_low": overall.low, "overall_high": overall.high}
    found |= {name.lower().replace(" ", "_"): i.mean for name, i in intervals.items() if name != OVERALL}
    found |= {"skipped": float(scores.skipped), "skipped_ratio": scores.skipped / images}
    return metrics_of("unigenbench", found)


def _headline(
    file: PromptFile, judgings: Sequence[Judging], scores: Sequence[Scores],
    named: Sequence[Mapping[str, Interval]], change: Mapping[str, Interval] | None,
) -> str:  # fmt: skip
    overall = named[0][OVERALL]
    images, prompts = len(judgings[0].rows), len(set(judgings[0].prompts))
    said = (
        f"UniGenBench ({file.track}) overall {number(overall.mean, 4)} (95 % {bounds(overall)}) for "
        f"{judgings[0].label}: {plural(images, 'image')} of {plural(prompts, 'prompt')}, "
        f"{scores[0].skipped} of them without scores."
    )
    return said if change is None else compared(said, change[OVERALL], judgings[1].label)


def _primaries(
    judgings: Sequence[Judging], scores: Sequence[Scores], named: Sequence[Mapping[str, Interval]],
    change: Mapping[str, Interval] | None,
) -> Table:  # fmt: skip
    note = (
        "A dimension pools its test points; overall is the unweighted mean of the dimensions, as on the leaderboards. "
        "Intervals resample prompts."
    )
    changes = {} if change is None else _english(change)
    lines = [(name, [part[name] for part in named], changes.get(name)) for name in changes or named[0]]
    tallies = {ENGLISH.get(name, name): _count(tally) for name, tally in scores[0].primary.items()}
    labels = [part.label for part in judgings]
    return score_table(labels, lines, note=note, paired_by="prompts", extra=("test points", tallies))


def _subs(judgings: Sequence[Judging], scores: Sequence[Scores]) -> Table:
    columns = list(zip(judgings, scores, strict=True))[::-1]  # base first
    labels = sorted({label for part in scores for label in part.sub})
    rows = [
        (label, *(number(part.sub[label].accuracy) if label in part.sub else "-" for _, part in columns),
         _count(scores[0].sub[label]) if label in scores[0].sub else "-")
        for label in labels
    ]  # fmt: skip
    head = ("", "score", "test points") if len(scores) == 1 else ("", "base", "model", "test points")
    return Table(title="Test points", head=head, rows=tuple(rows), note="Test points that are met, of those judged.")


def _count(tally: Any) -> str:
    return f"{tally.correct}/{tally.total}"


def _notes(
    settings: Settings, file: PromptFile, judgings: Sequence[Judging], scores: Sequence[Scores], *, model: str,
    own_words: bool, whole: bool,
) -> list[str]:  # fmt: skip
    notes = []
    if model != LEADERBOARD_JUDGE:
        notes.append(NOT_LEADERBOARD.format(judge=model))
    if own_words:
        notes.append(OWN_WORDS)
    for part, found in zip(judgings, scores, strict=True):
        if found.skipped:
            notes.append(f"{part.label}: {found.skipped} of {len(part.rows)} images have no scores "
                         f"({_errors([part])}) and are in no number.")  # fmt: skip
            if found.skipped / len(part.rows) > MANY_SKIPPED:
                notes[-1] += " That is many: the rest may not be a fair sample."
    notes += [*file.repairs, *file.differences]
    if not whole or settings.samples != NUM_IMAGES:
        notes.append(
            f"{len(set(judgings[0].prompts))} prompts with {settings.samples} images each took part, not 600 with "
            f"{NUM_IMAGES}: compare with the same ones only."
        )
    if shared := trained_on(settings, (row.prompt for row in judgings[0].rows)):
        count = len(shared.exact) + len(shared.swapped)
        notes.append(f"{count} of {shared.total} prompts were trained on: the score is not one of unseen prompts.")
    return notes


def _errors(parts: Sequence[Judging]) -> str:
    """Why images have no scores, and how many for each reason."""
    words = Counter(str(row["error"]) for part in parts for row in part.answers if row["error"])
    return ", ".join(f"{word} {count}" for word, count in words.most_common())
