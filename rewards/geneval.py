"""GenEval's rules as a reward (Flow-GRPO, arXiv 2505.05470, section 5.1) on what a chosen detector finds."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar, Literal
from weakref import ref

import torch

from flowrl.benchmarks.geneval.metadata import Record, parse_record
from flowrl.benchmarks.geneval.rules import graded, strict, verdict
from flowrl.prompts.loading import Prompt
from flowrl.rewards.base import FunctionReward, Model, Reward, RewardInputs, RewardOutput, output_of, to_uint8
from flowrl.rewards.base.prompt_needs import no_record
from flowrl.rewards.networks.detectors import Detector, DetectorOptions, detector_options


@dataclass(frozen=True, kw_only=True, slots=True)
class Geneval:
    """Does the image show what its prompt's GenEval record asks for? An item is invalid ("missing_field") without a
    readable record."""

    credit: Literal["graded", "strict", "official"] = "graded"
    """The value. `graded`: partial credit, may be negative (what Flow-GRPO trains on); `strict`: 1 if everything is
    exactly right, else 0; `official`: the benchmark's own verdict, 1 or 0. The other two are logged unclipped."""
    clip_min: float | None = None
    """Lower bound of the value for `graded`, where surplus objects make it negative; null for none."""
    verdicts: ClassVar[bool] = True
    judge: str = "shapes"
    """The detector, a key of `flowrl.rewards.networks.detectors.DETECTORS`: `shapes` for the embedded world's
    drawings; for photos `openmmlab`, the benchmark's own (you fetch its file), or `mask2former` from the hub (its
    numbers do not compare with published ones)."""
    detector: str | None = None
    """The detection model: `openmmlab`'s released file, `mask2former`'s folder or hub id; null takes the default."""
    clip_model: str | None = None
    """The colour model of either, a folder or a hub id; null takes the default."""
    rgb_as_bgr: bool | None = None
    """For `openmmlab`: true shows the detector red as blue, as Flow-GRPO's reward server does; null for false."""
    reference_position_quirk: bool = True
    """See `flowrl.benchmarks.geneval.rules.graded`."""

    def __post_init__(self) -> None:
        if self.clip_min is not None and not self.clip_min < 1.0:
            raise ValueError(f"clip_min must be below 1, the best credit there is, got {self.clip_min}.")
        self.detection()

    @property
    def models(self) -> tuple[Model, ...]:
        return self.detection().models

    def lacks(self, prompt: Prompt) -> str | None:
        """A GenEval record."""
        return no_record(prompt)

    def detection(self) -> DetectorOptions:
        """The given options of the detector; it refuses options that it does not have."""
        given = {"detector": self.detector, "clip_model": self.clip_model, "rgb_as_bgr": self.rgb_as_bgr}
        return detector_options(self.judge, {name: value for name, value in given.items() if value is not None})

    @property
    def shared(self) -> DetectorOptions:
        """Entries that differ only in their value read one judge's answers."""
        return self.detection()

    def load(self, device: torch.device) -> Judge:
        """Loads the detector."""
        return Judge(self.detection().build(device))

    def build(self, device: torch.device) -> Reward:
        """The reward with a judge of its own."""
        return self.on(self.load(device))

    def on(self, judge: Judge) -> Reward:
        """The reward on an existing judge."""
        lower = "none" if self.clip_min is None else f"{self.clip_min:g}"
        quirk = "quirk" if self.reference_position_quirk else "clean"

        def score(inputs: RewardInputs) -> RewardOutput:
            parts, lowest = judge(inputs, quirk=self.reference_position_quirk), self.clip_min
            values = parts[self.credit]
            if lowest is not None:  # NaN, a failed item, stays: no comparison with it holds
                values = [lowest if value < lowest else value for value in values]
            return output_of(
                values, inputs, parts, ["missing_field" if math.isnan(value) else None for value in values]
            )

        return FunctionReward(
            name="geneval",
            score=score,
            needs=frozenset({"images", "prompts", "metadata"}),
            version=f"geneval:{self.credit}:clip_min-{lower}:{quirk}:{judge.detector.version}",
        )


class Judge:
    """The results of GenEval's rules for a batch. The last one is kept, because several rewards may ask for it."""

    def __init__(self, detector: Detector) -> None:
        self.detector = detector
        self._asked: Callable[[], RewardInputs | None] = lambda: None  # a weak reference: images are not held
        self._quirk, self._answer = False, dict[str, list[float]]()

    def __call__(self, inputs: RewardInputs, *, quirk: bool) -> dict[str, list[float]]:
        """All credits `[B]` by name, NaN for an item without a readable record; `quirk` as in `rules.graded`."""
        if self._asked() is not inputs or self._quirk != quirk:
            self._answer = self._judge(inputs, quirk)
            self._asked, self._quirk = ref(inputs), quirk
        return self._answer

    def _judge(self, inputs: RewardInputs, quirk: bool) -> dict[str, list[float]]:
        records: dict[int, Record] = {}
        for i, (prompt, metadata) in enumerate(zip(inputs.prompts, inputs.metadata, strict=True)):
            with suppress(ValueError):  # without a record that can be read the item has failed
                records[i] = parse_record({"prompt": prompt, **metadata})
        images = to_uint8(inputs.images)[list(records)]
        found = self.detector.detect(images) if records else []
        if len(found) != len(images):
            raise ValueError(f"the judge returned detections of {len(found)} images for {len(images)}.")
        parts = {name: [math.nan] * len(inputs) for name in ("graded", "strict", "official")}
        for (i, record), image, detections in zip(records.items(), images, found, strict=True):
            color_of = cache(partial(self.detector.color_of, image))  # three rules ask for the same objects' colours
            parts["graded"][i] = graded(detections, record, color_of, reference_position_quirk=quirk)
            parts["strict"][i] = float(strict(detections, record, color_of))
            parts["official"][i] = float(verdict(detections, record, color_of).correct)
        return parts
