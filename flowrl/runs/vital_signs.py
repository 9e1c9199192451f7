"""Tests of a run's vital signs; `vital_signs.yaml` has the words for a failure, and what helps.

The report and `flowrl doctor` judge `SIGNS` from the numbers of the log. The watchdog judges `ALARMS` in each iteration
or evaluation from its own numbers, and `flowrl doctor` says which of them ruin a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.config.strict_yaml import read_mapping
from flowrl.rendering.markup import number
from flowrl.runtime.shapes import Float

Values = Float[np.ndarray, " n"]
RECENT = 10
"""Iterations that a shown value averages."""
MOSTLY = 0.5
"""Share of an iteration's images."""
LARGE_WEIGHT = 20.0
"""Weight of a LoRA that is too large; trained ones stay far below 10."""
COLLAPSED, COLLAPSED_FOR = 0.25, 3
"""Share of the first iterations' diversity, and iterations in a row below it."""
BLURRED = 0.7
"""Share of the first evaluation's JPEG files, in bytes, below which images have lost detail."""
EQUAL_LIMIT = 4
"""Iterations in a row in which every group has equal rewards, before the run stops."""
JUMP = 1000.0
"""Factor of a jump over the usual value."""
HUGE = 1e9
"""Size of a reward at which float32 has no digits left for differences between images."""
ALIKE, FAULT = 1e-3, 0.1
"""Nats per latent dimension between the log-densities of a rollout and of its update: bfloat16 in one of two attention
kernels gives up to the first; the second means another policy."""
_WORDS = read_mapping(Path(__file__).with_suffix(".yaml"))
DISAGREE: str = _WORDS["disagree"]
EQUAL: str = _WORDS["equal"]
COMPARED: str = _WORDS["compared"]
CHECKS: dict[str, str] = _WORDS["checks"]
"""What to check if the gradient is 0, by what a run learns from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sign:
    """One vital sign: its metric, what it means, what is healthy, the test of that, and what to change."""

    key: str
    title: str
    meaning: str
    healthy: str
    is_healthy: Callable[[Values], bool]
    cure: str
    tested: Callable[[Values], str] = lambda values: f"{number(recent_mean(values))} on average over {_last(values)}"
    """The value that `is_healthy` tests, in words."""


def recent_mean(values: Values) -> float:
    """Mean of the last iterations."""
    return float(values[-RECENT:].mean())


def _words(kind: str, name: str) -> dict[str, Any]:
    """The entry of a sign or an alarm in `vital_signs.yaml`, with its full cure."""
    words: dict[str, Any] = _WORDS[kind][name]
    return words | {"cure": words["cure"].replace("{disagree}", DISAGREE).replace("{compared}", COMPARED)}


def _last(values: Values) -> str:
    return "the iteration" if len(values) == 1 else f"the last {min(len(values), RECENT)} iterations"


def _highest(values: Values) -> str:
    median = number(float(np.median(values)))
    return f"{number(float(values[-RECENT:].max()))} at most over {_last(values)}, with a median of {median}"


def _without_spikes(values: Values) -> bool:
    """Whether no recent value exceeds ten times the run's median; too early to say in the first iterations."""
    return len(values) < 2 * RECENT or bool(values[-RECENT:].max() <= 10 * max(float(np.median(values)), 1e-12))


_TESTS: dict[str, dict[str, Any]] = {
    "ratio_mean": {
        "is_healthy": lambda values: abs(float(values[0]) - 1) < 0.01 and abs(recent_mean(values) - 1) < 0.01,
        "tested": lambda values: (
            f"{number(float(values[0]), 4)} at first and {number(recent_mean(values), 4)} on average over "
            f"{_last(values)}"
        ),
    },
    "clip_fraction": {"is_healthy": lambda values: recent_mean(values) < 0.3},
    "kl": {"is_healthy": _without_spikes, "tested": _highest},
    "grad_norm": {"is_healthy": _without_spikes, "tested": _highest},
    "zero_std_ratio": {"is_healthy": lambda values: recent_mean(values) < 0.5},
    "invalid_ratio": {
        "is_healthy": lambda values: float(values.max()) == 0,
        "tested": lambda values: f"{number(float(values.max()))} at most",
    },
}
SIGNS = tuple(Sign(key=key, **_words("signs", key), **tests) for key, tests in _TESTS.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """A fault of one iteration or evaluation: its test on numbers, its words, and what to change."""

    test: Callable[..., bool]
    words: str
    """Words of the warning, with names of values in braces."""
    cure: str
    ruins: bool = False
    """Whether the run is worthless from then on; other alarms may be temporary."""


_ALARMED: dict[str, Callable[..., bool]] = {
    "constant_images": lambda share: share > MOSTLY,
    "collapse": lambda steady, narrow: steady and narrow >= COLLAPSED_FOR,
    "exploding_rewards": lambda largest, usual: largest > HUGE or (usual > 0 and largest > JUMP * usual),
    "one_image": lambda largest, second: largest > JUMP * max(second, 1.0),
    "vanishing_rewards": lambda spread, eps: 0 < spread < eps,
    "large_weights": lambda largest: largest > LARGE_WEIGHT,
    "zero_gradient": lambda norm, live, equal: norm == 0 and live > 0 and equal < 1,
    "ratio_deviation": lambda deviation: deviation > ALIKE,
    "reward_hacking": bool,
    "blur": lambda sure, share: sure and share < BLURRED,
    "equal_groups": lambda iterations, values: iterations >= EQUAL_LIMIT - 1 and len(values) > 1,
    "diverged": bool,
}
ALARMS = {name: Alarm(test=test, **_words("alarms", name)) for name, test in _ALARMED.items()}
"""Name of a warning -> its alarm."""


def alarm(name: str, *tested: object, **told: object) -> dict[str, str]:
    """The warning of that name in words, if its test holds."""
    one = ALARMS[name]
    return {name: f"{one.words.format(**told)}{one.cure}"} if one.test(*tested) else {}
