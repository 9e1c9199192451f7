"""Which of two samples of one prompt is better: by a scorer, a judge, or a function of yours.

The option `comparator` of the pairwise rewards is a mapping of one of three forms:

    {reward: pick_score, options: {...}, tie_band: 0.01}         the greater value wins
    {judge: {server: URL, model: NAME}, style: answer_tag}       a judge is shown both (`flowrl.rewards.judges.chat`)
    {file: my/judges.py, function: better, options: {...}}       yours:

    def better(first_images, second_images, prompts, metadata, *, option=1):     # images float32 [n, 3, H, W]
        return [...]            # n numbers: probability that the first is better, 0.5 for a tie, NaN if it failed

Letters: n pairs (first, second) of places in the batch; B samples of the batch.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from flowrl.config.options import build_options, options_class
from flowrl.config.sections import at_least, positive
from flowrl.rewards.base import RewardInputs, load_target, to_uint8
from flowrl.rewards.base.outputs import lacks_numbers
from flowrl.rewards.base.specs import InnerOptions, build_nested, nested_options
from flowrl.rewards.base.user_file import call_function, content_of, load_function
from flowrl.runtime.randomness import counter_seed
from flowrl.runtime.shapes import Float64, Int64

Pairs = Int64[np.ndarray, " n 2"]
Gives = Literal["wins", "probabilities", "either"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Verdicts:
    """The results of n comparisons."""

    first_wins: Float64[np.ndarray, " n"]
    """float64 [n], the probability that the first is better; 0.5 is a tie, NaN a failure."""
    errors: tuple[str | None, ...]
    """[n] why one failed, None if it did not."""
    categories: tuple[Mapping[str, float], ...] = ()
    """[n] the same probability by category, empty where none was named; () of comparators without them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparator:
    """What compares pairs of places in the batch, the first of each shown first; `needs`, `version` and `waits` as in
    `Reward`. `free`: pairs cost nothing once samples are scored, so all may be asked at once."""

    compare: Callable[[RewardInputs, Pairs], Verdicts]
    needs: frozenset[str]
    version: str
    waits: bool = False
    free: bool = False


COMPARATORS = {
    "reward": "flowrl.rewards.comparing.comparators:ScorerComparator",
    "judge": "flowrl.rewards.comparing.judge_comparator:JudgeComparator",
    "file": "flowrl.rewards.comparing.comparators:FileComparator",
}
"""Option that only a form has -> "module:Class", the form's options: a frozen dataclass, see `ComparatorOptions`."""


class ComparatorOptions(Protocol):
    """Options of a comparator; `gives` names the kind of its verdicts: wins (0, 1/2, 1) or probabilities."""

    @property
    def gives(self) -> Gives: ...

    def build(self, device: torch.device) -> Comparator:
        """Makes the comparator; loads its weights, if any."""


def comparator_options(comparator: Mapping[str, Any]) -> ComparatorOptions:
    """The checked option `comparator`. Neither calls a server nor loads weights; imports a user's file."""
    found = [form for form in COMPARATORS if form in comparator]
    if len(found) != 1:
        raise ValueError(
            f"comparator must be a mapping with one of reward, judge, or file and function, such as "
            f"{{judge: {{server: http://127.0.0.1:8000/v1, model: NAME}}}}, got {comparator!r}."
        )
    made: ComparatorOptions = build_options(load_target(COMPARATORS[found[0]]), comparator, owner="comparator")
    return made


