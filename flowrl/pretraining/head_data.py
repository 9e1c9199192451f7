"""Pairs for a preference head: which to learn from and which to hold out, and the features of their images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from flowrl.prompts.pairs import Pair
from flowrl.prompts.source_images import read_image
from flowrl.rewards.networks.preference_features import Features
from flowrl.runtime.progress import progress
from flowrl.runtime.randomness import counter_choice
from flowrl.runtime.shapes import Float

MIN_UNITS = 6  # prompts, or sets of pairs that share images: below this many, three parts cannot be made


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PairSplit:
    """Places of pairs to learn from, to stop at and to measure on, and each pair's unit."""

    learn: np.ndarray
    stop: np.ndarray
    measure: np.ndarray
    unit: np.ndarray
    by: str


def split_pairs(rows: Sequence[Pair], held_out: float, *, seed: int) -> PairSplit:
    """Three parts that share no unit, drawn from the seed. Raises ValueError: they are fewer than `MIN_UNITS` units."""
    unit, by = _join(rows, by_prompt=True), "prompt"
    if unit.max() + 1 < MIN_UNITS:
        unit, by = _join(rows, by_prompt=False), "image"
    count = int(unit.max()) + 1
    if count < MIN_UNITS:
        raise ValueError(
            f"the {len(rows)} pairs hang together by shared images in {count} sets, and {MIN_UNITS} are needed to "
            f"hold some out: add pairs of other prompts or images."
        )
    order = np.array(counter_choice(count, count, seed, "preference split"))
    held = min(max(2, round(held_out * count)), count - 1)
    part = np.zeros(count, dtype=np.int64)
    part[order[: held // 2]], part[order[held // 2 : held]] = 1, 2
    learn, stop, measure = (np.flatnonzero(part[unit] == number) for number in range(3))
    return PairSplit(learn=learn, stop=stop, measure=measure, unit=unit, by=by)


def _join(rows: Sequence[Pair], *, by_prompt: bool) -> np.ndarray:
    """Numbers of the sets of pairs that share an image, or also a prompt; sets in the order of their first pairs."""
    nodes: list[list[Path | str]] = [[row.winner, row.loser, *([row.prompt] if by_prompt else [])] for row in rows]
    number: dict[Path | str, int] = {}
    links = [[number.setdefault(node, len(number)) for node in of_pair] for of_pair in nodes]
    ends = [(of_pair[0], other) for of_pair in links for other in of_pair[1:]]
    graph = coo_array((np.ones(len(ends)), np.transpose(ends)), shape=(len(number), len(number)))
    _, sets = connected_components(graph, directed=False)
    return np.asarray(sets, dtype=np.int64)[[of_pair[0] for of_pair in links]]


@torch.no_grad()
def pair_features(
    rows: Sequence[Pair], features: Features, *, batch_size: int
) -> tuple[Float[Tensor, " n d"], Float[Tensor, " n d"]]:
    """Features of all winners and all losers, on the host; what occurs in several pairs goes through once. Raises
    ValueError: an image cannot be read, or its features are not finite."""
    keys = dict.fromkeys(
        key for row in rows for key in (_key(row, row.winner, features), _key(row, row.loser, features))
    )
    cached = torch.empty(len(keys), features.width)
    listed = list(keys)
    with progress(f"features of {len(listed)} images", math.ceil(len(listed) / batch_size)) as advance:
        for first in range(0, len(listed), batch_size):
            chosen = range(first, min(first + batch_size, len(listed)))
            loaded = {place: read_image(listed[place][0]) for place in chosen}
            by_size: dict[tuple[int, ...], list[int]] = {}
            for place, image in loaded.items():
                by_size.setdefault(tuple(image.shape), []).append(place)
            for places in by_size.values():
                images = torch.stack([loaded[place] for place in places])
                cached[places] = features.of(images, [listed[place][1] for place in places]).float().cpu()
            advance("")
    if broken := [listed[place][0] for place in torch.nonzero(~cached.isfinite().all(dim=1)).flatten().tolist()]:
        raise ValueError(f"the features of {broken[0]} (and {len(broken) - 1} more) are not finite: replace the image.")
    number = {key: place for place, key in enumerate(listed)}
    winner, loser = (
        cached[[number[_key(row, getattr(row, side), features)] for row in rows]] for side in ("winner", "loser")
    )
    return winner, loser


def _key(row: Pair, image: Path, features: Features) -> tuple[Path, str]:
    return image, row.prompt if features.reads_prompts else ""
