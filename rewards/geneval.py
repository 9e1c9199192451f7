"""GenEval's rules as a reward (Flow-GRPO, arXiv 2505.05470, section 5.1) on the detections of a chosen judge."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import UInt8

from flowrl.benchmarks.geneval.detections import Detection
from flowrl.benchmarks.geneval.metadata import parse_record
from flowrl.benchmarks.geneval.rules import graded, strict, verdict
from flowrl.rewards import FunctionReward, Reward, RewardInputs, RewardOutput, output_of, to_uint8
from flowrl.rewards.networks.detectors import Judge, build_judge, check_judge

Credit = Literal["graded", "strict", "official"]


def check(
    *,
    credit: Credit = "graded",
    clip_min: float | None = None,
    judge: str = "shapes",
    detector: str | None = None,
    clip_model: str | None = None,
    reference_position_quirk: bool = True,
) -> None:
    """Refuses option values that are wrong, without loading a detector."""
    check_judge(judge, judge_options(detector=detector, clip_model=clip_model))
    if clip_min is not None and not clip_min < 1.0:
        raise ValueError(f"reward 'geneval': clip_min must be below 1, the best credit there is, got {clip_min}.")


def geneval(
    *,
    device: torch.device,
    credit: Credit = "graded",
    clip_min: float | None = None,
    judge: str = "shapes",
    detector: str | None = None,
    clip_model: str | None = None,
    reference_position_quirk: bool = True,
) -> Reward:
    """Does the image show what its prompt asks for? Prompts must come with their GenEval records.

    An item whose record is missing or cannot be read is invalid, counted as "missing_field".

    Args:
        device: where the judge runs.
        credit: the value. `graded`: partial credit, may be negative (what Flow-GRPO trains on); `strict`: 1 if
            everything is exactly right, else 0; `official`: the benchmark's own verdict, 1 or 0. The other two are
            logged as parts, unclipped.
        clip_min: lower bound of the value, for `graded`, whose negative values count surplus objects; null for none.
        judge: a key of `flowrl.rewards.networks.detectors.JUDGES`: `shapes` for the embedded world's drawings,
            `mask2former` for photos.
        detector: the detection model of judge `mask2former`, a folder or a hub id; null takes the judge's default.
        clip_model: the colour model of judge `mask2former`, likewise.
        reference_position_quirk: see `flowrl.benchmarks.geneval.rules.graded`.
    """
    return geneval_reward(
        build_judge(judge, device=device, options=judge_options(detector=detector, clip_model=clip_model)),
        credit=credit,
        clip_min=clip_min,
        reference_position_quirk=reference_position_quirk,
    )


def judge_options(*, detector: str | None, clip_model: str | None) -> dict[str, str]:
    """The options meant for the judge, those that were given: it refuses what it does not have."""
    given = {"detector": detector, "clip_model": clip_model}
    return {name: value for name, value in given.items() if value is not None}


def geneval_reward(
    judge: Judge, *, credit: Credit = "graded", clip_min: float | None = None, reference_position_quirk: bool = True
) -> Reward:
    """The reward `geneval` on a judge that is at hand."""
    lower = "none" if clip_min is None else f"{clip_min:g}"
    quirk = "quirk" if reference_position_quirk else "clean"
    return FunctionReward(
        name="geneval",
        score=partial(_score, judge=judge, credit=credit, clip_min=clip_min, quirk=reference_position_quirk),
        needs=frozenset({"images", "prompts", "metadata"}),
        version=f"geneval:{credit}:clip_min-{lower}:{quirk}:{judge.version}",
    )


def _score(inputs: RewardInputs, *, judge: Judge, credit: Credit, clip_min: float | None, quirk: bool) -> RewardOutput:
    readable = [_has_record(prompt, record) for prompt, record in zip(inputs.prompts, inputs.metadata, strict=True)]
    places = [i for i, ok in enumerate(readable) if ok]
    images = to_uint8(inputs.images)[places]
    found = judge.detect(images) if places else []
    if len(found) != len(images):
        raise ValueError(f"the judge returned detections of {len(found)} images for {len(images)}.")
    parts = {name: [math.nan] * len(inputs) for name in ("graded", "strict", "official")}
    for i, image, detections in zip(places, images, found, strict=True):
        metadata, color_of = inputs.metadata[i], _remembered(judge, image)
        parts["graded"][i] = graded(detections, metadata, color_of, reference_position_quirk=quirk)
        parts["strict"][i] = float(strict(detections, metadata, color_of))
        parts["official"][i] = float(verdict(detections, metadata, color_of).correct)
    values = parts[credit]
    if clip_min is not None:  # NaN, a failed item, stays: no comparison with it holds
        values = [clip_min if value < clip_min else value for value in values]
    return output_of(values, inputs, parts, [None if ok else "missing_field" for ok in readable])


def _has_record(prompt: str, metadata: dict[str, Any]) -> bool:
    try:
        parse_record({"prompt": prompt, **metadata})
    except ValueError:
        return False
    return True


def _remembered(judge: Judge, image: UInt8[np.ndarray, " h w 3"]) -> Callable[[Detection], str]:
    """The judge's colour function for one image, asked once for each detection: three rules look at the same ones."""
    colors: dict[int, str] = {}

    def color_of(detection: Detection) -> str:
        if id(detection) not in colors:  # the detections outlive this function, so identities are unique
            colors[id(detection)] = judge.color_of(image, detection)
        return colors[id(detection)]

    return color_of
