"""Benchmarks that are a list of prompts and a panel of scorers: the mean of each scorer over all images.

DrawBench with preference scorers, the PickScore test of Flow-GRPO, its OCR test and HPDv2's prompts are of this kind.
None of the prompt lists is shipped: their licences are unknown or forbid it.

A scorer's number is comparable only on one scale and with one version of the scorer; `Panel.scale` says what papers
print.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from flowrl.statistics.bootstrap import UNKNOWN, Interval
from flowrl.statistics.means import VERDICTS, Ends, ends_of, mean_interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """A benchmark: what it is called, its scorers, where its prompts are, and what to know of published numbers.

    Attributes:
        title: for people.
        rewards: names in `flowrl.rewards.REWARDS`, those that papers report and that run in this process.
        prompts: number of prompts of the published list.
        where: how to get the list.
        scale: how published numbers are written.
    """

    title: str
    rewards: tuple[str, ...]
    prompts: int
    where: str
    scale: str


PANELS: dict[str, Panel] = {
    "drawbench": Panel(
        title="DrawBench",
        rewards=("pick_score", "clip_score", "hps", "image_reward", "aesthetic"),
        prompts=200,
        where="dataset/drawbench/test.txt in the code of DiffusionNFT, TurningPoint-GRPO or Adv-GRPO, each prompt five "
        "times",
        scale="PickScore is printed raw (18 to 26), divided by 26 or by 100; HPS as a cosine (0.2 to 0.4) or times "
        "100; CLIPScore depends on the backbone; UnifiedReward differs between papers on the same model.",
    ),
    "pick_score_test": Panel(
        title="PickScore test prompts",
        rewards=("pick_score",),
        prompts=2048,
        where="dataset/pickscore/test.txt in the code of Flow-GRPO; dataset/pickscore_sfw is a safer one of 1024",
        scale="raw (18 to 26) in Flow-GRPO; as a training reward it is divided by 26.",
    ),
    "ocr": Panel(
        title="OCR accuracy",
        rewards=("ocr",),
        prompts=1018,
        where="dataset/ocr/test.txt in the code of Flow-GRPO",
        scale="the mean of 1 - normalised edit distance, called accuracy; published ones were read by PaddleOCR 2.9.1, "
        "and another reader moves them.",
    ),
    "hpdv2": Panel(
        title="HPDv2 prompts",
        rewards=("hps", "pick_score", "image_reward", "clip_score"),
        prompts=400,
        where="the 400 test prompts in the code of MixGRPO; the full benchmark has 3200 in four styles",
        scale="HPS v2.1 is a cosine (0.25 to 0.39); the leaderboard of HPS v2 prints it times 100.",
    ),
}

VIDEO_PANELS: dict[str, Panel] = {
    "video_align": Panel(
        title="VideoAlign",
        rewards=("video_align",),
        prompts=1000,
        where="DanceGRPO evaluates on 1,000 prompts held out of the 50,000 video prompts in its code; which ones is "
        "not known, so hold out your own",
        scale="the sum of the normalised dimensions, each about N(0, 1); DanceGRPO plots them de-normalised, VQ as "
        "VQ * 2.2476 + 3.6757 and MQ as MQ * 1.3811 + 1.1646.",
    ),
    "videogen_eval": Panel(
        title="VideoGen-Eval",
        rewards=("video_align",),
        prompts=700,
        where="VGenEval_T2V.xlsx in the code of AILab-CVC/VideoGen-Eval, its prompts one a line",
        scale="VideoGen-Eval's own judge is an agent of language models (arXiv 2503.23452), which is not here: these "
        "scores are VideoAlign's. Its 700 prompts include those that start from an image.",
    ),
}
"""The same of benchmarks for models of videos."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScorerMean:
    """A scorer's mean over the images that it could score, and how many it could not."""

    interval: Interval
    scored: int
    failed: int


def panel_means(values: Mapping[str, ArrayLike], prompts: Sequence[Hashable]) -> dict[str, ScorerMean]:
    """The mean of each scorer over all images, with its interval over prompts, of a single prompt over its images.

    Args:
        values: [N] by scorer, NaN where it failed: such an image is in no mean, and is counted.
        prompts: [N] what tells the prompts apart.
    """
    return {name: _mean(name, given, prompts, VERDICTS) for name, given in values.items()}


def _mean(name: str, given: ArrayLike, prompts: Sequence[Hashable], ends: Ends | None) -> ScorerMean:
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
    """After minus before for each scorer that both have, over the images (the same prompts and samples) of both.

    An image that failed on one side is left out of both. NaN where nothing is left.
    """
    found = {}
    for name in (name for name in after if name in before):
        first, last = (np.asarray(side[name], dtype=np.float64) for side in (before, after))
        found[name] = _mean(name, last - first, prompts, ends_of(first, last, changes=True)).interval
    return found


def distinct(prompts: Sequence[str]) -> list[str]:
    """Prompts without repetitions, in order: circulating lists hold each several times, once for each image."""
    return list(dict.fromkeys(prompts))
