"""The embedded world's verifiers of clips and of edits as rewards: `motion_verdict` and `edit_verdict`."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from flowrl.rewards import FunctionReward, Reward, RewardInputs, RewardOutput, output_of, to_uint8
from flowrl.world import clips, edits

Credit = Literal["graded", "strict"]


def check_motion_verdict(*, credit: Credit = "graded") -> None:
    """There is nothing to refuse but what the option's type does."""


def motion_verdict(*, device: torch.device, credit: Credit = "graded") -> Reward:
    """Whether a clip shows the asked shape, in the asked colour, moving evenly in the asked direction.

    Prompts come with records as `flowrl.world.clips.motion_record` makes them; an item without one, or without a video,
    has failed ("missing_field").

    Args:
        device: not used; the detector runs on the host.
        credit: the value. `graded`: mean of the shares of frames with the right shape and colour, the agreement of the
            directions and the evenness, in [0, 1]; `strict`: 1 where all of it is right, else 0. Both are logged as
            parts, with the four that `graded` is made of.
    """
    check_motion_verdict(credit=credit)
    return FunctionReward(
        name="motion_verdict", score=partial(_motion, credit=credit), needs=frozenset({"videos", "metadata"}),
        version=f"motion_verdict:{credit}:shapes-1",
    )  # fmt: skip


def _motion(inputs: RewardInputs, *, credit: Credit) -> RewardOutput:
    names = ("graded", "strict", "shape", "color", "direction", "smooth")
    parts = {name: [math.nan] * len(inputs) for name in names}
    errors: list[str | None] = [None] * len(inputs)
    for item, record in enumerate(inputs.metadata):
        if inputs.videos is None or not {"shape", "color", "direction"} <= record.keys():
            errors[item] = "missing_field"
            continue
        found = clips.motion_verdict(to_uint8(inputs.videos[item]), record)
        parts["graded"][item], parts["strict"][item] = found.graded, float(found.correct)
        for name in names[2:]:
            parts[name][item] = float(getattr(found, name))
    return output_of(parts[credit], inputs, parts, errors)


def check_edit_verdict(*, credit: Credit = "graded") -> None:
    """There is nothing to refuse but what the option's type does."""


def edit_verdict(*, device: torch.device, credit: Credit = "graded") -> Reward:
    """Whether what the instruction asks for changed, and nothing else did.

    Prompts come with one source image and records as `flowrl.world.edits.edit_record` makes them; an item that lacks
    either has failed ("missing_field").

    Args:
        device: not used; the detector runs on the host.
        credit: the value. `graded`: `(done + done * kept) / 2`, in [0, 1]; `strict`: 1 where both are 1, else 0. Both
            are logged as parts, with `done` and `kept`.
    """
    check_edit_verdict(credit=credit)
    return FunctionReward(
        name="edit_verdict", score=partial(_edit, credit=credit),
        needs=frozenset({"images", "metadata", "source_images"}), version=f"edit_verdict:{credit}:shapes-1",
    )  # fmt: skip


def _edit(inputs: RewardInputs, *, credit: Credit) -> RewardOutput:
    names = ("graded", "strict", "done", "kept")
    parts = {name: [math.nan] * len(inputs) for name in names}
    errors: list[str | None] = [None] * len(inputs)
    sources = inputs.source_images or [[] for _ in range(len(inputs))]
    for item, (image, source, record) in enumerate(zip(to_uint8(inputs.images), sources, inputs.metadata, strict=True)):
        if len(source) != 1 or not {"scene", "target", "tag"} <= record.keys():
            errors[item] = "missing_field"
            continue
        found = edits.edit_verdict(image, _pixels(source[0]), record)
        parts["graded"][item], parts["strict"][item] = found.graded, float(found.correct)
        parts["done"][item], parts["kept"][item] = found.done, found.kept
    return output_of(parts[credit], inputs, parts, errors)


def _pixels(image: Tensor) -> UInt8[np.ndarray, " h w 3"]:
    return to_uint8(image[None])[0]
