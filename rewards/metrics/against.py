"""Rewards that compare an image with others: which others, and how several values become one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from flowrl.prompts.loading import Prompt
from flowrl.rewards.base import RewardInputs, RewardOutput
from flowrl.rewards.base.prompt_needs import no_reference, no_source

Against = Literal["references", "sources"]
FIELDS: dict[str, str] = {"references": "reference_images", "sources": "source_images"}
"""What an image is compared with, and the field of `RewardInputs` that holds it."""
MISSING, OTHER_SIZE, NOT_FINITE = "missing_reference", "other_size", "not_finite"


def no_other(prompt: Prompt, against: Against) -> str | None:
    """The lack of images to compare with, in the form of `flowrl.rewards.base.prompt_needs`."""
    return no_reference(prompt) if against == "references" else no_source(prompt)


def best_of_others(
    inputs: RewardInputs, against: Against, score: Callable[[int, Tensor], Tensor | None], *, owner: str
) -> RewardOutput:
    """The largest value of each image over all that it is compared with.

    An image without any fails with "missing_reference", one with another that cannot be compared with "other_size".

    Args:
        against: what it is compared with.
        score: place of an image, and another image, float32 [3, h, w] in [0, 1], to a value, higher is better; None
            if the two cannot be compared.
        owner: for messages.
    """
    others = inputs.reference_images if against == "references" else inputs.source_images
    if others is None:
        raise ValueError(
            f"{owner} needs {FIELDS[against]}, and the samples have none: give them with the prompts, or set against."
        )
    values: list[Tensor] = []
    errors: Counter[str] = Counter()
    for item, mine in enumerate(others):
        scores = [score(item, other) for other in mine]
        known = [one for one in scores if one is not None]
        best = torch.stack(known).max() if known and len(known) == len(scores) else None
        if best is None or not bool(best.isfinite()):
            errors[NOT_FINITE if best is not None else OTHER_SIZE if scores else MISSING] += 1
            best = torch.full((), torch.nan, device=inputs.images.device)
        values.append(best.float())
    stacked = torch.stack(values)
    return RewardOutput(values=stacked, valid=stacked.detach().isfinite(), errors=dict(errors))
