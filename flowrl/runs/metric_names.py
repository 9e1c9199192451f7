"""The meaning of every number in `metrics.jsonl`, in the trackers and in the report's charts.

A row of `metrics.jsonl` is one iteration, or one evaluation, whose names begin with ``eval/``. A name in angle brackets
is a placeholder: ``reward/<name>`` is ``reward/pick_score`` if you train on `pick_score`.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from flowrl.config.strict_yaml import read_mapping

__all__ = ["METRICS", "meaning_of"]

METRICS: dict[str, dict[str, str]] = read_mapping(Path(__file__).with_suffix(".yaml"))
"""Group -> name -> meaning, from `metric_names.yaml`."""


def meaning_of(name: str) -> str | None:
    """The meaning of a metric; None if runs do not log it.

    An exact name takes precedence over one with angle brackets, and a longer name over a shorter one.

    >>> meaning_of("reward/pick_score/invalid_ratio")
    'share of images for which this reward failed'
    """
    return next((meaning for pattern, meaning in _patterns() if pattern.fullmatch(name)), None)


@functools.cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    """Names as patterns with their meanings, the most particular first."""
    found = {name: meaning for group in METRICS.values() for name, meaning in group.items()}
    order = sorted(found, key=lambda name: (name.count("<"), -len(re.sub(r"<\w+>", "", name))))
    return [(re.compile(re.sub(r"<\w+>", "[^/]+", name)), found[name]) for name in order]
