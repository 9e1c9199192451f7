"""Which of two samples of one prompt is better: by a scorer, a judge, or a function of yours.

The option `comparator` of the pairwise rewards is a mapping of one of three forms:

    {reward: pick_score, options: {...}, tie_band: 0.01}         the greater value wins
    {judge: {server: URL, model: NAME}, style: answer_tag}       a judge is shown both (`flowrl.rewards.judges.chat`)
    {file: my/judges.py, function: better, options: {...}}       yours:

    def better(first_images, second_images, prompts, metadata, *, option=1):     # images float32 [n, 3, H, W]
        return [...]            # n numbers: probability that the first is better, 0.5 for a tie, NaN where it failed

Letters: n pairs (first, second) of places in the batch; B samples of the batch.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from flowrl.config.options import check_options
from flowrl.rewards import Reward, RewardInputs
from flowrl.rewards.nested import build_nested, check_nested
from flowrl.rewards.user_file import _load, _users_line

Pairs = Int64[np.ndarray, " n 2"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Verdicts:
    """What became of n comparisons.

    Attributes:
        first_wins: float64 [n], the probability that the first is better; 0.5 is a tie, NaN a failure.
        errors: [n] why one failed, None where it did not.
    """

    first_wins: Float64[np.ndarray, " n"]
    errors: tuple[str | None, ...]


class Comparator(Protocol):
    """What compares: `needs` names the fields of `RewardInputs` that it reads, `version` what exactly it computes.

    `waits` is that of `Reward`. `free` says that a pair costs nothing once the samples are scored, so that all pairs
    may be asked at once.
    """

    @property
    def needs(self) -> frozenset[str]: ...
    @property
    def waits(self) -> bool: ...
    @property
    def free(self) -> bool: ...
    @property
    def version(self) -> str: ...

    def compare(self, inputs: RewardInputs, pairs: Pairs) -> Verdicts:
        """Compares pairs of places in the batch, the first of each shown first."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionComparator:
    """A `Comparator` made of a function and its description."""

    verdicts: Callable[[RewardInputs, Pairs], Verdicts]
    needs: frozenset[str]
    version: str
    waits: bool = False
    free: bool = False

    def compare(self, inputs: RewardInputs, pairs: Pairs) -> Verdicts:
        return self.verdicts(inputs, pairs)


def check_comparator(comparator: Any, *, owner: str) -> None:
    """Checks the option `comparator`. Neither calls a server nor loads weights; imports a user's file.

    Raises:
        ValueError: naming what was given and what is allowed.
    """
    factory, check = _functions(comparator, owner)
    check_options(factory, comparator, owner=f"{owner}, comparator", reserved=("device", "owner"))
    check(**comparator, owner=f"{owner}, comparator")


def build_comparator(comparator: Mapping[str, Any], *, device: torch.device, owner: str) -> Comparator:
    """Makes what the option `comparator` describes.

    Raises:
        ValueError: as `check_comparator`, or a model cannot be loaded.
    """
    check_comparator(comparator, owner=owner)
    built: Comparator = _functions(comparator, owner)[0](device=device, owner=f"{owner}, comparator", **comparator)
    return built


def check_soft(comparator: Mapping[str, Any], *, soft: bool, owner: str) -> None:
    """Refuses `soft` where all verdicts are 0, 1/2 or 1 anyway, and a temperature where `soft` is not set."""
    temperature = comparator.get("temperature")
    hard = ("reward" in comparator and temperature is None) or (
        "judge" in comparator and comparator.get("style") != "logprobs"
    )
    if soft and hard:
        raise ValueError(
            f"{owner}: soft takes probabilities as they are, and this comparator gives 0, 1/2 and 1 only: set "
            f"temperature beside reward, or style: logprobs beside judge, or leave out soft."
        )
    if temperature is not None and not soft:
        raise ValueError(f"{owner}: the comparator's temperature ({temperature}) means nothing without soft: true.")


def _functions(comparator: Any, owner: str) -> tuple[Callable[..., Any], Callable[..., None]]:
    from flowrl.rewards.comparing import judge_comparator

    forms: dict[str, tuple[Callable[..., Any], Callable[..., None]]] = {
        "reward": (scorer_comparator, _check_scorer),
        "judge": (judge_comparator.judge_comparator, judge_comparator.check),
        "file": (file_comparator, _check_file),
    }
    found = [key for key in forms if isinstance(comparator, Mapping) and key in comparator]
    if len(found) != 1:
        raise ValueError(
            f"{owner}: comparator must be a mapping with one of reward, judge, or file and function, such as "
            f"{{judge: {{server: http://127.0.0.1:8000/v1, model: NAME}}}}, got {comparator!r}."
        )
    return forms[found[0]]


# ---- a scorer ----------------------------------------------------------------------------------------------------


def scorer_comparator(
    *,
    device: torch.device,
    owner: str,
    reward: str,
    options: Mapping[str, Any] | None = None,
    tie_band: float = 0.0,
    temperature: float | None = None,
) -> Comparator:
    """The sample with the greater value wins.

    Args:
        device: where the reward runs.
        owner: who wants it, for messages.
        reward: a built-in reward of kind pointwise or remote.
        options: its options.
        tie_band: values that differ by no more are a tie.
        temperature: gives `sigmoid((s_1 - s_2) / temperature)` instead, for `soft: true`.
    """
    inner = build_nested(reward, options, device=device, owner=owner)
    return FunctionComparator(
        verdicts=partial(_by_score, reward=inner, tie_band=tie_band, temperature=temperature),
        needs=inner.needs,
        version=f"scorer:tie_band-{tie_band:g}:temperature-{temperature}:{inner.version}",
        waits=inner.waits,
        free=True,
    )


