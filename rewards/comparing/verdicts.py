"""The comparisons of one batch: the order in which a pair is shown, the questions asked before, and the results.

Letters: B samples of the batch, n pairs of their places.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
from torch import Tensor

from flowrl.rewards.base import RewardInputs, to_uint8
from flowrl.rewards.comparing.comparators import Comparator, Pairs
from flowrl.runtime.randomness import counter_seed
from flowrl.runtime.shapes import Float64

Orders = Literal["single", "random", "both"]
Known = tuple[float, str | None, Mapping[str, float]]
"""Of one order: the probability that the one shown first wins, or NaN and why; and the same by category."""


def group_places(inputs: RewardInputs) -> dict[int, np.ndarray]:
    """Places of each group's members, by sample id, so nothing depends on the order of the batch."""
    groups: dict[int, list[int]] = {}
    ids: list[int] = inputs.sample_ids.tolist()
    for place, group in enumerate(inputs.group_ids.tolist()):
        groups.setdefault(group, []).append(place)
    return {group: np.array(sorted(places, key=lambda i: ids[i])) for group, places in groups.items()}


class VerdictCache:
    """Verdicts by comparator's version, question and both images (in 8 bits), without failures; the least used are
    dropped first. Safe to use from several threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._verdicts: OrderedDict[bytes, Known] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> Known | None:
        """An earlier verdict, if there is one."""
        with self._lock:
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
            return self._verdicts.get(key)

    def put(self, key: bytes, verdict: Known) -> None:
        """Keeps a verdict, unless it is a failure."""
        if math.isnan(verdict[0]):
            return
        with self._lock:
            self._verdicts[key] = verdict
            self._verdicts.move_to_end(key)
            while len(self._verdicts) > self.size:
                self._verdicts.popitem(last=False)


class Bouts:
    """The comparisons of one batch. Nothing is asked twice.

    Attributes:
        comparisons: float64 [B], matches that had a verdict.
        failed: float64 [B], matches that had none.
        asked: float64 [B], verdicts, one for each order in which a pair was shown.
        cached: float64 [B], how many of them the cache knew.
        order_bias: float64 [B], mean of P(the one shown first wins) - 1/2 over the pairs shown in both orders, NaN
            if there are none; 0 for an unbiased judge, 1/2 for one that always names the first.
        reasons: [B] why matches failed.
    """

    def __init__(
        self, inputs: RewardInputs, *, comparator: Comparator, orders: Orders, soft: bool, cache: VerdictCache | None
    ) -> None:
        """Asks for nothing yet, unless the comparator is free.

        Args:
            orders: `single`: the smaller sample id is shown first. `random`: which one is first is drawn for each pair
                and iteration. `both`: the mean of the verdicts of both orders, none if one of them failed.
            soft: uses probabilities as they are; otherwise more than 1/2 is a win and less a loss.
            cache: None for none.
        """
        batch = len(inputs)
        self.inputs, self.comparator, self.orders, self.soft, self.cache = inputs, comparator, orders, soft, cache
        self.comparisons, self.failed, self.asked, self.cached = (np.zeros(batch) for _ in range(4))
        self.reasons: list[Counter[str]] = [Counter() for _ in range(batch)]
        self._bias, self._both = np.zeros(batch), np.zeros(batch)
        self._ids: list[int] = inputs.sample_ids.tolist()
        self._groups: list[int] = inputs.group_ids.tolist()
        self._known: dict[tuple[int, int], Known] = {}
        self._keys = None if cache is None else _content(inputs, comparator)
        if comparator.free:
            members = group_places(inputs).values()
            self._ask((a, b) for places in members for a in places.tolist() for b in places.tolist() if a != b)

    @property
    def order_bias(self) -> Float64[np.ndarray, " b"]:
        """How far each image's verdicts depend on which one is shown first; NaN if it was not asked both ways."""
        return np.where(self._both > 0, self._bias / np.maximum(self._both, 1), np.nan)

    def play(self, pairs: Pairs) -> Float64[np.ndarray, " n"]:
        """The probability that the first place of each pair beats the second; NaN without a verdict."""
        matches: list[tuple[int, int]] = [(int(a), int(b)) for a, b in pairs]
        shown = [self._orders_of(a, b) for a, b in matches]
        self._ask(order for orders in shown for order in orders)
        wins = np.zeros(len(matches))
        for number, ((a, b), orders) in enumerate(zip(matches, shown, strict=True)):
            verdicts = [self._known[order] for order in orders]
            first = [self._harden(verdict) for verdict, _, _ in verdicts]
            own = [p if order[0] == a else 1 - p for p, order in zip(first, orders, strict=True)]
            wins[number] = sum(own) / len(own)
            lost = math.isnan(wins[number])
            for member in (a, b):
                self.comparisons[member] += not lost
                self.failed[member] += lost
                self.reasons[member].update(word for _, word, _ in verdicts if word is not None)
                if len(first) == 2 and not lost:
                    self._bias[member] += sum(first) / 2 - 0.5
                    self._both[member] += 1
        return wins

    def categories(self, pair: tuple[int, int]) -> dict[str, float]:
        """By category, the probability that the first of a pair that was played beats the second."""
        shown = [(order, self._known[order][2]) for order in self._orders_of(*pair)]
        found: dict[str, list[float]] = {}
        for order, named in shown:
            for name, first in named.items():
                found.setdefault(name, []).append(first if order == pair else 1 - first)
        return {name: sum(wins) / len(wins) for name, wins in found.items()}

    def _harden(self, first_wins: float) -> float:
        if self.soft or math.isnan(first_wins):
            return first_wins
        return 0.5 * (1 + (first_wins > 0.5) - (first_wins < 0.5))

    def _orders_of(self, a: int, b: int) -> list[tuple[int, int]]:
        """The orders in which two places are shown."""
        low, high = sorted((a, b), key=lambda place: (self._ids[place], place))
        if self.orders == "both":
            return [(low, high), (high, low)]
        turned = (
            self.orders == "random"
            and counter_seed("order", self.inputs.iteration, self._groups[low], self._ids[low], self._ids[high]) % 2
        )
        return [(high, low) if turned else (low, high)]

    def _ask(self, orders: Iterable[tuple[int, int]]) -> None:
        missing = []
        for order in dict.fromkeys(orders):
            if order in self._known:
                continue
            found = None if self.cache is None else self.cache.get(self._key(order))
            if found is None:
                missing.append(order)
            else:
                self._known[order] = found
            for place in order:
                self.asked[place] += 1
                self.cached[place] += found is not None
        if not missing:
            return
        verdicts = self.comparator.compare(self.inputs, np.array(missing, dtype=np.int64))
        categories: Sequence[Mapping[str, float]] = verdicts.categories or [{}] * len(missing)
        for order, wins, word, named in zip(
            missing, verdicts.first_wins.tolist(), verdicts.errors, categories, strict=True
        ):
            self._known[order] = (wins, (word or "no_verdict") if math.isnan(wins) else None, named)
            if self.cache is not None:
                self.cache.put(self._key(order), self._known[order])

    def _key(self, order: tuple[int, int]) -> bytes:
        assert self._keys is not None
        (asked, first), (_, second) = self._keys[order[0]], self._keys[order[1]]
        return hashlib.sha256(asked + first + second).digest()


def _content(inputs: RewardInputs, comparator: Comparator) -> list[tuple[bytes, bytes]]:
    """For each sample, digests of the question about it (with the comparator), and of its images."""
    keys = []
    for place in range(len(inputs)):
        asked: list[str] = [comparator.version, inputs.prompts[place]]
        if "metadata" in comparator.needs:
            asked.append(json.dumps(inputs.metadata[place], sort_keys=True, default=str))
        if "source_images" in comparator.needs and inputs.source_images is not None:
            asked += [_digest(image[None]).hex() for image in inputs.source_images[place]]
        text = "".join(f"{len(part)}:{part}" for part in asked)
        film = inputs.videos if "videos" in comparator.needs else None
        images = inputs.images[place : place + 1] if film is None else film[place]
        keys.append((hashlib.sha256(text.encode()).digest(), _digest(images)))
    return keys


def _digest(images: Tensor) -> bytes:
    pixels = to_uint8(images)
    return hashlib.sha256(f"{pixels.shape}".encode() + pixels.tobytes()).digest()
