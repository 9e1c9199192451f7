"""The embedded world's verifiers of clips, edits and grids as rewards; their detector runs on the host."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from flowrl.rewards import FunctionReward, Model, Reward, RewardInputs, RewardOutput, output_of, to_uint8
from flowrl.world import clips, edits, scene_grids

Parts = dict[str, float] | None
"""An item's sub-scores by name, the value among them; None where it lacks a field."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MotionVerdict:
    """Whether a clip shows the asked shape, in the asked colour, moving evenly in the asked direction.

    Prompts come with records as `flowrl.world.clips.motion_record` makes them; an item without one, or without a video,
    has failed ("missing_field").
    """

    credit: Literal["graded", "strict"] = "graded"
    """The value. `graded`: mean of the shares of frames with the right shape and colour, the agreement of the
    directions and the evenness, in [0, 1]; `strict`: 1 where all of it is right, else 0. Both are logged as parts,
    with the four that `graded` is made of."""
    models: ClassVar[tuple[Model, ...]] = ()

    def build(self, device: torch.device) -> Reward:
        """Makes the reward."""
        return FunctionReward(
            name="motion_verdict", score=partial(_motion, credit=self.credit), needs=frozenset({"videos", "metadata"}),
            version=f"motion_verdict:{self.credit}:shapes-1",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class EditVerdict:
    """Whether what the instruction asks for changed, and nothing else did.

    Prompts come with one source image and records as `flowrl.world.edits.edit_record` makes them; an item that lacks
    either has failed ("missing_field").
    """

    credit: Literal["graded", "strict"] = "graded"
    """The value. `graded`: `(done + done * kept) / 2`, in [0, 1]; `strict`: 1 where both are 1, else 0. Both are
    logged as parts, with `done` and `kept`."""
    models: ClassVar[tuple[Model, ...]] = ()

    def build(self, device: torch.device) -> Reward:
        """Makes the reward."""
        return FunctionReward(
            name="edit_verdict", score=partial(_edit, credit=self.credit),
            needs=frozenset({"images", "metadata", "source_images"}), version=f"edit_verdict:{self.credit}:shapes-1",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class GridVerdict:
    """Whether each quarter of an image holds exactly the shape and colour that its record asks for.

    Prompts come with records as `flowrl.world.scene_grids.grid_record` makes them; an item without one has failed
    ("missing_field").
    """

    credit: Literal["share", "strict", "consistency"] = "share"
    """The value. `share`: share of the cells that are right; `strict`: 1 where all are, else 0; `consistency`: share
    of the pairs of cells that hold the same, right or wrong. The others are logged as parts."""
    models: ClassVar[tuple[Model, ...]] = ()

    def build(self, device: torch.device) -> Reward:
        """Makes the reward."""
        return FunctionReward(
            name="grid_verdict", score=partial(_grid, credit=self.credit), needs=frozenset({"images", "metadata"}),
            version=f"grid_verdict:{self.credit}:shapes-1",
        )  # fmt: skip


def _motion(inputs: RewardInputs, *, credit: str) -> RewardOutput:
    rows: list[Parts] = []
    for item, record in enumerate(inputs.metadata):
        if inputs.videos is None or not {"shape", "color", "direction"} <= record.keys():
            rows.append(None)
            continue
        found = clips.motion_verdict(to_uint8(inputs.videos[item]), record)
        rows.append({
            "graded": found.graded, "strict": float(found.correct), "shape": float(found.shape),
            "color": float(found.color), "direction": float(found.direction), "smooth": float(found.smooth),
        })  # fmt: skip
    return _output(inputs, rows, ("graded", "strict", "shape", "color", "direction", "smooth"), credit)


def _edit(inputs: RewardInputs, *, credit: str) -> RewardOutput:
    rows: list[Parts] = []
    sources = inputs.source_images or [[] for _ in range(len(inputs))]
    for image, source, record in zip(to_uint8(inputs.images), sources, inputs.metadata, strict=True):
        if len(source) != 1 or not {"scene", "target", "tag"} <= record.keys():
            rows.append(None)
            continue
        found = edits.edit_verdict(image, _pixels(source[0]), record)
        rows.append({"graded": found.graded, "strict": float(found.correct), "done": found.done, "kept": found.kept})
    return _output(inputs, rows, ("graded", "strict", "done", "kept"), credit)


def _grid(inputs: RewardInputs, *, credit: str) -> RewardOutput:
    rows: list[Parts] = []
    for image, record in zip(to_uint8(inputs.images), inputs.metadata, strict=True):
        if not _is_grid(record):
            rows.append(None)
            continue
        found = scene_grids.grid_verdict(image, record)
        rows.append({"share": found.share, "strict": float(found.correct), "consistency": found.consistency})
    return _output(inputs, rows, ("share", "strict", "consistency"), credit)


def _output(inputs: RewardInputs, rows: list[Parts], names: tuple[str, ...], credit: str) -> RewardOutput:
    """Sub-scores of all items, of which `credit` is the value."""
    parts = {name: [math.nan if row is None else row[name] for row in rows] for name in names}
    return output_of(parts[credit], inputs, parts, ["missing_field" if row is None else None for row in rows])


def _pixels(image: Tensor) -> UInt8[np.ndarray, " h w 3"]:
    return to_uint8(image[None])[0]


def _is_grid(record: dict[str, Any]) -> bool:
    try:
        scene_grids.asked_objects(record)
    except ValueError:
        return False
    return True
