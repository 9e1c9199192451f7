"""Judges: what finds objects in an image and names their colours, for rewards that work by GenEval's rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import UInt8

from flowrl.benchmarks.geneval.detections import Detection
from flowrl.config.options import check_options, unknown_name
from flowrl.rewards import load_target


class Judge(Protocol):
    """What a judge looks like; `version` says in the run's manifest which detector it is."""

    @property
    def version(self) -> str: ...

    def detect(self, images: UInt8[np.ndarray, " b h w 3"]) -> list[list[Detection]]:
        """All detections of each image, unfiltered: the rules apply their own thresholds."""
        ...

    def color_of(self, image: UInt8[np.ndarray, " h w 3"], detection: Detection) -> str:
        """The colour of one detection, one of `flowrl.benchmarks.geneval.rules.COLORS`."""
        ...


JUDGES: dict[str, str] = {
    "mask2former": "flowrl.rewards.networks.mask2former:mask2former_judge",
    "shapes": "flowrl.rewards.networks.detectors:shapes_judge",
}
"""Name -> "module:factory"; a factory takes `device` and its options, keyword-only, and returns a `Judge`."""

JUDGE_CHECKS: dict[str, str] = {"mask2former": "flowrl.rewards.networks.mask2former:check"}
"""Name -> "module:function" that takes the options given and refuses bad values; it loads no weights."""


def check_judge(name: str, options: Mapping[str, Any] | None = None) -> None:
    """Checks a judge's name, the names, types and values of its options. Loads no weights.

    Raises:
        ValueError: naming what was given, the nearest valid name and all that are allowed.
    """
    if name not in JUDGES:
        raise ValueError(unknown_name("judge", name, JUDGES))
    options = dict(options or {})
    check_options(load_target(JUDGES[name]), options, owner=f"judge {name!r}")
    if name in JUDGE_CHECKS:
        load_target(JUDGE_CHECKS[name])(**options)


def build_judge(name: str, *, device: torch.device, options: Mapping[str, Any] | None = None) -> Judge:
    """Makes a judge of `JUDGES`; loads its weights, if any, on `device`.

    Args:
        name: a key of `JUDGES`.
        device: where a judge with weights runs.
        options: the judge's own options; see its factory.

    Raises:
        ValueError: for an unknown name, an unknown option or a bad value, before anything is loaded.
    """
    options = dict(options or {})
    check_judge(name, options)
    judge: Judge = load_target(JUDGES[name])(device=device, **options)
    return judge


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionJudge:
    """A `Judge` made of a detector of single images and a colour function."""

    detect_one: Callable[[UInt8[np.ndarray, " h w 3"]], list[Detection]]
    color: Callable[[UInt8[np.ndarray, " h w 3"], Detection], str]
    version: str

    def detect(self, images: UInt8[np.ndarray, " b h w 3"]) -> list[list[Detection]]:
        return [self.detect_one(image) for image in images]

    def color_of(self, image: UInt8[np.ndarray, " h w 3"], detection: Detection) -> str:
        return self.color(image, detection)


def shapes_judge(*, device: torch.device) -> Judge:
    """The embedded world's shape detector; reads pixels, has no weights, runs on the host.

    Args:
        device: unused.
    """
    from flowrl.world.detector import color_of, detect_shapes

    return FunctionJudge(detect_one=detect_shapes, color=color_of, version="shapes-1")
