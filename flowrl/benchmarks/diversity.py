"""How different the images of a prompt are: the mean distance of their features over all pairs.

A policy that has learned to please a reward often draws one image again and again; its mean reward does not say so.
The features are those of any encoder; numbers of different encoders do not compare.

Letters: N images, D features, P prompts.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flowrl.runtime.shapes import Float
from flowrl.statistics.bootstrap import Interval
from flowrl.statistics.means import mean_interval

Distance = Literal["cosine", "euclidean"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Diversity:
    """`interval` is the mean over prompts; `by_prompt` their own; `alone` is how many had one image only."""

    interval: Interval
    by_prompt: dict[Hashable, float]
    alone: int


def diversity(
    features: Float[np.ndarray, " n d"], prompts: Sequence[Hashable], *, distance: Distance = "cosine"
) -> Diversity:
    """The mean over prompts of the mean distance of all pairs of a prompt's images.

    Prompts weigh the same, however many images they have.

    Args:
        prompts: [N] what tells the prompts apart.
        distance: `cosine`, 1 - cos in [0, 2], or `euclidean`.

    Raises ValueError: shapes differ, features are not finite (or zero, for the cosine), or no prompt has two images.
    """
    vectors = np.asarray(features, dtype=np.float64)
    if vectors.ndim != 2 or len(vectors) != len(prompts) or not np.isfinite(vectors).all():
        raise ValueError(
            f"features must be finite and of shape [{len(prompts)}, D], one row per image, got {list(vectors.shape)}."
        )
    if distance == "cosine":
        length = np.linalg.norm(vectors, axis=1, keepdims=True)
        if (length == 0).any():
            raise ValueError("a feature vector is zero and has no direction: use distance euclidean.")
        vectors = vectors / length
    elif distance != "euclidean":
        raise ValueError(f"the distance must be cosine or euclidean, got {distance!r}.")
    members: dict[Hashable, list[int]] = {}
    for place, prompt in enumerate(prompts):
        members.setdefault(prompt, []).append(place)
    found = {prompt: mean_distance(vectors[rows], distance) for prompt, rows in members.items() if len(rows) > 1}
    if not found:
        raise ValueError("no prompt has two images, so there is no distance to measure: draw two or more of each.")
    interval = mean_interval(list(found.values()), ends=None)
    return Diversity(interval=interval, by_prompt=found, alone=len(members) - len(found))


def mean_distance(vectors: Float[np.ndarray, " n d"], distance: Distance) -> float:
    """The mean over pairs; vectors of the cosine distance have length 1."""
    first, second = np.triu_indices(len(vectors), k=1)
    if distance == "cosine":
        return float((1.0 - (vectors[first] * vectors[second]).sum(axis=1)).mean())
    return float(np.linalg.norm(vectors[first] - vectors[second], axis=1).mean())
