"""GenEval's rules as a reward (Flow-GRPO, arXiv 2505.05470, section 5.1) on what a chosen detector finds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import UInt8

from flowrl.benchmarks.geneval.detections import Detection
from flowrl.benchmarks.geneval.metadata import parse_record
from flowrl.benchmarks.geneval.rules import graded, strict, verdict
from flowrl.rewards import FunctionReward, Model, Reward, RewardInputs, RewardOutput, output_of, to_uint8
from flowrl.rewards.networks.detectors import Detector, DetectorOptions, detector_options


@dataclass(frozen=True, kw_only=True, slots=True)
class Geneval:
    """Does the image show what its prompt asks for? Prompts must come with their GenEval records.

    An item whose record is missing or cannot be read is invalid, counted as "missing_field".
    """

    credit: Literal["graded", "strict", "official"] = "graded"
    """The value. `graded`: partial credit, may be negative (what Flow-GRPO trains on); `strict`: 1 if everything is
    exactly right, else 0; `official`: the benchmark's own verdict, 1 or 0. The other two are logged as parts,
    unclipped."""
    clip_min: float | None = None
    """Lower bound of the value, for `graded`, whose negative values count surplus objects; null for none."""
    judge: str = "shapes"
    """The detector, a key of `flowrl.rewards.networks.detectors.DETECTORS`: `shapes` for the embedded world's
    drawings, `mask2former` for photos."""
    detector: str | None = None
    """The detection model of `mask2former`, a folder or a hub id; null takes its default."""
    clip_model: str | None = None
    """The colour model of `mask2former`, likewise."""
    reference_position_quirk: bool = True
    """See `flowrl.benchmarks.geneval.rules.graded`."""

    def __post_init__(self) -> None:
        if self.clip_min is not None and not self.clip_min < 1.0:
            raise ValueError(f"clip_min must be below 1, the best credit there is, got {self.clip_min}.")
        self.detection()

    @property
    def models(self) -> tuple[Model, ...]:
        return self.detection().models

    def detection(self) -> DetectorOptions:
        """The options of the detector, those that were given: it refuses what it does not have."""
        given = {"detector": self.detector, "clip_model": self.clip_model}
        return detector_options(self.judge, {name: value for name, value in given.items() if value is not None})

    def build(self, device: torch.device) -> Reward:
        """Loads the detector."""
        return self.on(self.detection().build(device))

    def on(self, detector: Detector) -> Reward:
        """The reward on a detector that is at hand."""
        lower = "none" if self.clip_min is None else f"{self.clip_min:g}"
        quirk = "quirk" if self.reference_position_quirk else "clean"
        return FunctionReward(
            name="geneval",
            score=partial(_score, options=self, detector=detector),
            needs=frozenset({"images", "prompts", "metadata"}),
            version=f"geneval:{self.credit}:clip_min-{lower}:{quirk}:{detector.version}",
        )


def _score(inputs: RewardInputs, *, options: Geneval, detector: Detector) -> RewardOutput:
    readable = [_has_record(prompt, record) for prompt, record in zip(inputs.prompts, inputs.metadata, strict=True)]
    places = [i for i, ok in enumerate(readable) if ok]
    images = to_uint8(inputs.images)[places]
    found = detector.detect(images) if places else []
    if len(found) != len(images):
        raise ValueError(f"the judge returned detections of {len(found)} images for {len(images)}.")
    parts = {name: [math.nan] * len(inputs) for name in ("graded", "strict", "official")}
    quirk = options.reference_position_quirk
    for i, image, detections in zip(places, images, found, strict=True):
        metadata, color_of = inputs.metadata[i], _remembered(detector, image)
        parts["graded"][i] = graded(detections, metadata, color_of, reference_position_quirk=quirk)
        parts["strict"][i] = float(strict(detections, metadata, color_of))
        parts["official"][i] = float(verdict(detections, metadata, color_of).correct)
    values, lowest = parts[options.credit], options.clip_min
    if lowest is not None:  # NaN, a failed item, stays: no comparison with it holds
        values = [lowest if value < lowest else value for value in values]
    return output_of(values, inputs, parts, [None if ok else "missing_field" for ok in readable])


def _has_record(prompt: str, metadata: dict[str, Any]) -> bool:
    try:
        parse_record({"prompt": prompt, **metadata})
    except ValueError:
        return False
    return True


def _remembered(detector: Detector, image: UInt8[np.ndarray, " h w 3"]) -> Callable[[Detection], str]:
    """The detector's colour function for one image, asked once per detection: three rules look at them."""
    colors: dict[int, str] = {}

    def color_of(detection: Detection) -> str:
        if id(detection) not in colors:  # the detections outlive this function, so identities are unique
            colors[id(detection)] = detector.color_of(image, detection)
        return colors[id(detection)]

    return color_of
