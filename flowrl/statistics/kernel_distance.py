"""The distance of generated images from real ones: a kernel distance of two sets of features, with intervals.

The squared maximum mean discrepancy (Gretton et al. 2012), unbiased, in float64:

    distance = mean k(a, a') + mean k(b, b') - 2 mean k(a, b),        k(x, y) = exp(-|x - y|² / (2 D))

The kernel is bounded, so a few broken images do not dominate. Like CMMD's (arXiv 2401.09603), it suits features of
about unit variance. If both sets come from one distribution, the distance is 0 on average, so single values may be
negative. Unlike Fréchet's distance, it does not shrink as images are added. The means run over pairs with different
labels, because images of one prompt resemble each other: their pairs would weigh more in a resample than otherwise.

Letters: N generated images and as many real ones, D features, U labels, R resamples.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from flowrl.runtime.shapes import Float
from flowrl.statistics.bootstrap import Interval, codes, draw_counts, percentiles

_CHUNK = 250  # resamples weighed at once: bounds memory


Blocks = tuple[tuple[np.ndarray, np.ndarray], ...]
"""Kernel values and a mask (0 or 1) of those that count: among generated images, among real ones, and between them."""


def kernel_interval(
    generated: Float[np.ndarray, " n d"],
    real: Float[np.ndarray, " n d"],
    labels: Sequence[Hashable],
    *,
    before: Float[np.ndarray, " n d"] | None = None,
    num_resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """The distance of two sets of feature vectors, with a percentile bootstrap interval from R = `num_resamples`.

    Each resample draws labels with replacement, and takes all their rows in every set. The interval is meant for sets
    that differ: if both come from one distribution, the statistic is degenerate and the interval says only "near 0".

    Args:
        labels: [N] what row i of every set shows, such as its prompt.
        before: If given, its distance from `real` is subtracted: below 0 images became more realistic. Row i has the
            prompt and start noise of row i of `generated`, and resamples draw both together, so what they share
            cancels.

    Raises ValueError: fewer than two vectors or labels, unequal shapes, numbers not finite, no resamples.
    """
    if num_resamples < 1:
        raise ValueError(f"num_resamples must be at least 1, got {num_resamples}: 1000 is the default")
    sets = [np.asarray(one, dtype=np.float64) for one in (generated, before, real) if one is not None]
    for array in sets:
        if array.ndim != 2 or len(array) != len(labels) or len(set(labels)) < 2 or array.shape[1] == 0:
            raise ValueError(
                f"features must be [N, D] with one label per row and two or more different labels, got the shape "
                f"{list(array.shape)} and {len(labels)} labels, {len(set(labels))} of them different"
            )
        if not np.isfinite(array).all():
            raise ValueError("the features hold numbers that are not finite: drop failed images first")
    if len({array.shape for array in sets}) > 1:
        shapes = " and ".join(str(list(array.shape)) for array in sets)
        raise ValueError(f"all sets need the same images and the same features, got the shapes {shapes}")
    unit_N = codes(labels)
    units, rng = int(unit_N.max()) + 1, np.random.default_rng(seed)
    drawn_RU = draw_counts(units, num_resamples, rng)
    while len(single := np.flatnonzero((drawn_RU > 0).sum(axis=1) < 2)):  # one unit again and again has no pair
        drawn_RU[single] = draw_counts(units, len(single), rng)
    drawn_RN = drawn_RU[:, unit_N]
    once_1N, mean, replicates = np.ones((1, len(unit_N))), 0.0, np.zeros(num_resamples)
    for sign, one in zip((1, -1), sets[:-1], strict=False):
        pairs = _blocks(one, sets[-1], unit_N)
        mean += sign * float(_distances(pairs, once_1N)[0])
        replicates += sign * _distances(pairs, drawn_RN)
    return percentiles(mean, replicates)


def _blocks(a_ND: np.ndarray, b_ND: np.ndarray, unit_N: np.ndarray) -> Blocks:
    count = (unit_N[:, None] != unit_N).astype(np.float64)
    found = []
    for x_ND, y_ND in ((a_ND, a_ND), (b_ND, b_ND), (a_ND, b_ND)):
        squares = (x_ND**2).sum(axis=1)[:, None] + (y_ND**2).sum(axis=1) - 2.0 * (x_ND @ y_ND.T)
        found.append((np.exp(-np.maximum(squares, 0.0) / (2 * x_ND.shape[1])) * count, count))
    return tuple(found)


def _distances(pairs: Blocks, drawn_RN: np.ndarray) -> Float[np.ndarray, " r"]:
    """The distance for R resamples, each given by how often it drew every row."""
    found = []
    for start in range(0, len(drawn_RN), _CHUNK):
        drawn = drawn_RN[start : start + _CHUNK]
        within, real, between = (
            ((drawn @ values) * drawn).sum(axis=1) / ((drawn @ count) * drawn).sum(axis=1) for values, count in pairs
        )
        found.append(within + real - 2.0 * between)
    return np.concatenate(found)
