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

import inspect
import math
from collections.abc import Callable, Mapping
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
from flowrl.prompts.loading import Prompt
from flowrl.rewards.base import RewardInputs, load_target
from flowrl.rewards.base.outputs import lacks_numbers
from flowrl.rewards.base.prompt_needs import lack_of
from flowrl.rewards.base.specs import build_nested, nested_options
from flowrl.rewards.base.user_file import call_function, content_of, load_function
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
class ScorerComparator:
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

    def lacks(self, prompt: Prompt) -> str | None:
        """What the reward needs."""
        return lack_of(nested_options(self.reward, self.options), prompt)

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
