"""Benchmarks that are prompts and a panel of scorers: DrawBench, the PickScore and OCR tests, HPDv2; and diversity.

    flowrl eval MODEL --benchmark drawbench --prompts drawbench.txt
    flowrl eval MODEL --benchmark panel --prompts mine.jsonl --option rewards=pick_score,hps --option hps.version=2.1
    flowrl eval MODEL --benchmark diversity --prompts mine.txt --option features=clip

Any list of rewards of `flowrl.rewards` will do that judge an image by itself. What each benchmark's published numbers
are made of is in `flowrl.benchmarks.panels`. Options: `rewards`, `features` (none, clip or pixels), `feature_model`,
and `REWARD.OPTION`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.benchmarks.diversity import Diversity, diversity
from flowrl.benchmarks.panels import PANELS, Panel
from flowrl.config.options import unknown_name
from flowrl.config.train import resolve_path
from flowrl.evaluation.benchmark import Result
from flowrl.evaluation.panel_result import DIVERSITY, Scored, result_of
from flowrl.generation.features import DISTANCE, Features, check_features, features_of
from flowrl.generation.folders import ImageFile, is_folder_of_images, read_folder
from flowrl.generation.generate import choose, images_of
from flowrl.generation.image_folder import read_items
from flowrl.generation.models import WORLD_MODELS
from flowrl.generation.scorers import answers_of, load_scorers, score_images, scorer_names, scorer_specs, values_of
from flowrl.generation.subject import Settings, Subject
from flowrl.prompts.loading import Prompt, read_prompts
from flowrl.rewards import Reward

OPTIONS = ("rewards", "features", "feature_model")
_OWN = Panel(title="Panel", rewards=(), prompts=0, where="a file of your own", scale="")
_WORLD = "asset:prompts/world_heldout.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is measured, known before anything is loaded."""

    panel: Panel
    specs: list[dict[str, Any]]
    features: Features | None
    feature_model: str | None


def check(settings: Settings) -> None:
    """Refuses what can be known to be wrong before weights load.

    Raises:
        ValueError: unknown options or rewards, nothing to measure, no prompts, or images without them.
    """
    plan_of(settings)
    for subject in settings.subjects:
        if subject.images is not None:
            existing(subject.images, settings)
        else:
            benchmark_prompts(settings, subject)


def run(settings: Settings) -> Result:
    """Draws or reads the images of subject and base, scores them, and sums up; see `flowrl.commands.eval`."""
    plan = plan_of(settings)
    images = [
        images_of(settings, subject, benchmark_prompts(settings, subject)) if subject.images is None
        else existing(subject.images, settings)
        for subject in settings.subjects
    ]  # fmt: skip
    scorers = load_scorers(plan.specs, settings.device) if plan.specs else {}
    scored = [
        scored_by(scorers, plan.specs, subject, part, batch_size=settings.batch_size)
        for subject, part in zip(settings.subjects, images, strict=True)
    ]
    versions = {name: reward.version for name, reward in scorers.items()}
    spread: list[Diversity] = []
    if plan.features is not None:
        for part in images:
            vectors, versions["features"] = features_of(part, plan.features, plan.feature_model)
            spread.append(diversity(vectors, [image.asked_for for image in part], distance=DISTANCE[plan.features]))
    own = settings.benchmark not in PANELS or scorer_names(plan.specs) == list(plan.panel.rewards)
    return result_of(settings, plan.panel, scored, spread, versions, own_scorers=own)


def scored_by(
    scorers: Mapping[str, Reward], specs: Sequence[Mapping[str, Any]], subject: Subject, images: Sequence[ImageFile],
    *, batch_size: int,
) -> Scored:  # fmt: skip
    """What every scorer says of a subject's images, taken from the journal where it is known."""
    values = {}
    rows: list[dict[str, Any]] = [
        {"file": p.file, "index": p.index, "sample": p.sample, "prompt": p.prompt,
         **({} if (key := p.asked_for) == p.prompt else {"key": key}), "values": {}, "parts": {}, "error": {}}
        for p in images
    ]  # fmt: skip
    for (name, reward), spec in zip(scorers.items(), specs, strict=False):
        label = f"scoring {name} of {subject.label}"
        with answers_of("panel", name, reward, spec, subject.folder) as journal:
            scores = score_images(name, reward, images, journal, batch_size=batch_size, label=label)
        values[name] = values_of(scores)
        for row, score in zip(rows, scores, strict=True):
            row["values"][name] = score["value"]
            row["parts"] |= {f"{name}.{part}": value for part, value in score["parts"].items()}
            if score["error"] is not None:
                row["error"][name] = score["error"]
    return Scored(label=subject.label, images=images, values=values, rows=rows)


def plan_of(settings: Settings) -> Plan:
    """Reads the options.

    Raises:
        ValueError: see `check`.
    """
    panel = PANELS.get(settings.benchmark, _OWN)
    options = {name: text for name, text in settings.options.items() if "." in name}
    for name in settings.options.keys() - options.keys():
        if name not in OPTIONS:
            raise ValueError(f"--option {name}: {unknown_name(f'option of {settings.benchmark}', name, OPTIONS)} "
                             f"Options of a reward are written REWARD.OPTION.")  # fmt: skip
    if settings.judge is not None:
        raise ValueError(f"{settings.benchmark} has scorers and no judge: leave --judge out, and name rewards by "
                         f"--option rewards=NAME,NAME.")  # fmt: skip
    rewards = settings.options.get("rewards", ",".join(panel.rewards))
    named = settings.options.get("features", "clip" if settings.benchmark == DIVERSITY else "none")
    model = settings.options.get("feature_model")
    features = None if named == "none" else check_features(named, model)
    if not rewards and features is None:
        raise ValueError(f"{settings.benchmark} has nothing to measure: give --option rewards=NAME,NAME or features.")
    if not rewards and options:
        raise ValueError(f"--option {next(iter(options))}: no reward was given, name them by --option rewards=NAME.")
    specs = scorer_specs(rewards, options) if rewards else []
    return Plan(panel=panel, specs=specs, features=features, feature_model=model)


def benchmark_prompts(settings: Settings, subject: Subject) -> list[Prompt]:
    """The prompts of --prompts, or the embedded model's held-out ones.

    Raises:
        ValueError: none were given, or the file cannot be read.
    """
    named = settings.prompts
    if named is None and subject.source is not None and subject.source.model in WORLD_MODELS:
        named = "world"
    if named is None:
        where = PANELS[settings.benchmark].where if settings.benchmark in PANELS else _OWN.where
        raise ValueError(f"{settings.benchmark} needs --prompts FILE (.txt or .jsonl): {where}; none is shipped.")
    return choose(read_prompts(resolve_path(_WORLD if named == "world" else named)), settings.num_prompts)


def existing(folder: Path, settings: Settings) -> list[ImageFile]:
    """Images of a folder: in GenEval's layout, or any with --prompts as `flowrl reward score` takes it.

    Raises:
        ValueError: no folder, no images, or prompts that do not fit.
    """
    if is_folder_of_images(folder):
        found = [image for image in read_folder(folder) if image.sample < settings.samples]
    else:
        if settings.prompts is None:
            raise ValueError(f"{folder} names no prompts: give --prompts FILE, a .txt with one prompt per image in "
                             f"the order of their names, 2.png before 10.png, or a .jsonl (file, prompt).")  # fmt: skip
        found = read_items(folder, prompts=settings.prompts)
    if settings.num_prompts is not None:
        raise ValueError("--num-prompts is for images that are drawn: of a folder all images are scored.")
    return found
