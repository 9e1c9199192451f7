"""The meaning of every number in `metrics.jsonl`, in the trackers and in the report's charts.

A row of `metrics.jsonl` is one iteration, or one evaluation, whose names begin with ``eval/``. A name in angle brackets
is a placeholder: ``reward/<name>`` is ``reward/pick_score`` if you train on `pick_score`.
"""

from __future__ import annotations

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
    found = {name: meaning for group in METRICS.values() for name, meaning in group.items()}
    order = sorted(found, key=lambda known: (known.count("<"), -len(re.sub(r"<\w+>", "", known))))
    return next((found[one] for one in order if re.fullmatch(re.sub(r"<\w+>", "[^/]+", one), name)), None)
