"""Detectors: what finds objects in an image and names their colours, for rewards that work by GenEval's rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from flowrl.benchmarks.geneval.rules import Detection
from flowrl.config.options import build_options, entry_of
from flowrl.rewards.base import Model, load_target
from flowrl.runtime.shapes import UInt8


class Detector(Protocol):
    """A detector: `version` names it in the run's manifest; `remarks` are sentences for a table of its verdicts: with
    what its numbers compare."""

    @property
    def version(self) -> str: ...
    @property
    def remarks(self) -> tuple[str, ...]: ...

    def detect(self, images: UInt8[np.ndarray, " b h w 3"]) -> list[list[Detection]]:
        """All detections of each image, unfiltered: the rules apply their own thresholds."""

    def color_of(self, image: UInt8[np.ndarray, " h w 3"], detection: Detection) -> str:
        """The colour of one detection, one of `flowrl.benchmarks.geneval.rules.COLORS`."""


class DetectorOptions(Protocol):
    """The options of a detector; see `DETECTORS`."""

    @property
    def models(self) -> tuple[Model, ...]: ...

    def build(self, device: torch.device) -> Detector:
        """Makes the detector; loads its weights, if any."""


DETECTORS: dict[str, str] = {
    "mask2former": "flowrl.rewards.networks.mask2former:Mask2Former",
    "openmmlab": "flowrl.rewards.networks.openmmlab:OpenMMLab",
    "shapes": "flowrl.rewards.networks.detectors:Shapes",
}
"""Name -> "module:Class", the options of the detector: a frozen dataclass as in `flowrl.rewards.REWARDS`."""


def detector_options(name: str, options: Mapping[str, Any] | None = None) -> DetectorOptions:
    """The checked options of a detector. Loads no weights."""
    return build_options(load_target(entry_of(DETECTORS, name, "judge")), options or {}, owner=f"judge {name!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionDetector:
    """A `Detector` made of two functions."""

    find: Callable[[UInt8[np.ndarray, " b h w 3"]], list[list[Detection]]]
    color: Callable[[UInt8[np.ndarray, " h w 3"], Detection], str]
    version: str
    remarks: tuple[str, ...] = ()

    def detect(self, images: UInt8[np.ndarray, " b h w 3"]) -> list[list[Detection]]:
        """The function's detections in each image."""
        return self.find(images)

    def color_of(self, image: UInt8[np.ndarray, " h w 3"], detection: Detection) -> str:
        """The function's colour for a detection."""
        return self.color(image, detection)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shapes:
    """The embedded world's shape detector; reads pixels, has no weights, runs on the host."""

    models: ClassVar[tuple[Model, ...]] = ()

    def build(self, device: torch.device) -> Detector:
        """Makes the detector."""
        from flowrl.world.detector import color_of, detect_in_batch

        return FunctionDetector(find=detect_in_batch, color=color_of, version="shapes-1")
