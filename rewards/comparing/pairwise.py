"""Rewards from comparing the samples of one prompt with each other: win rates, tournaments, ranks.

    {name: win_rate, options: {comparator: {judge: {server: http://127.0.0.1:8000/v1, model: NAME}}}}

A sample's value shows how it did within its group, and nothing about the group's quality: the mean of win rates is
always 1/2, and among samples of equal quality the differences are the judge's noise. The option `comparator` says what
compares, and how (`flowrl.rewards.comparing.comparators`). Samples with the same id in `group_ids` form a group, in any
order. A group of one is invalid ("group_of_one"), because there is nothing to compare with.

Calls of a judge for N = 8, 16, 24 in one order: win_rate 28, 120, 276; single_elimination 14, 30, 46; swiss 12, 32, 60.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from flowrl.config.sections import at_least
from flowrl.prompts.loading import Prompt
from flowrl.rewards.base import FunctionReward, Reward, RewardInputs, RewardOutput, output_of
from flowrl.rewards.base.outputs import log_words
from flowrl.rewards.base.prompt_needs import lack_of
from flowrl.rewards.base.specs import InnerOptions, build_nested, nested_options
from flowrl.rewards.comparing import tournaments
from flowrl.rewards.comparing.comparators import Bouts, Orders, VerdictCache, comparator_options, group_places
from flowrl.rewards.comparing.tournaments import Byes
from flowrl.runtime.randomness import counter_choice
from flowrl.runtime.shapes import Float64

_CACHE = 65536  # verdicts; some 10 MB


class ComparingOptions:
    """What rewards that ask a comparator about pairs have in common; each states its fields itself."""

    __slots__ = ()
    comparator: Mapping[str, Any]
    orders: Orders
    soft: bool
    cache: int

    def lacks(self, prompt: Prompt) -> str | None:
        """What the comparator needs."""
        return lack_of(comparator_options(self.comparator), prompt)

    def check(self) -> None:
        """Refuses what no such reward takes, such as a `soft` without effect."""
        at_least(0, self, "cache")
        gives = comparator_options(self.comparator).gives
        if self.soft and gives == "wins":
            raise ValueError(
                "soft takes probabilities as they are, and this comparator gives 0, 1/2 and 1 only: set temperature "
                "beside reward, or style: logprobs beside judge, or leave out soft."
            )
        if gives == "probabilities" and not self.soft:
            raise ValueError("the comparator's temperature means nothing without soft: true.")

    def reward(
        self, name: str, score: Callable[..., RewardOutput], settings: str, device: torch.device
    ) -> FunctionReward:
        """A reward whose `score` receives the comparisons of a batch, `bouts`."""
        comparator = comparator_options(self.comparator).build(device)
        kept = VerdictCache(self.cache) if self.cache and not comparator.free else None
        bouts = partial(Bouts, comparator=comparator, orders=self.orders, soft=self.soft, cache=kept)
        return FunctionReward(
            name=name,
            score=partial(score, bouts=bouts),
            needs=comparator.needs | {"prompts", "group_ids", "sample_ids"},
            version=f"{name}:{settings}:soft-{self.soft}:{comparator.version}",
            kind="pairwise",
            waits=comparator.waits,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class WinRate(ComparingOptions):
    """Share of the others in its group that a sample beats, a tie being half (Pref-GRPO, arXiv 2508.20751), in [0, 1].

    Pref-GRPO asks in a single order and counts an unreadable answer as a tie; here a failed comparison is left
    out. Parts: `comparisons` and `failed`, numbers of them; `order_bias`, with both orders; `cached`, the share that
    the cache knew; with a judge of style categories `overall`, and the win rate in each category by its name.
    """

    judges: ClassVar[tuple[str, ...]] = ("groups",)
    comparator: Mapping[str, Any]
    """Who compares."""
    orders: Orders = "random"
    """Which sample is shown first. `single`: the one with the smaller sample id, so a judge's preference for the
    first image becomes part of the reward. `random`: drawn for each pair; the bias cancels on average. `both`: the mean
    of both orders, which cancels it, at twice the calls."""
    opponents: int | None = None
    """Compares each sample with only this many others, drawn at random; even. Null: with all."""
    score: Literal["rate", "bradley_terry"] = "rate"
    """`rate`, or `bradley_terry`: strengths fitted to the verdicts, unbounded, which account for the opponents met."""
    min_comparisons: int = 1
    """A sample with fewer verdicts than this is invalid."""
    soft: bool = False
    """Counts the comparator's probabilities instead of wins."""
    categories: float = 0.0
    """Of a judge of style categories: the share s that the categories have in the value, `(1 - s) rate + s mean of the
    rates by category`; a sample that no category named has its rate alone. Pref-GRPO's scripts ask for 0.7 (0.3
    overall, 0.7 categories), and its code at 3e787f6 takes 1/1.3, since its loop overwrites the second weight by 1."""
    cache: int = _CACHE
    """Number of verdicts kept in case the same pair comes again; 0 for none."""

    def __post_init__(self) -> None:
        if self.opponents is not None and (self.opponents < 2 or self.opponents % 2):
            raise ValueError(f"opponents must be an even number of at least 2, or null, got {self.opponents}.")
        if self.min_comparisons < 1 or (self.opponents is not None and self.min_comparisons > self.opponents):
            raise ValueError(
                f"min_comparisons must be at least 1 and at most opponents ({self.opponents}), got "
                f"{self.min_comparisons}."
            )
        self.check()
        if not 0 <= self.categories <= 1 or (self.categories and self.comparator.get("style") != "categories"):
            raise ValueError(
                f"categories is a share in [0, 1] of the value, with a judge that is asked by category (comparator: "
                f"{{judge: ..., style: categories}}), got {self.categories}."
            )

    def build(self, device: torch.device) -> Reward:
        """Makes the reward; loads a model that compares, if it runs here."""
        settings = f"{self.score}:{self.orders}:opponents-{self.opponents or 'all'}:min-{self.min_comparisons}"
        settings += f":categories-{self.categories:g}" if self.categories else ""

        def win_rate(inputs: RewardInputs, *, bouts: Callable[[RewardInputs], Bouts]) -> RewardOutput:
            groups = group_places(inputs)
            rounds: list[tournaments.Matches] = []
            for group, places in groups.items():
                count = len(places)
                order = counter_choice(count, count, "opponents", inputs.iteration, group)
                rounds.append(tournaments.ring_pairs(order, self.opponents or count))
            played = bouts(inputs)
            values = np.full(len(inputs), np.nan)
            rates: dict[str, np.ndarray] = {}  # by category
            for places, pairs, scores in zip(
                groups.values(), rounds, _judged(played, list(groups.values()), rounds), strict=True
            ):
                first_wins_NN = np.full((len(places), len(places)), np.nan)
                first_wins_NN[pairs[:, 0], pairs[:, 1]] = scores[:, 0]
                measure = tournaments.win_rate if self.score == "rate" else tournaments.bradley_terry
                values[places] = measure(first_wins_NN, min_comparisons=self.min_comparisons)
                by_name: dict[str, np.ndarray] = {}
                for first, second in pairs.tolist():
                    for name, wins in played.categories((int(places[first]), int(places[second]))).items():
                        by_name.setdefault(name, np.full_like(first_wins_NN, np.nan))[first, second] = wins
                for name, wins_NN in by_name.items():
                    rates.setdefault(name, np.full(len(inputs), np.nan))[places] = tournaments.win_rate(wins_NN)
            if not rates:
                return _output(values, inputs, played)
            rates = {name: np.where(np.isnan(values), np.nan, rate) for name, rate in rates.items()}
            words = log_words(rates)
            return _output(
                blend(values, np.stack([*rates.values()]), self.categories),
                inputs,
                played,
                {**{words[name]: rate for name, rate in rates.items()}, "overall": values},
            )

        return self.reward("win_rate", win_rate, settings, device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tournament(ComparingOptions):
    """A sample's place in a tournament of its group, as a reward in [0, 1], 1 for the first.

    ArenaRL (arXiv 2601.06487), which judges in both orders. It takes fewer comparisons than all pairs; those of a round
    are judged together, for all groups. Single elimination and anchor compare the others with member 0, which has the
    smallest sample id; in ArenaRL it is sampled greedily. Parts as `win_rate`.
    """

    judges: ClassVar[tuple[str, ...]] = ("groups",)
    comparator: Mapping[str, Any]
    """Who compares."""
    scheme: Literal["anchor", "round_robin", "single_elimination", "swiss"] = "single_elimination"
    """See the functions of that name in `flowrl.rewards.comparing.tournaments`."""
    orders: Orders = "random"
    """See `win_rate`."""
    byes: Byes = "top_seeds"
    """Which seeds skip the first round of single elimination if the group is not a power of two: the best, or those
    that the published bracket lets skip."""
    ties: Literal["average", "best"] = "average"
    """Equal places share their `average`, or the `best` of them, as ArenaRL does in round robin and anchor."""
    soft: bool = False
    """Takes the comparator's probabilities as scores, which seed and break ties."""
    cache: int = _CACHE
    """See `win_rate`."""

    def __post_init__(self) -> None:
        if self.byes != "top_seeds" and self.scheme != "single_elimination":
            raise ValueError(f"byes: {self.byes} means nothing with scheme: {self.scheme}, which has no bracket.")
        self.check()

    def build(self, device: torch.device) -> Reward:
        """Makes the reward; loads a model that compares, if it runs here."""
        schemes: dict[str, Callable[[int], tournaments.Play]] = {
            "anchor": tournaments.anchor,
            "round_robin": tournaments.round_robin,
            "swiss": tournaments.swiss,
            "single_elimination": partial(tournaments.single_elimination, byes=self.byes),
        }
        scheme = schemes[self.scheme]

        def tournament(inputs: RewardInputs, *, bouts: Callable[[RewardInputs], Bouts]) -> RewardOutput:
            played = bouts(inputs)
            groups = [places for places in group_places(inputs).values() if len(places) > 1]
            values = np.full(len(inputs), np.nan)
            keys = tournaments.hold([scheme(len(places)) for places in groups], partial(_judged, played, groups))
            for places, key in zip(groups, keys, strict=True):
                values[places] = tournaments.rank_reward(key, ties=self.ties)
            return _output(values, inputs, played)

        settings = f"{self.scheme}:{self.orders}:byes-{self.byes}:ties-{self.ties}"
        return self.reward("tournament", tournament, settings, device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank(InnerOptions):
    """Another reward's rank within the group, 0 for the lowest: it does not matter how far an outlier lies. Failed
    items are not ranked; a sample left alone is invalid ("no_opponent"). The part `score` is the other reward."""

    judges: ClassVar[tuple[str, ...]] = ("groups",)
    reward: str
    """A built-in reward of kind pointwise or remote."""
    options: Mapping[str, Any] | None = None
    """Its options."""
    ties: Literal["average", "order"] = "average"
    """Equal values share the `average` of their ranks, or rank in the `order` of their sample ids (published)."""
    denominator: Literal["n-1", "n"] = "n-1"
    """Ranks are divided by n-1 (PaCo), so that the highest is 1, or by n (Flow-Factory)."""

    def __post_init__(self) -> None:
        nested_options(self.reward, self.options)

    def build(self, device: torch.device) -> Reward:
        """Makes the reward and the other one."""
        inner = build_nested(self.reward, self.options, device=device, owner="reward 'rank'")

        def rank(inputs: RewardInputs) -> RewardOutput:
            output = inner(inputs)
            score = torch.where(output.valid, output.values.detach(), torch.nan).cpu().double().numpy()
            values = np.full(len(inputs), np.nan)
            errors: list[str | None] = [None] * len(inputs)
            for places in group_places(inputs).values():
                values[places] = tournaments.rank_reward(score[places], ties=self.ties, denominator=self.denominator)
                for place in places.tolist():
                    if math.isnan(values[place]) and not math.isnan(score[place]):
                        errors[place] = "group_of_one" if len(places) == 1 else "no_opponent"
            ranked = output_of(values.tolist(), inputs, {"score": score.tolist()}, errors)
            lonely = {word: count for word, count in ranked.errors.items() if word in ("group_of_one", "no_opponent")}
            return RewardOutput(
                values=ranked.values,
                valid=ranked.valid,
                parts={**output.parts, **ranked.parts},
                errors={**output.errors, **lonely},
            )

        return FunctionReward(
            name="rank",
            score=rank,
            needs=inner.needs | {"group_ids", "sample_ids"},
            version=f"rank:ties-{self.ties}:over-{self.denominator}:{inner.version}",
            kind="groupwise",
            waits=inner.waits,
        )


def blend(
    rate: Float64[np.ndarray, " b"], by_category: Float64[np.ndarray, " k b"], share: float
) -> Float64[np.ndarray, " b"]:
    """`(1 - share) rate + share mean_k rate_k` over the categories that are known of a sample; the rate where none."""
    count = (~np.isnan(by_category)).sum(axis=0)
    means = np.nansum(by_category, axis=0) / np.maximum(count, 1)
    return np.where(count > 0, (1 - share) * rate + share * means, rate)


def _judged(
    played: Bouts, groups: Sequence[np.ndarray], rounds: Sequence[tournaments.Matches]
) -> list[tournaments.Scores]:
    """Scores (p, 1 - p) of matches within each group, all asked at once; p: the first wins."""
    places = [members[matches] for members, matches in zip(groups, rounds, strict=True)]
    wins = played.play(np.concatenate(places)) if places else np.zeros(0)
    ends = np.cumsum([len(matches) for matches in rounds])
    return [np.stack([part, 1 - part], axis=1) for part in np.split(wins, ends[:-1])]


def _output(
    values: np.ndarray, inputs: RewardInputs, played: Bouts, more: Mapping[str, np.ndarray] | None = None
) -> RewardOutput:
    sizes = {group: len(places) for group, places in group_places(inputs).items()}
    errors: list[str | None] = []
    for place, group in enumerate(inputs.group_ids.tolist()):
        if sizes[group] == 1:
            errors.append("group_of_one")
        elif played.reasons[place]:
            errors.append(played.reasons[place].most_common(1)[0][0])
        else:
            errors.append("too_few_comparisons" if played.comparisons[place] else "no_verdict")
    parts = {**(more or {}), "comparisons": played.comparisons, "failed": played.failed}
    if played.orders == "both":
        parts["order_bias"] = played.order_bias
    if played.cache is not None:
        parts["cached"] = np.where(played.asked > 0, played.cached / np.maximum(played.asked, 1), np.nan)
    return output_of(values.tolist(), inputs, {name: part.tolist() for name, part in parts.items()}, errors)
