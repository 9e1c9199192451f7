"""Measures a reward for its card: passes over the same images, a judge's order, other rewards, cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from flowrl.generation.folders import ImageFile
from flowrl.generation.image_folder import POINTWISE, ItemScores, inputs_of, score_items
from flowrl.media.perturbations import PERTURBATIONS
from flowrl.rendering.markup import plural
from flowrl.rewards import Reward, reproduction_of
from flowrl.rewards.comparing.tournaments import ring_pairs
from flowrl.runtime.progress import progress
from flowrl.runtime.randomness import counter_choice
from flowrl.statistics.bootstrap import UNKNOWN, Interval
from flowrl.statistics.means import mean_interval
from flowrl.statistics.reliability import (
    Agreement,
    OrderBias,
    Retest,
    Spread,
    agreement,
    order_bias,
    rank_correlation,
    retest,
    spread,
)

CPU = torch.device("cpu")
SECOND_PASS = 1  # the iteration of the second pass; the first and all others are 0
FEW_PROMPTS = 20  # below this many, intervals over prompts are rough


@dataclass(frozen=True, kw_only=True, slots=True)
class Other:
    """Another reward on the same images: Spearman's correlation over all images, and within prompts."""

    overall: Interval
    within: Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringCost:
    """Time per image in both passes, without drawing or reading it."""

    seconds: Interval
    hours_per_1000: float
    calls: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CardMeasures:
    """All measurements of one reward; `values` and `again` are the two passes, [N]."""

    name: str
    version: str
    reproduces: str | None
    kind: str
    images: int
    prompts: int
    failed: Interval
    errors: dict[str, int]
    mean: Interval
    spread: Spread
    retest: Retest
    repeat: Agreement
    perturbed: dict[str, Agreement]
    order: OrderBias | None
    others: dict[str, Other]
    cost: ScoringCost
    notes: tuple[str, ...]
    items: Sequence[ImageFile] = field(repr=False)
    values: np.ndarray = field(repr=False)
    again: np.ndarray = field(repr=False)
    changed: dict[str, np.ndarray] = field(repr=False)


def measure(
    rewards: Mapping[str, Reward],
    items: Sequence[ImageFile],
    *,
    batch_size: int,
    changes: Sequence[str] = (),
    spec: Mapping[str, Any] | None = None,
    device: torch.device = CPU,
) -> CardMeasures:
    """Measures the first of the rewards, under `changes` (names of `PERTURBATIONS`), and compares the others with it.
    If `spec`, the first's, has a `comparator`, that one's bias is tested, on `device`."""
    (name, reward), *rest = rewards.items()
    group = np.array([item.index for item in items])

    def scored(what: Reward, key: str, label: str, **options: Any) -> ItemScores:
        return score_items(what, items, key=key, batch_size=batch_size, label=label, **options)

    first = scored(reward, name, f"{name}, first pass")
    second = scored(reward, name, f"{name}, second pass", iteration=SECOND_PASS)
    changed = {
        change: scored(reward, name, f"{name}, {PERTURBATIONS[change][0]}", change=PERTURBATIONS[change][1]).values
        for change in changes
    }
    others = {key: scored(other, key, f"scoring {key}").values for key, other in rest}
    comparator = (spec or {}).get("options", {}).get("comparator")
    order = None if comparator is None else judge_order(comparator, items, device=device)
    lost = np.isnan(np.stack([first.values, second.values])).mean(axis=0)
    reasons = [word for scores in (first, second) for word in scores.errors if word is not None]
    known = ~np.isnan(first.values)
    return CardMeasures(
        name=name, version=reward.version, kind=reward.kind,
        reproduces=reproduction_of((spec or {}).get("name"), (spec or {}).get("options")),
        images=len(items), prompts=len(np.unique(group)),
        failed=mean_interval(lost, group), errors={word: reasons.count(word) for word in sorted(set(reasons))},
        mean=mean_interval(first.values[known], group[known]) if known.any() else UNKNOWN,
        spread=spread(first.values, group), retest=retest(first.values, second.values, group),
        repeat=agreement(first.values, second.values, group),
        perturbed={change: agreement(first.values, values, group) for change, values in changed.items()},
        order=order,
        others={key: Other(overall=rank_correlation(first.values, values, group),
                           within=agreement(first.values, values, group).rank) for key, values in others.items()},
        cost=_cost(first, second), notes=_notes(reward, group), items=items, values=first.values,
        again=second.values, changed=changed,
    )  # fmt: skip


def _cost(first: ItemScores, second: ItemScores) -> ScoringCost:
    """Seconds per batch in both passes, without the first batch, which may compile or connect; calls by part."""
    seconds = np.concatenate([first.seconds, second.seconds])
    batch = np.concatenate([first.batches, np.where(second.batches < 0, -1, second.batches + first.batches.max() + 1)])
    kept = (batch >= 0) & ((batch != 0) | (batch.max() == 0))
    taken = mean_interval(seconds[kept], batch[kept], ends=None) if kept.any() else UNKNOWN
    count = max(1, int((first.batches >= 0).sum()))
    calls = 1.0
    if "comparisons" in first.parts:  # of pairs, each counted at both its members
        pairs = float(np.nansum(first.parts["comparisons"]) + np.nansum(first.parts.get("failed", np.zeros(1)))) / 2
        calls = pairs * (2 if "order_bias" in first.parts else 1) / count
    return ScoringCost(seconds=taken, hours_per_1000=taken.mean * 1000 / 3600, calls=calls)


def _notes(reward: Reward, group: np.ndarray) -> tuple[str, ...]:
    sizes = np.unique(group, return_counts=True)[1]
    notes = []
    if len(sizes) < FEW_PROMPTS:
        few = plural(len(sizes), "prompt")
        notes.append(f"Only {few}: intervals over prompts are rough, take {FEW_PROMPTS} or more.")
    if (sizes < 2).any():
        alone = plural(int((sizes < 2).sum()), "prompt")
        notes.append(f"{alone} with a single image, which has no advantage to measure.")
    if reward.kind not in POINTWISE:
        notes.append(f"A {reward.kind} reward: its values say how an image did among those of its prompt.")
    return tuple(notes)


@torch.no_grad()
def judge_order(comparator: Mapping[str, Any], items: Sequence[ImageFile], *, device: torch.device = CPU) -> OrderBias:
    """Shows a pairwise reward's judge (`comparator`) each image with two others of its prompt, in both orders."""
    from flowrl.rewards.comparing.comparators import comparator_options

    compares = comparator_options(comparator).build(device)
    first, other, labels = [], [], []
    groups: dict[int, list[int]] = {}
    for place, item in enumerate(items):
        groups.setdefault(item.index, []).append(place)
    groups = {key: places for key, places in groups.items() if len(places) > 1}
    with progress("judging both orders", len(groups)) as advance:
        for key, places in groups.items():
            inputs = inputs_of(items, places)
            count = 0 if inputs is None else len(inputs)
            if inputs is None or count < 2:
                advance("")
                continue
            pairs = ring_pairs(counter_choice(count, count, "card order", key), 2) if count > 2 else np.array([[0, 1]])
            verdicts = compares.compare(inputs, np.concatenate([pairs, pairs[:, ::-1]]))
            first += verdicts.first_wins[: len(pairs)].tolist()
            other += verdicts.first_wins[len(pairs) :].tolist()
            labels += [key] * len(pairs)
            advance("")
    return order_bias(first, other, labels)