@dataclass(frozen=True, kw_only=True, slots=True)
class ScorerComparator(InnerOptions):
    """The sample with the greater value wins."""

    reward: str
    """A built-in reward of kind pointwise or remote."""
    options: Mapping[str, Any] | None = None
    """Its options."""
    tie_band: float = 0.0
    """Values that differ by at most this are a tie."""
    temperature: float | None = None
    """Gives `sigmoid((s_1 - s_2) / temperature)` instead, for `soft: true`."""

    def __post_init__(self) -> None:
        at_least(0, self, "tie_band")
        positive(self, "temperature")
        if self.temperature is not None and self.tie_band:
            raise ValueError("tie_band means nothing with a temperature, whose verdicts are smooth: give one.")
        nested_options(self.reward, self.options)

    @property
    def gives(self) -> Gives:
        """Wins without a temperature, otherwise probabilities."""
        return "wins" if self.temperature is None else "probabilities"

    def build(self, device: torch.device) -> Comparator:
        """Makes the comparator."""
        inner = build_nested(self.reward, self.options, device=device, owner="comparator")

        @torch.no_grad()
        def by_score(inputs: RewardInputs, pairs: Pairs) -> Verdicts:
            places, where = np.unique(pairs, return_inverse=True)
            output = inner(inputs[torch.from_numpy(places)])
            values = output.values.detach().cpu().double().numpy()
            values = np.where(output.valid.cpu().numpy(), values, np.nan)
            first, second = values[where.reshape(pairs.shape)].T
            difference = first - second
            if self.temperature is None:
                wins = np.where(np.abs(difference) <= self.tie_band, 0.5, (difference > 0).astype(np.float64))
            else:
                wins = 0.5 * (1 + np.tanh(difference / (2 * self.temperature)))  # the sigmoid, without overflow
            failed = np.isnan(difference)
            # A reward's caller knows why an item failed only if all items failed for the same reason.
            word = next(iter(output.errors)) if len(output.errors) == 1 else "scorer_failed"
            return Verdicts(
                first_wins=np.where(failed, np.nan, wins), errors=tuple(word if f else None for f in failed)
            )

        return Comparator(
            compare=by_score,
            needs=inner.needs,
            version=f"scorer:tie_band-{self.tie_band:g}:temperature-{self.temperature}:{inner.version}",
            waits=inner.waits,
            free=True,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FileComparator:
    """A user's function; see the module. A keyword-only parameter `device` receives the run's."""

    file: str
    """Path of a Python file."""
    function: str
    """Name of a function at its top level, with four positional parameters."""
    options: Mapping[str, Any] | None = None
    """Its keyword-only arguments."""

    def __post_init__(self) -> None:
        judge = load_function(self.file, self.function)
        parameters = list(inspect.signature(judge).parameters.values())
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(positional) != 4 or any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
            given = ", ".join(str(p) for p in parameters)
            raise ValueError(
                f"the parameters of {self.file}:{self.function} must be (first_images, second_images, prompts, "
                f"metadata), and options after a bare *, got ({given})."
            )
        build_options(
            options_class(judge, reserved=("device",)), self.options or {}, owner=f"{self.file}:{self.function}"
        )

    @property
    def gives(self) -> Gives:
        """The kind of verdicts that the user's function returns: any."""
        return "either"

    def build(self, device: torch.device) -> Comparator:
        """Makes the comparator."""
        judge, chosen = load_function(self.file, self.function), dict(self.options or {})
        digest = content_of(self.file)
        shown = f"{Path(self.file).name}:{self.function}:sha256-{digest}:{dict(sorted(chosen.items()))!r}"
        if "device" in inspect.signature(judge).parameters:
            chosen["device"] = device
        where = f"comparator {self.file}:{self.function}"

        @torch.no_grad()
        def by_function(inputs: RewardInputs, pairs: Pairs) -> Verdicts:
            first, second = torch.from_numpy(pairs.T.copy()).to(inputs.images.device)
            images: Tensor = inputs.images.detach()
            places: list[int] = pairs[:, 0].tolist()
            result = call_function(
                partial(judge, **chosen),
                images[first],
                images[second],
                [inputs.prompts[i] for i in places],
                [deepcopy(inputs.metadata[i]) for i in places],
                file=self.file,
                where=where,
                counters=("comparator", inputs.iteration, *inputs.group_ids[:1].tolist(), len(pairs), *places[:1]),
            )
            wanted = f"{where} must return {len(pairs)} numbers, one per pair"
            if isinstance(result, Tensor) and (said := lacks_numbers(result)):
                raise ValueError(f"{wanted}, and returned {said}.")
            try:
                if isinstance(result, Tensor):
                    result = result.detach().cpu()
                wins = np.array([math.nan if v is None else float(v) for v in result], dtype=np.float64)
            except (TypeError, ValueError, RuntimeError, OverflowError) as error:
                raise ValueError(f"{wanted}: {error}") from error
            if wins.shape != (len(pairs),):
                raise ValueError(f"{wanted}, got {len(wins)}.")
            if bool((outside := (wins < 0) | (wins > 1)).any()):
                raise ValueError(
                    f"{where} returned {float(wins[outside][0])}: return the probability that the first is better, in "
                    f"[0, 1], 0.5 for a tie and NaN for a failure."
                )
            return Verdicts(first_wins=wins, errors=tuple("no_verdict" if math.isnan(w) else None for w in wins))

        return Comparator(
            compare=by_function,
            needs=frozenset({"images", "prompts", "metadata"}),
            version=f"user_file:{shown}",
        )


# ---- the comparisons of a batch --------------------------------------------------------------------------------------


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
