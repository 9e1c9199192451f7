"""Grids of the embedded world as a reward: is every cell what its record asks for, and do the cells agree?"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import torch

from flowrl.rewards import FunctionReward, Reward, RewardInputs, RewardOutput, output_of, to_uint8
from flowrl.world import scene_grids as grids

Credit = Literal["share", "strict", "consistency"]
CREDITS = ("share", "strict", "consistency")


def check(*, credit: Credit = "share") -> None:
    """There is nothing to refuse but what the option's type does."""


def grid_verdict(*, device: torch.device, credit: Credit = "share") -> Reward:
    """Whether each quarter of an image holds exactly the shape and colour that its record asks for.

    Prompts come with records as `flowrl.world.scene_grids.grid_record` makes them; an item without one has failed
    ("missing_field").

    Args:
        device: not used; the detector runs on the host.
        credit: the value. `share`: share of the cells that are right; `strict`: 1 where all are, else 0; `consistency`:
            share of the pairs of cells that hold the same, right or wrong. The others are logged as parts.
    """
    check(credit=credit)
    return FunctionReward(
        name="grid_verdict",
        score=partial(_score, credit=credit),
        needs=frozenset({"images", "metadata"}),
        version=f"grid_verdict:{credit}:shapes-1",
    )


def _score(inputs: RewardInputs, *, credit: Credit) -> RewardOutput:
    parts = {name: [math.nan] * len(inputs) for name in CREDITS}
    errors: list[str | None] = [None] * len(inputs)
    for item, (image, record) in enumerate(zip(to_uint8(inputs.images), inputs.metadata, strict=True)):
        if not _is_grid(record):
            errors[item] = "missing_field"
            continue
        found = grids.grid_verdict(image, record)
        parts["share"][item] = found.share
        parts["strict"][item] = float(found.correct)
        parts["consistency"][item] = found.consistency
    return output_of(parts[credit], inputs, parts, errors)


def _is_grid(record: dict[str, Any]) -> bool:
    try:
        grids.asked_objects(record)
    except ValueError:
        return False
    return True
