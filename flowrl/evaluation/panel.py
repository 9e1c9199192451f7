"""Benchmarks with prompts and a panel of scorers: DrawBench, the PickScore and OCR tests, HPDv2; and diversity.

The scorers are any rewards of `flowrl.rewards` that judge single images. `flowrl.benchmarks.panels` has those of
published numbers. Options: `rewards`, `features` (none, clip or pixels), `feature_model`, and `REWARD.OPTION`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.benchmarks.diversity import Diversity, diversity
from flowrl.benchmarks.panels import PANELS, Panel, ScorerMean, panel_differences, panel_means
from flowrl.config.options import unknown_name
from flowrl.config.train import resolve_path
from flowrl.evaluation.benchmark import NO_TRAINING, Result, SideResult, result_of
from flowrl.evaluation.runner import Rules, SubjectVerdicts
from flowrl.evaluation.summing import add_changes, claim_of, lines_of, means_and_bounds, score_table
from flowrl.generation.features import DISTANCE, Features, check_features, features_of
from flowrl.generation.folders import ImageFile, is_folder_of_images, read_folder
from flowrl.generation.generate import choose
from flowrl.generation.image_folder import read_items
from flowrl.generation.models import WORLD_MODELS
from flowrl.generation.scorers import answers_of, load_scorers, score_images, scorer_specs, values_of
from flowrl.generation.subject import Settings, Subject
from flowrl.prompts.loading import Prompt, read_prompts
from flowrl.rendering.markup import bounds, number, plural
from flowrl.rewards import Reward
from flowrl.rewards.base.specs import parse_reward_specs
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


_OWN = Panel(title="Panel", rewards=(), prompts=0, where="a file of your own", scale="")
WORLD = "world"
_WORLD_PROMPTS = "asset:prompts/world_heldout.jsonl"

Scorers = Mapping[str, Reward]


@dataclass(frozen=True, kw_only=True, slots=True)
class PanelPlan:
    """All that is known before anything loads."""

    panel: Panel
    specs: Sequence[Mapping[str, Any]]
    features: Features | None = None
    feature_model: str | None = None

    @property
    def own_scorers(self) -> bool:
        """Whether the scorers are the benchmark's own; a panel without scorers of its own accepts any."""
        own = list(self.panel.rewards)
        return not own or [spec.called for spec in parse_reward_specs(self.specs)] == own


def scorer_options(settings: Settings, known: Sequence[str], what: str) -> dict[str, str]:
    """The options of rewards, `REWARD.OPTION`, besides the benchmark's own; `what` it has instead of a judge."""
    for name in settings.options:
        if "." not in name and name not in known:
            wrong = unknown_name(f"option of {settings.benchmark}", name, known)
            raise ValueError(f"`options` {name}: {wrong} Options of a reward are written REWARD.OPTION.")
    if settings.judge is not None:
        raise ValueError(
            f"{settings.benchmark} has {what} and no judge: leave `judge` out, and name rewards by "
            f"`options` rewards=NAME,NAME."
        )
    return {name: text for name, text in settings.options.items() if "." in name}


def specs_of(rewards: str, options: Mapping[str, str]) -> list[dict[str, Any]]:
    """Reads scorers from a list of names; none if it is empty."""
    if not rewards and options:
        raise ValueError(f"`options` {next(iter(options))}: no reward was given, name them by `options` rewards=NAME.")
    return scorer_specs(rewards, options) if rewards else []


def plan_of(settings: Settings) -> PanelPlan:
    """Reads the options."""
    panel = PANELS.get(settings.benchmark, _OWN)
    options = scorer_options(settings, ("rewards", "features", "feature_model"), "scorers")
    rewards = settings.options.get("rewards", ",".join(panel.rewards))
    named = settings.options.get("features", "clip" if settings.benchmark == DIVERSITY else "none")
    model = settings.options.get("feature_model")
    features = None if named == "none" else check_features(named, model)
    if not rewards and features is None:
        raise ValueError(f"{settings.benchmark} has nothing to measure: give `options` rewards=NAME,NAME or features.")
    return PanelPlan(panel=panel, specs=specs_of(rewards, options), features=features, feature_model=model)


