"""The embedded world's verifiers of clips, edits and grids as rewards; their detector runs on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from flowrl.prompts.loading import Prompt
from flowrl.rewards.base import FunctionReward, Model, Reward, RewardInputs, RewardOutput, output_of, to_uint8
from flowrl.rewards.base.prompt_needs import no_fields, no_source
from flowrl.world import clips, edits, scene_grids

Row = tuple[float, ...] | None
"""An item's sub-scores, including the value; None if it lacks a field."""
_MOTION, _EDIT = {"shape", "color", "direction"}, {"scene", "target", "tag"}  # fields of their records


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldMotions:
    """Whether a clip shows the asked shape, in the asked colour, moving evenly in the asked direction. An item without
    a record as of `flowrl.world.clips.motion_record`, or without a video, has failed ("missing_field")."""

    credit: Literal["graded", "strict"] = "graded"
    """The value. `graded`: mean of the shares of frames with the right shape and colour, the agreement of the
    directions and the evenness, in [0, 1]; `strict`: 1 if all of it is right, else 0. Both are logged as parts,
    with the four terms of `graded`."""
    models: ClassVar[tuple[Model, ...]] = ()

    def lacks(self, prompt: Prompt) -> str | None:
        """A record of a motion."""
        return no_fields(prompt, *sorted(_MOTION))

    def build(self, device: torch.device) -> Reward:
        """Makes the reward."""

        def judge(inputs: RewardInputs) -> Iterator[Row]:
            for item, record in enumerate(inputs.metadata):
                if inputs.videos is None or not _MOTION <= record.keys():
                    yield None
                    continue
                found = clips.motion_verdict(to_uint8(inputs.videos[item]), record)
                yield found.graded, found.correct, found.shape, found.color, found.direction, found.smooth

        parts = ("graded", "strict", "shape", "color", "direction", "smooth")
        return _reward("motion_verdict", self.credit, parts, judge, needs={"videos", "metadata"})


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldEdits:
    """Whether the edit changed what the instruction asks for, and nothing else. An item without one source image, or a
    record as of `flowrl.world.edits.edit_record`, has failed ("missing_field")."""

    credit: Literal["graded", "strict"] = "graded"
    """The value. `graded`: `(done + done * kept) / 2`, in [0, 1]; `strict`: 1 if both are 1, else 0. Both are
    logged as parts, with `done` and `kept`."""
    models: ClassVar[tuple[Model, ...]] = ()

    def lacks(self, prompt: Prompt) -> str | None:
        """One source image, and the record of an edit."""
        return no_source(prompt, one=True) or no_fields(prompt, *sorted(_EDIT))

    def build(self, device: torch.device) -> Reward:
        """Makes the reward."""

        def judge(inputs: RewardInputs) -> Iterator[Row]:
            sources = inputs.source_images or [[]] * len(inputs)
            for image, source, record in zip(to_uint8(inputs.images), sources, inputs.metadata, strict=True):
                if len(source) != 1 or not _EDIT <= record.keys():
                    yield None
                    continue
                found = edits.edit_verdict(image, to_uint8(source[0][None])[0], record)
                yield found.graded, found.correct, found.done, found.kept

        parts = ("graded", "strict", "done", "kept")
        return _reward("edit_verdict", self.credit, parts, judge, needs={"images", "metadata", "source_images"})


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldGrids:
    """Whether each quarter of an image holds exactly the shape and colour that its record asks for. An item without a
    record as of `flowrl.world.scene_grids.grid_record` has failed ("missing_field")."""

    credit: Literal["share", "strict", "consistency"] = "share"
    """The value. `share`: share of the cells that are right; `strict`: 1 if all are, else 0; `consistency`: share
    of the pairs of cells that hold the same, right or wrong. The others are logged as parts."""
    models: ClassVar[tuple[Model, ...]] = ()

    def lacks(self, prompt: Prompt) -> str | None:
        """A record of a grid."""
        if _is_grid(prompt.metadata):
            return None
        return (
            "needs the record of a grid of the embedded world, and has none: take asset:prompts/world_grids_train.jsonl"
        )

    def build(self, device: torch.device) -> Reward:
        """Makes the reward."""

        def judge(inputs: RewardInputs) -> Iterator[Row]:
            for image, record in zip(to_uint8(inputs.images), inputs.metadata, strict=True):
                if not _is_grid(record):
                    yield None
                    continue
                found = scene_grids.grid_verdict(image, record)
                yield found.share, found.correct, found.consistency

        parts = ("share", "strict", "consistency")
        return _reward("grid_verdict", self.credit, parts, judge, needs={"images", "metadata"})


def _reward(
    name: str, credit: str, parts: tuple[str, ...], judge: Callable[[RewardInputs], Iterator[Row]], *, needs: set[str]
) -> Reward:
    """The reward whose value is `credit`, one of the sub-scores that `judge` gives; `parts` names them."""

    def score(inputs: RewardInputs) -> RewardOutput:
        rows = list(judge(inputs))
        columns = {name: [math.nan if row is None else float(row[k]) for row in rows] for k, name in enumerate(parts)}
        return output_of(columns[credit], inputs, columns, ["missing_field" if row is None else None for row in rows])

    return FunctionReward(name=name, score=score, needs=frozenset(needs), version=f"{name}:{credit}:shapes-1")


def _is_grid(record: dict[str, Any]) -> bool:
    try:
        scene_grids.asked_objects(record)
    except ValueError:
        return False
    return True
