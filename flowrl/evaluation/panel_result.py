"""From the values of a panel of scorers to means, tables and notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64

from flowrl.benchmarks.diversity import Diversity
from flowrl.benchmarks.panels import Panel, ScorerMean, panel_differences, panel_means
from flowrl.evaluation.benchmark import NO_TRAINING, Result
from flowrl.evaluation.runner_parts import claim_of, metrics_of, score_table
from flowrl.generation.folders import ImageFile
from flowrl.generation.subject import Settings
from flowrl.rendering.markup import bounds, number, plural, signed
from flowrl.statistics.bootstrap import Interval
from flowrl.statistics.means import mean_interval

DIVERSITY = "diversity"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scored:
    """A subject's images, their values by scorer (NaN where one failed), and a row for each image."""

    label: str
    images: Sequence[ImageFile]
    values: Mapping[str, Float64[np.ndarray, " n"]]
    rows: Sequence[dict[str, Any]]

    @property
    def prompts(self) -> list[str]:
        """What tells the prompts of the images apart."""
        return [image.asked_for for image in self.images]

    @property
    def units(self) -> list[tuple[str, ...]]:
        """What intervals are over: a text about other images is another prompt."""
        return [
            (image.prompt, *map(str, (*image.source_images, *image.reference_images)), *image.record.get("sources", ()))
            for image in self.images
        ]


def result_of(
    settings: Settings, panel: Panel, scored: Sequence[Scored], spread: Sequence[Diversity],
    versions: Mapping[str, str], *, own_scorers: bool, noun: str = "image", sections: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Result:  # fmt: skip
    """Means, intervals and tables of a subject, or of a subject and a base.

    Args:
        settings: of the command.
        panel: the benchmark.
        scored: the subject, and then the base.
        spread: their diversity, or nothing.
        versions: of the scorers.
        own_scorers: whether they are the benchmark's own.
        noun: what is scored.
        sections: further parts of the page.
        notes: what else a reader has to know.

    Raises:
        ValueError: subject and base have other prompts or samples.
    """
    subject = scored[0]
    means = [panel_means(part.values, part.units) for part in scored]
    found = [{name: mean.interval for name, mean in part.items()} for part in means]
    for place, part in enumerate(spread):
        found[place][DIVERSITY] = part.interval
        first = dict(reversed(list(zip(scored[place].prompts, scored[place].rows, strict=True))))
        for prompt, row in first.items():  # one row of each prompt has it: comparisons pair prompts
            row[DIVERSITY] = part.by_prompt.get(prompt)
    change = _change(settings, scored, spread) if len(scored) > 1 else {}
    failed = {name: mean.failed for name, mean in means[0].items()}
    labels = [part.label for part in scored]
    spoken = claim_of({"": subject.images})
    return Result(
        headline=_headline(settings, panel, labels, found, change, plural(len(subject.images), noun),
                           len(set(subject.prompts))),
        rows=tuple(subject.rows), base_rows=tuple(scored[1].rows) if change else (),
        metrics=_metrics(settings.benchmark, found[0], failed),
        base_metrics=_metrics(settings.benchmark, found[1], {}) if change else {},
        # Scorers have scales of their own, which one axis cannot show.
        intervals=found[0] if len(found[0]) == 1 else {},
        base_intervals=found[1] if change and len(found[1]) == 1 else {},
        differences=change if len(change) == 1 else {}, claim=spoken + NO_TRAINING,
        tables=(score_table(
            labels, [(name, [part[name] for part in found], change.get(name)) for name in found[0]],
            note=f"Means over {noun}s; intervals speak of {spoken}. {panel.scale}".strip(),
            extra=("failed", {name: str(failed.get(name, 0)) for name in found[0]}),
        ),),
        notes=(*_notes(panel, means, labels, subject, own_scorers=own_scorers, noun=noun), *notes),
        facts={"versions": dict(versions), "prompts": len(set(subject.prompts)), f"{noun}s": len(subject.images)},
        sections=tuple(sections),
    )  # fmt: skip


def _change(settings: Settings, scored: Sequence[Scored], spread: Sequence[Diversity]) -> dict[str, Interval]:
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


def _metrics(benchmark: str, found: Mapping[str, Interval], failed: Mapping[str, int]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, interval in found.items():
        metrics |= {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
    metrics |= {f"{name}_failed": float(count) for name, count in failed.items() if count}
    return metrics_of(benchmark, metrics)


def _headline(
    settings: Settings, panel: Panel, labels: Sequence[str], found: Sequence[Mapping[str, Interval]],
    change: Mapping[str, Interval], counted: str, prompts: int,
) -> str:  # fmt: skip
    first, interval = next(iter(found[0].items()))
    title = panel.title if panel.prompts else settings.benchmark
    said = (
        f"{title}: {first} {number(interval.mean, 4)} (95 % {bounds(interval)}) for {labels[0]}, {counted} of "
        f"{plural(prompts, 'prompt')}."
    )
    if not change:
        return said
    moved = [name for name, difference in change.items() if difference.excludes(0.0)]
    told = ", ".join(f"{name} {signed(change[name].mean, 4)}" for name in moved) or "none of the scorers"
    return f"{said} Against {labels[1]} the change is established for: {told}."


def _notes(
    panel: Panel, means: Sequence[Mapping[str, ScorerMean]], labels: Sequence[str], subject: Scored, *,
    own_scorers: bool, noun: str,
) -> list[str]:  # fmt: skip
    notes = []
    for label, part in zip(labels, means, strict=True):
        for name, mean in part.items():
            if mean.failed:
                notes.append(
                    f"{label}: {name} failed on {mean.failed} of {mean.scored + mean.failed} {noun}s, which are in no "
                    f"mean."
                )
    count = len(set(subject.prompts))
    if panel.prompts and count != panel.prompts:
        notes.append(f"{count} prompts, the published list has {panel.prompts}: compare with the same ones only.")
    if not own_scorers:
        notes.append(f"These scorers are not the benchmark's own, which are {', '.join(panel.rewards)}.")
    return notes