def prompts_of(settings: Settings, subject: Subject, plan: PanelPlan) -> list[Prompt]:
    """The prompts of the named file, or the embedded model's held-out ones."""
    named = settings.prompts
    if named is None and subject.source is not None and subject.source.model in WORLD_MODELS:
        named = WORLD
    return find_prompts(settings, named, plan.panel.where, _WORLD_PROMPTS)


def find_prompts(settings: Settings, named: str | None, where: str, world: str) -> list[Prompt]:
    """The prompts of a file, or of the embedded world."""
    if named is None:
        raise ValueError(f"{settings.benchmark} needs `prompts` FILE (.txt or .jsonl): {where}; none is shipped.")
    return choose(read_prompts(resolve_path(world if named == WORLD else named)), settings.num_prompts)


def existing(settings: Settings, plan: PanelPlan, folder: Path) -> list[ImageFile]:
    """Images of a folder: in GenEval's layout, or in any layout with a file of prompts as for `flowrl reward score`."""
    if is_folder_of_images(folder):
        found = [image for image in read_folder(folder) if image.sample < settings.samples]
    else:
        if settings.prompts is None:
            raise ValueError(
                f"{folder} names no prompts: give `prompts`, a .txt file with one prompt per image in the "
                f"order of their names, 2.png before 10.png, or a .jsonl (file, prompt)."
            )
        found = read_items(folder, prompts=settings.prompts)
    if settings.num_prompts is not None:
        raise ValueError("`num_prompts` is for images that are drawn: of a folder all images are scored.")
    return found


def ask(
    settings: Settings, plan: PanelPlan, scorers: Scorers, subject: Subject, images: Sequence[ImageFile]
) -> ScoredImages:
    """Scores a subject's images with every scorer; known values come from the journal."""
    values = {}
    rows: list[dict[str, Any]] = [
        {"file": p.file, "index": p.index, "sample": p.sample, "prompt": p.prompt,
         **({} if (key := p.asked_for) == p.prompt else {"key": key}), "values": {}, "parts": {}, "error": {}}
        for p in images
    ]  # fmt: skip
    for (name, reward), spec in zip(scorers.items(), plan.specs, strict=False):
        label = f"scoring {name} of {subject.label}"
        with answers_of("panel", name, reward, spec, subject.folder) as journal:
            scores = score_images(name, reward, images, journal, batch_size=settings.batch_size, label=label)
        values[name] = values_of(scores)
        for row, score in zip(rows, scores, strict=True):
            row["values"][name] = score["value"]
            row["parts"] |= {f"{name}.{part}": value for part, value in score["parts"].items()}
            if score["error"] is not None:
                row["error"][name] = score["error"]
    return ScoredImages(images=images, values=values, rows=rows)


def result(
    settings: Settings, plan: PanelPlan, scorers: Scorers, parts: Sequence[SubjectVerdicts[ScoredImages]]
) -> Result:
    """Means of all scorers, and the diversity of images."""
    versions = {name: reward.version for name, reward in scorers.items()}
    spread: list[Diversity] = []
    if plan.features is not None:
        for part in parts:
            vectors, versions["features"] = features_of(part.images, plan.features, plan.feature_model)
            prompts = [image.asked_for for image in part.images]
            spread.append(diversity(vectors, prompts, distance=DISTANCE[plan.features]))
    return panel_result(settings, plan.panel, parts, spread, versions, own_scorers=plan.own_scorers)


RULES: Rules[PanelPlan, Scorers, ScoredImages] = Rules(
    plan=plan_of,
    prompts=prompts_of,
    existing=existing,
    judge=lambda settings, plan: load_scorers(plan.specs, settings.device) if plan.specs else {},
    ask=ask,
    result=result,
)
