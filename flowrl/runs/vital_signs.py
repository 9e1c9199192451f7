"""Vital signs of a run: what is tested; in which words a failure is told, and what helps, says `vital_signs.yaml`.

`SIGNS` are numbers of the log, judged when the run is looked at: by the report and by `flowrl doctor`. `ALARMS` are
judged in each iteration or evaluation by what that one knows: the watchdog tells them, and `flowrl doctor` tells which
of them ruin a run.
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
"""Of a LoRA; trained ones stay far below 10."""
COLLAPSED, COLLAPSED_FOR = 0.25, 3
"""Share of the first iterations' diversity, and iterations in a row below it."""
BLURRED = 0.7
"""Share of the first evaluation's JPEG files, in bytes, below which images have lost detail."""
EQUAL_LIMIT = 4
"""Iterations in a row whose groups all agree, each in itself, before the run stops."""
JUMP = 1000.0
"""Times what was usual."""
HUGE = 1e9
"""Of a reward: float32 leaves no digits for what images differ in."""
ALIKE, FAULT = 1e-3, 0.1
"""Nats per latent dimension between the log-densities of a rollout and of its update: bfloat16 in one of two attention
kernels gives up to the first; the second is another policy."""
_WORDS = read_mapping(Path(__file__).with_suffix(".yaml"))
DISAGREE: str = _WORDS["disagree"]
EQUAL: str = _WORDS["equal"]
COMPARED: str = _WORDS["compared"]
CHECKS: dict[str, str] = _WORDS["checks"]
"""What to look at where the gradient is 0, by what a run learns from."""


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
    """What `is_healthy` looks at, in words."""


def recent_mean(values: Values) -> float:
    """Mean of the last iterations."""
    return float(values[-RECENT:].mean())


def _words(kind: str, name: str) -> dict[str, Any]:
    """What `vital_signs.yaml` says of a sign or an alarm, its cure whole."""
    words: dict[str, Any] = _WORDS[kind][name]
    return words | {"cure": words["cure"].replace("{disagree}", DISAGREE).replace("{compared}", COMPARED)}


def _last(values: Values) -> str:
    return "the iteration" if len(values) == 1 else f"the last {min(len(values), RECENT)} iterations"


def _highest(values: Values) -> str:
    median = number(float(np.median(values)))
    return f"{number(float(values[-RECENT:].max()))} at most over {_last(values)}, with a median of {median}"


def _without_spikes(values: Values) -> bool:
    """No recent value beyond ten times the run's median; too early to say within the first iterations."""
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
    """What is wrong in one iteration or evaluation: its test on numbers, its words, and what to change."""

    test: Callable[..., bool]
    words: str
    """With the names of what is told in braces."""
    cure: str
    ruins: bool = False
    """Whether what the run makes from then on is worth nothing; others may pass."""


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
"""Name of a warning -> what it is."""


def alarm(name: str, *tested: object, **told: object) -> dict[str, str]:
    """The warning of that name in words, where its test holds."""
    one = ALARMS[name]
    return {name: f"{one.words.format(**told)}{one.cure}"} if one.test(*tested) else {}
