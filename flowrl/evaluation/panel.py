"""Benchmarks with prompts and a panel of scorers: DrawBench, the PickScore and OCR tests, HPDv2; and diversity.

The scorers are any rewards of `flowrl.rewards` that judge single images. `flowrl.benchmarks.panels` has those of
published numbers. Options: `rewards`, `features` (none, clip or pixels), `feature_model`, and `REWARD.OPTION`.
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
from flowrl.evaluation.panel_result import DIVERSITY, ScoredImages, panel_result
from flowrl.evaluation.runner import Rules, SubjectVerdicts
from flowrl.generation.features import DISTANCE, Features, check_features, features_of
from flowrl.generation.folders import ImageFile, is_folder_of_images, read_folder
from flowrl.generation.generate import choose
from flowrl.generation.image_folder import read_items
from flowrl.generation.models import WORLD_MODELS
from flowrl.generation.scorers import answers_of, load_scorers, score_images, scorer_specs, values_of
from flowrl.generation.subject import Settings, Subject
from flowrl.prompts.loading import Prompt, read_prompts
from flowrl.rewards import Reward
from flowrl.rewards.base.specs import parse_reward_specs

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
