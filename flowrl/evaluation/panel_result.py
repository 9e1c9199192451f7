"""Computes means, tables and notes from the values of a panel of scorers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrl.benchmarks.diversity import Diversity
from flowrl.benchmarks.panels import Panel, ScorerMean, panel_differences, panel_means
from flowrl.evaluation.benchmark import NO_TRAINING, Result, SideResult, result_of
from flowrl.evaluation.runner import SubjectVerdicts
from flowrl.evaluation.summing import add_changes, claim_of, lines_of, means_and_bounds, score_table
from flowrl.generation.folders import ImageFile
from flowrl.generation.subject import Settings
from flowrl.rendering.markup import bounds, number, plural
from flowrl.runtime.shapes import Float64
from flowrl.statistics.bootstrap import Interval
from flowrl.statistics.means import mean_interval

DIVERSITY = "diversity"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoredImages:
    """Images, their values by scorer (NaN for failures), and a row for each image."""

    images: Sequence[ImageFile]
    values: Mapping[str, Float64[np.ndarray, " n"]]
    rows: Sequence[dict[str, Any]]

    @property
    def prompts(self) -> list[str]:
        """A key for the prompt of each image."""
        return [image.asked_for for image in self.images]

    @property
    def units(self) -> list[tuple[str, ...]]:
        """The units of intervals; the same text about other images is another prompt."""
        return [
            (image.prompt, *map(str, (*image.source_images, *image.reference_images)), *image.record.get("sources", ()))
            for image in self.images
        ]

    def add_diversity(self, diversity: Diversity) -> None:
        """Writes each prompt's diversity into one of its rows: comparisons pair prompts."""
        first = dict(reversed(list(zip(self.prompts, self.rows, strict=True))))
        for prompt, row in first.items():
            row[DIVERSITY] = diversity.by_prompt.get(prompt)


def panel_result(
    settings: Settings, panel: Panel, parts: Sequence[SubjectVerdicts[ScoredImages]], spread: Sequence[Diversity],
    versions: Mapping[str, str], *, own_scorers: bool, noun: str = "image", sections: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Result:  # fmt: skip
    """Means, intervals and tables of a subject, or of a subject and a base. `spread` is their diversity, empty if not
    measured; `own_scorers` says that the scorers are the benchmark's own."""
    scored, labels = [part.found for part in parts], [part.label for part in parts]
    subject = scored[0]
    means = [panel_means(part.values, part.units) for part in scored]
    found = [{name: mean.interval for name, mean in part.items()} for part in means]
    for intervals, part, one in zip(found, scored, spread, strict=False):
        intervals[DIVERSITY] = one.interval
        part.add_diversity(one)
    change = _change(scored, spread) if len(scored) > 1 else {}
    failed = {name: mean.failed for name, mean in means[0].items()}
    metrics = list(map(means_and_bounds, found))
    metrics[0] |= {f"{name}_failed": float(count) for name, count in failed.items() if count}
    spoken, prompts = claim_of({"": subject.images}), len(set(subject.prompts))
    (name, interval), counted = next(iter(found[0].items())), plural(len(subject.images), noun)
    said = (
        f"{panel.title if panel.prompts else settings.benchmark}: {name} {number(interval.mean, 4)} (95 % "
        f"{bounds(interval)}) for {labels[0]}, {counted} of {plural(prompts, 'prompt')}."
    )
    return result_of(
        settings.benchmark,
        add_changes(said, change, labels, "none of the scorers"),
        # Scorers have scales of their own, which one axis cannot show.
        [
            SideResult(rows=part.rows, metrics=own, intervals=intervals if len(intervals) == 1 else {})
            for part, own, intervals in zip(scored, metrics, found, strict=True)
        ],
        changes=change if len(change) == 1 else {},
        claim=spoken + NO_TRAINING,
        tables=(
            score_table(
                labels,
                lines_of(found, change),
                note=f"Means over {noun}s; intervals cover {spoken}. {panel.scale}".strip(),
                extra=("failed", {name: str(failed.get(name, 0)) for name in found[0]}),
            ),
        ),
        notes=(*_notes(panel, means, labels, prompts, own_scorers=own_scorers, noun=noun), *notes),
        facts={"versions": dict(versions), "prompts": prompts, f"{noun}s": len(subject.images)},
        sections=sections,
    )


def _change(scored: Sequence[ScoredImages], spread: Sequence[Diversity]) -> dict[str, Interval]:
    """Subject minus base for every scorer and the diversity, paired."""
    subject, base = scored
    sides = [[(prompt, p.sample) for prompt, p in zip(part.prompts, part.images, strict=True)] for part in scored]
    if sides[0] != sides[1]:
        raise ValueError(
            "subject and base have images of different prompts or samples, so that they cannot be compared: draw the "
            "same ones."
        )
    change = panel_differences(base.values, subject.values, subject.units)
    if spread:
        pairs = [value - spread[1].by_prompt[prompt] for prompt, value in spread[0].by_prompt.items()]
        change[DIVERSITY] = mean_interval(pairs, ends=None)
    return change


def _notes(
    panel: Panel,
    means: Sequence[Mapping[str, ScorerMean]],
    labels: Sequence[str],
    prompts: int,
    *,
    own_scorers: bool,
    noun: str,
) -> list[str]:
    notes = []
    for label, part in zip(labels, means, strict=True):
        for name, mean in part.items():
            if mean.failed:
                notes.append(
                    f"{label}: {name} failed on {mean.failed} of {mean.scored + mean.failed} {noun}s, which are in no "
                    f"mean."
                )
    if panel.prompts and prompts != panel.prompts:
        notes.append(f"{prompts} prompts, the published list has {panel.prompts}: compare with the same ones only.")
    if not own_scorers:
        notes.append(f"These scorers are not the benchmark's own, which are {', '.join(panel.rewards)}.")
    return notes