def _check_scorer(
    *,
    owner: str,
    reward: str,
    options: Mapping[str, Any] | None = None,
    tie_band: float = 0.0,
    temperature: float | None = None,
) -> None:
    if not (math.isfinite(tie_band) and tie_band >= 0):
        raise ValueError(f"{owner}: tie_band must be 0 or more, got {tie_band}.")
    if temperature is not None and not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"{owner}: temperature must be positive or null, got {temperature}.")
    if temperature is not None and tie_band:
        raise ValueError(f"{owner}: tie_band means nothing with a temperature, whose verdicts are smooth: give one.")
    check_nested(reward, options, owner=owner)


@torch.no_grad()
def _by_score(
    inputs: RewardInputs, pairs: Pairs, *, reward: Reward, tie_band: float, temperature: float | None
) -> Verdicts:
    places, where = np.unique(pairs, return_inverse=True)
    output = reward(inputs[torch.from_numpy(places)])
    values = output.values.detach().double().cpu().numpy()
    values = np.where(output.valid.cpu().numpy(), values, np.nan)
    first, second = values[where.reshape(pairs.shape)].T
    difference = first - second
    if temperature is None:
        wins = np.where(np.abs(difference) <= tie_band, 0.5, (difference > 0).astype(np.float64))
    else:
        wins = 0.5 * (1 + np.tanh(difference / (2 * temperature)))  # the sigmoid, without overflow
    failed = np.isnan(difference)
    # Which item failed for which reason is not known to a reward's caller, unless all failed for the same.
    word = next(iter(output.errors)) if len(output.errors) == 1 else "scorer_failed"
    return Verdicts(first_wins=np.where(failed, np.nan, wins), errors=tuple(word if f else None for f in failed))


# ---- a user's function -------------------------------------------------------------------------------------------


def file_comparator(
    *, device: torch.device, owner: str, file: str, function: str, options: Mapping[str, Any] | None = None
) -> Comparator:
    """A function of a user's file; see the module. A keyword-only parameter `device` is given the run's.

    Args:
        device: see above.
        owner: who wants it, for messages.
        file: path of a Python file.
        function: name of a function at its top level, with four positional parameters.
        options: its keyword-only arguments.
    """
    _check_file(owner=owner, file=file, function=function, options=options)
    judge, chosen = _load(file, function), dict(options or {})
    version = f"user_file:{Path(file).name}:{function}:{_fingerprint(file)}:{dict(sorted(chosen.items()))!r}"
    if "device" in inspect.signature(judge).parameters:
        chosen["device"] = device
    return FunctionComparator(
        verdicts=partial(_by_function, function=partial(judge, **chosen), file=file, where=f"{file}:{function}"),
        needs=frozenset({"images", "prompts", "metadata"}),
        version=version,
    )


def _check_file(*, owner: str, file: str, function: str, options: Mapping[str, Any] | None = None) -> None:
    if options is not None and not isinstance(options, Mapping):
        raise ValueError(f"{owner}: options must be a mapping or null, got {options!r}.")
    judge = _load(file, function)
    parameters = list(inspect.signature(judge).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) != 4 or any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        given = ", ".join(str(p) for p in parameters)
        raise ValueError(
            f"{owner}: the parameters of {file}:{function} must be (first_images, second_images, prompts, metadata), "
            f"and options after a bare *, got ({given})."
        )
    check_options(judge, options or {}, owner=f"{owner}, {file}:{function}")


def _fingerprint(file: str) -> str:
    return f"sha256-{hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]}"


@torch.no_grad()
def _by_function(
    inputs: RewardInputs, pairs: Pairs, *, function: Callable[..., Any], file: str, where: str
) -> Verdicts:
    first, second = (torch.from_numpy(pairs[:, side].copy()).to(inputs.images.device) for side in (0, 1))
    images: Tensor = inputs.images.detach()
    places: list[int] = pairs[:, 0].tolist()
    prompts, metadata = [inputs.prompts[i] for i in places], [inputs.metadata[i] for i in places]
    try:
        result = function(images[first], images[second], prompts, metadata)
    except Exception as error:  # whatever a user's function raises, the message must lead there
        raise ValueError(f"comparator {where} raised {_users_line(error, file)}") from error
    try:
        if isinstance(result, Tensor):
            result = result.detach().cpu()
        wins = np.array([math.nan if v is None else float(v) for v in result], dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"comparator {where} must return {len(pairs)} numbers, one a pair: {error}") from error
    if wins.shape != (len(pairs),):
        raise ValueError(f"comparator {where} must return {len(pairs)} numbers, one a pair, got {len(wins)}.")
    if bool(((wins < 0) | (wins > 1)).any()):
        worst = float(wins[(wins < 0) | (wins > 1)][0])
        raise ValueError(
            f"comparator {where} returned {worst}: return the probability that the first is better, in [0, 1], 0.5 for "
            f"a tie and NaN for a failure."
        )
    return Verdicts(first_wins=wins, errors=tuple("no_verdict" if math.isnan(w) else None for w in wins))
