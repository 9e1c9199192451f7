"""Benchmarks that are a list of prompts and a panel of scorers: the mean of each scorer over all images.

DrawBench with preference scorers, the PickScore test of Flow-GRPO, its OCR test and HPDv2's prompts are of this kind.
None of the prompt lists is shipped: their licences are unknown or forbid it.

A scorer's number compares only on one scale and with one version; `Panel.scale` says what papers print.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from flowrl.runtime.files import read_json
from flowrl.statistics.bootstrap import UNKNOWN, Interval
from flowrl.statistics.means import VERDICTS, Range, ends_of, mean_interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """A benchmark: its name, its scorers, the place of its prompts, and notes on published numbers."""

    title: str
    """For people."""
    rewards: tuple[str, ...]
    """Names in `flowrl.rewards.REWARDS`, those that papers report and that run in this process."""
    prompts: int
    """Number of prompts of the published list."""
    where: str
    """How to get the list."""
    scale: str
    """How published numbers are written."""


PANELS, VIDEO_PANELS = (
    {name: Panel(**{**known, "rewards": tuple(known["rewards"])}) for name, known in panels.items()}
    for panels in read_json(Path(__file__).with_suffix(".json")).values()
)
"""The benchmarks by name, for models of images and for models of videos."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScorerMean:
    """A scorer's mean over the images that it could score, and how many it could not."""

    interval: Interval
    scored: int
    failed: int


def panel_means(values: Mapping[str, ArrayLike], prompts: Sequence[Hashable]) -> dict[str, ScorerMean]:
    """The mean of each scorer over all images (`values` [N]; NaN, a failure, is counted and in no mean), with its
    interval over `prompts` [N], labels; of a single prompt over its images."""
    return {name: _mean(name, given, prompts, VERDICTS) for name, given in values.items()}


def _mean(name: str, given: ArrayLike, prompts: Sequence[Hashable], ends: Range | None) -> ScorerMean:
    value_N = np.asarray(given, dtype=np.float64)
    if value_N.shape != (len(prompts),):
        raise ValueError(f"{name}: {list(value_N.shape)} values for {len(prompts)} images: give one for each.")
    known = np.flatnonzero(np.isfinite(value_N)).tolist()
    interval = UNKNOWN
    if known:
        units = [prompts[i] for i in known] if len(set(prompts)) > 1 else None
        interval = mean_interval(value_N[known], units, ends=ends)
    return ScorerMean(interval=interval, scored=len(known), failed=len(prompts) - len(known))


def panel_differences(
    before: Mapping[str, ArrayLike], after: Mapping[str, ArrayLike], prompts: Sequence[Hashable]
) -> dict[str, Interval]:
    """After minus before for each scorer of both, over prompts and samples that failed on neither side; NaN without."""
    found = {}
    for name in (name for name in after if name in before):
        first, last = (np.asarray(side[name], dtype=np.float64) for side in (before, after))
        found[name] = _mean(name, last - first, prompts, ends_of(first, last, changes=True)).interval
    return found


def distinct(prompts: Sequence[str]) -> list[str]:
    """Prompts without repetitions, in order: circulating lists hold each several times, once for each image."""
    return list(dict.fromkeys(prompts))
