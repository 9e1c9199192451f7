"""Rewards from comparing the samples of one prompt with each other: win rates, tournaments, ranks.

    {name: win_rate, options: {comparator: {judge: {server: http://127.0.0.1:8000/v1, model: NAME}}}}

A sample's value says how it did within its group and nothing of the group's quality: the mean of win rates is 1/2
whatever was sampled, and among samples of equal quality the differences are the judge's noise. Who compares, and how,
is the option `comparator` (`flowrl.rewards.comparing.comparators`). A group is what shares an id in `group_ids`, in any
order. A group of one has nobody to be compared with: it is invalid ("group_of_one").

Calls of a judge for N = 8, 16, 24 in one order: win_rate 28, 120, 276; single_elimination 14, 30, 46; swiss 12, 32, 60.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from flowrl.randomness import counter_choice
from flowrl.rewards import FunctionReward, Reward, RewardInputs, RewardOutput, output_of
from flowrl.rewards.comparing.comparators import Comparator, build_comparator, check_comparator, check_soft
from flowrl.rewards.comparing.tournaments import (
    Byes,
    Matches,
    Scores,
    Tournament,
    all_pairs,
    anchor,
    bradley_terry,
    hold,
    rank_reward,
    ring_pairs,
    round_robin,
    single_elimination,
    swiss,
)
from flowrl.rewards.comparing.tournaments import win_rate as rate_of_wins
from flowrl.rewards.comparing.verdicts import Bouts, Orders, VerdictCache, group_places
from flowrl.rewards.nested import build_nested, check_nested

Score = Literal["rate", "bradley_terry"]
Scheme = Literal["anchor", "round_robin", "single_elimination", "swiss"]
_CACHE = 65536  # verdicts; some 10 MB


def check_win_rate(
    *,
    comparator: Mapping[str, Any],
    orders: Orders = "random",
    opponents: int | None = None,
    score: Score = "rate",
    min_comparisons: int = 1,
    soft: bool = False,
    cache: int = _CACHE,
) -> None:
    """Refuses option values that are wrong, without loading weights or calling a server."""
    owner = "reward 'win_rate'"
    if opponents is not None and (opponents < 2 or opponents % 2):
        raise ValueError(f"{owner}: opponents must be an even number of at least 2, or null, got {opponents}.")
    if min_comparisons < 1 or (opponents is not None and min_comparisons > opponents):
        raise ValueError(
            f"{owner}: min_comparisons must be at least 1 and at most opponents ({opponents}), got {min_comparisons}."
        )
    _check_common(comparator, soft, cache, owner)


def win_rate(
    *,
    device: torch.device,
    comparator: Mapping[str, Any],
    orders: Orders = "random",
    opponents: int | None = None,
    score: Score = "rate",
    min_comparisons: int = 1,
    soft: bool = False,
    cache: int = _CACHE,
) -> Reward:
    """Share of the others in its group that a sample beats, a tie being half (Pref-GRPO, arXiv 2508.20751), in [0, 1].

    Pref-GRPO asks in a single order and counts an unreadable answer as a tie; here a comparison that failed is left
    out. Parts: `comparisons` and `failed`, numbers of them; `order_bias`, with both orders; `cached`, the share that
    the cache knew.

    Args:
        device: where a model in this process runs.
        comparator: who compares.
        orders: which sample is shown first. `single`: that of the smaller sample id, and a judge's liking for the first
            image becomes part of the reward. `random`: drawn for each pair; the bias cancels on average. `both`: the
            mean of both orders, which cancels it, at twice the calls.
        opponents: compares each sample with so many others only, drawn at random; even. Null: with all.
        score: `rate`, or `bradley_terry`: strengths fitted to the verdicts, unbounded, which account for whom one met.
        min_comparisons: a sample with fewer verdicts is invalid.
        soft: counts the comparator's probabilities instead of wins.
        cache: verdicts that are kept for when the same pair is asked again; 0 for none.

    Raises:
        ValueError: for options that cannot work.
    """
    check_win_rate(
        comparator=comparator, orders=orders, opponents=opponents, score=score, min_comparisons=min_comparisons,
        soft=soft, cache=cache,
    )  # fmt: skip
    compares = build_comparator(comparator, device=device, owner="reward 'win_rate'")
    met = "all" if opponents is None else str(opponents)
    return FunctionReward(
        name="win_rate",
        score=partial(
            _win_rate, bouts=_bouts(compares, orders, soft, cache), opponents=opponents, score=score,
            min_comparisons=min_comparisons,
        ),
        needs=compares.needs | {"prompts", "group_ids", "sample_ids"},
        version=f"win_rate:{score}:{orders}:opponents-{met}:min-{min_comparisons}:soft-{soft}:{compares.version}",
        kind="pairwise",
        waits=compares.waits,
    )  # fmt: skip


def check_tournament(
    *,
    comparator: Mapping[str, Any],
    scheme: Scheme = "single_elimination",
    orders: Orders = "random",
    byes: Byes = "top_seeds",
    ties: Literal["average", "best"] = "average",
    soft: bool = False,
    cache: int = _CACHE,
) -> None:
    """Refuses option values that are wrong, without loading weights or calling a server."""
    owner = "reward 'tournament'"
    if byes != "top_seeds" and scheme != "single_elimination":
        raise ValueError(f"{owner}: byes: {byes} means nothing with scheme: {scheme}, which has no bracket.")
    _check_common(comparator, soft, cache, owner)


def tournament(
    *,
    device: torch.device,
    comparator: Mapping[str, Any],
    scheme: Scheme = "single_elimination",
    orders: Orders = "random",
    byes: Byes = "top_seeds",
    ties: Literal["average", "best"] = "average",
    soft: bool = False,
    cache: int = _CACHE,
) -> Reward:
    """A sample's place in a tournament of its group, as a reward in [0, 1], 1 for the first.

    ArenaRL (arXiv 2601.06487), which judges in both orders. It takes fewer comparisons than all pairs; those of a round
    are judged together, for all groups. Member 0, with whom single elimination and anchor compare the others, is the
    smallest sample id; in ArenaRL it is sampled greedily. Parts as `win_rate`.

    Args:
        device: where a model in this process runs.
        comparator: who compares.
        scheme: see the functions of that name in `flowrl.rewards.comparing.tournaments`.
        orders: see `win_rate`.
        byes: who skips the first round of single elimination where the group is no power of two: the best seeds, or
            those that the published bracket gives one.
        ties: equal places share their `average`, or the `best` of them, as ArenaRL does in round robin and anchor.
        soft: takes the comparator's probabilities as scores, which seed and break ties.
        cache: see `win_rate`.

    Raises:
        ValueError: for options that cannot work.
    """
    check_tournament(
        comparator=comparator, scheme=scheme, orders=orders, byes=byes, ties=ties, soft=soft, cache=cache
    )  # fmt: skip
    compares = build_comparator(comparator, device=device, owner="reward 'tournament'")
    schemes: dict[str, Callable[[int], Tournament]] = {
        "anchor": anchor, "round_robin": round_robin, "swiss": swiss,
        "single_elimination": partial(single_elimination, byes=byes),
    }  # fmt: skip
    return FunctionReward(
        name="tournament",
        score=partial(
            _tournament, bouts=_bouts(compares, orders, soft, cache), scheme=schemes[scheme], ties=ties
        ),
        needs=compares.needs | {"prompts", "group_ids", "sample_ids"},
        version=f"tournament:{scheme}:{orders}:byes-{byes}:ties-{ties}:soft-{soft}:{compares.version}",
        kind="pairwise",
        waits=compares.waits,
    )  # fmt: skip


def check_rank(
    *,
    reward: str,
    options: Mapping[str, Any] | None = None,
    ties: Literal["average", "order"] = "average",
    denominator: Literal["n-1", "n"] = "n-1",
) -> None:
    """Refuses option values that are wrong, without loading weights."""
    check_nested(reward, options, owner="reward 'rank'")


def rank(
    *,
    device: torch.device,
    reward: str,
    options: Mapping[str, Any] | None = None,
    ties: Literal["average", "order"] = "average",
    denominator: Literal["n-1", "n"] = "n-1",
) -> Reward:
    """Another reward's rank within the group, 0 for the lowest: outliers count no more than the next one.

    Items that failed are not ranked. Who is left alone by that is invalid ("no_opponent"). The part `score` is the
    other reward.

    Args:
        device: where the other reward runs.
        reward: a built-in reward of kind pointwise or remote.
        options: its options.
        ties: equal values share the `average` of their ranks, or rank in the `order` of their sample ids (published).
        denominator: ranks are divided by n-1 (PaCo), so that the highest is 1, or by n (Flow-Factory).

    Raises:
        ValueError: for a reward or options that cannot work.
    """
    check_rank(reward=reward, options=options, ties=ties, denominator=denominator)
    inner = build_nested(reward, options, device=device, owner="reward 'rank'")
    return FunctionReward(
        name="rank",
        score=partial(_rank, inner=inner, ties=ties, denominator=denominator),
        needs=inner.needs | {"group_ids", "sample_ids"},
        version=f"rank:ties-{ties}:over-{denominator}:{inner.version}",
        kind="groupwise",
        waits=inner.waits,
    )


def _check_common(comparator: Mapping[str, Any], soft: bool, cache: int, owner: str) -> None:
    if cache < 0:
        raise ValueError(f"{owner}: cache is a number of verdicts, 0 or more, got {cache}.")
    check_comparator(comparator, owner=owner)
    check_soft(comparator, soft=soft, owner=owner)


def _bouts(comparator: Comparator, orders: Orders, soft: bool, cache: int) -> Callable[[RewardInputs], Bouts]:
    kept = VerdictCache(cache) if cache and not comparator.free else None
    return partial(Bouts, comparator=comparator, orders=orders, soft=soft, cache=kept)


def _win_rate(
    inputs: RewardInputs,
    *,
    bouts: Callable[[RewardInputs], Bouts],
    opponents: int | None,
    score: Score,
    min_comparisons: int,
) -> RewardOutput:
    groups = group_places(inputs)
    rounds: list[Matches] = []
    for group, places in groups.items():
        count = len(places)
        order = counter_choice(count, count, "opponents", inputs.iteration, group)
        rounds.append(all_pairs(count) if opponents is None else ring_pairs(order, opponents))
    played = bouts(inputs)
    values = np.full(len(inputs), np.nan)
    for places, pairs, scores in zip(
        groups.values(), rounds, _judged(played, list(groups.values()), rounds), strict=True
    ):
        first_wins_NN = np.full((len(places), len(places)), np.nan)
        first_wins_NN[pairs[:, 0], pairs[:, 1]] = scores[:, 0]
        measure = rate_of_wins if score == "rate" else bradley_terry
        values[places] = measure(first_wins_NN, min_comparisons=min_comparisons)
    return _output(values, inputs, played)


def _tournament(
    inputs: RewardInputs,
    *,
    bouts: Callable[[RewardInputs], Bouts],
    scheme: Callable[[int], Tournament],
    ties: Literal["average", "best"],
) -> RewardOutput:
    played = bouts(inputs)
    groups = [places for places in group_places(inputs).values() if len(places) > 1]
    values = np.full(len(inputs), np.nan)
    keys = hold([scheme(len(places)) for places in groups], partial(_judged, played, groups))
    for places, key in zip(groups, keys, strict=True):
        values[places] = rank_reward(key, ties=ties)
    return _output(values, inputs, played)


def _judged(played: Bouts, groups: Sequence[np.ndarray], rounds: Sequence[Matches]) -> list[Scores]:
    """Scores (p, 1 - p) of matches within each group, all asked at once; p: the first wins."""
    places = [members[matches] for members, matches in zip(groups, rounds, strict=True)]
    wins = played.play(np.concatenate(places)) if places else np.zeros(0)
    ends = np.cumsum([len(matches) for matches in rounds])
    return [np.stack([part, 1 - part], axis=1) for part in np.split(wins, ends[:-1])]


def _output(values: np.ndarray, inputs: RewardInputs, played: Bouts) -> RewardOutput:
    sizes = {group: len(places) for group, places in group_places(inputs).items()}
    errors: list[str | None] = []
    for place, group in enumerate(inputs.group_ids.tolist()):
        if sizes[group] == 1:
            errors.append("group_of_one")
        elif played.reasons[place]:
            errors.append(played.reasons[place].most_common(1)[0][0])
        else:
            errors.append("too_few_comparisons" if played.comparisons[place] else "no_verdict")
    parts = {"comparisons": played.comparisons, "failed": played.failed}
    if played.orders == "both":
        parts["order_bias"] = played.order_bias
    if played.cache is not None:
        parts["cached"] = np.where(played.asked > 0, played.cached / np.maximum(played.asked, 1), np.nan)
    return output_of(values.tolist(), inputs, {name: part.tolist() for name, part in parts.items()}, errors)


def _rank(
    inputs: RewardInputs, *, inner: Reward, ties: Literal["average", "order"], denominator: Literal["n-1", "n"]
) -> RewardOutput:
    output = inner(inputs)
    score = torch.where(output.valid, output.values.detach(), torch.nan).double().cpu().numpy()
    values = np.full(len(inputs), np.nan)
    errors: list[str | None] = [None] * len(inputs)
    for places in group_places(inputs).values():
        values[places] = rank_reward(score[places], ties=ties, denominator=denominator)
        for place in places.tolist():
            if math.isnan(values[place]) and not math.isnan(score[place]):
                errors[place] = "group_of_one" if len(places) == 1 else "no_opponent"
    ranked = output_of(values.tolist(), inputs, {"score": score.tolist()}, errors)
    lonely = {word: count for word, count in ranked.errors.items() if word in ("group_of_one", "no_opponent")}
    return RewardOutput(
        values=ranked.values, valid=ranked.valid, parts={**output.parts, **ranked.parts},
        errors={**output.errors, **lonely},
    )  # fmt: skip
