"""How far generated images are from real ones: a kernel distance of two sets of feature vectors, with intervals.

The squared maximum mean discrepancy (Gretton et al. 2012), unbiased, in float64:

    distance = mean k(a, a') + mean k(b, b') - 2 mean k(a, b)

    cubic       k(x, y) = (x·y / D + 1)^3             KID's, arXiv 1801.01401
    gaussian    k(x, y) = exp(-|x - y|² / (2 D))      bounded, so that a few broken images do not decide; for features
                                                      of about unit variance; as CMMD's, arXiv 2401.09603

It is 0 on average where both sets come from one distribution, so that single values may be negative, and unlike
Fréchet's distance it does not shrink as images are added. The means run over pairs of different labels: images of
one prompt resemble each other, and pairs of them would weigh more in a resample than in the sample.

Letters: N generated images, M real ones, D features, U units (labels), R resamples.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float

from flowrl.statistics.bootstrap import Interval

Kernel = Literal["cubic", "gaussian"]
Labels = Sequence[Hashable]

_CHUNK = 250  # resamples weighed at once: bounds memory


def kernel_distance(
    generated: Float[np.ndarray, " n d"],
    real: Float[np.ndarray, " m d"],
    *,
    kernel: Kernel = "cubic",
    labels: Labels | None = None,
    real_labels: Labels | None = None,
) -> float:
    """The distance of two sets of feature vectors; see the module.

    Args:
        generated: [N, D].
        real: [M, D].
        kernel: `cubic` or `gaussian`.
        labels: [N] what each generated image shows, such as its prompt; None where all are independent.
        real_labels: [M] the same of the real ones; given with `labels`, and of the same values.

    Raises:
        ValueError: fewer than two vectors or labels in a set, shapes or labels that do not match, numbers that are not
            finite.
    """
    a_ND, b_MD = _checked(generated, "generated"), _checked(real, "real")
    units = _units(len(a_ND), len(b_MD), labels, real_labels)
    return _point(_pairs(a_ND, b_MD, kernel, *units))


def kernel_interval(
    generated: Float[np.ndarray, " n d"],
    real: Float[np.ndarray, " m d"],
    *,
    kernel: Kernel = "cubic",
    labels: Labels | None = None,
    real_labels: Labels | None = None,
    level: float = 0.95,
    num_resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """`kernel_distance` with a percentile bootstrap interval of coverage `level`, from R = `num_resamples`.

    Labels are drawn with replacement, with all that is theirs in both sets; without labels, single images of each
    set. For sets that differ: where both come from one distribution the statistic is degenerate, and an interval says
    no more than "near 0".

    Raises:
        ValueError: as `kernel_distance`; a level outside (0, 1); no resamples.
    """
    a_ND, b_MD = _checked(generated, "generated"), _checked(real, "real")
    units = _units(len(a_ND), len(b_MD), labels, real_labels)
    pairs = _pairs(a_ND, b_MD, kernel, *units)
    weights = _weights(*units, shared=labels is not None, num_resamples=num_resamples, seed=seed)
    return _interval(_point(pairs), _distances(pairs, *weights), level)


def kernel_change(
    before: Float[np.ndarray, " n d"],
    after: Float[np.ndarray, " n d"],
    real: Float[np.ndarray, " m d"],
    *,
    kernel: Kernel = "cubic",
    labels: Labels | None = None,
    real_labels: Labels | None = None,
    level: float = 0.95,
    num_resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """`kernel_distance` of `after` less that of `before`, with its interval: below 0 where images became more real.

    Row i of both is the image of one prompt and one start noise. Both are drawn together and compared with the same
    draw of real images, so that what they share cancels. Otherwise as `kernel_interval`.

    Raises:
        ValueError: as `kernel_interval`, or the two sets differ in shape.
    """
    a_ND, c_ND, b_MD = _checked(before, "before"), _checked(after, "after"), _checked(real, "real")
    if a_ND.shape != c_ND.shape:
        raise ValueError(f"before {a_ND.shape} and after {c_ND.shape} must pair: give the same images of both models")
    units = _units(len(a_ND), len(b_MD), labels, real_labels)
    weights = _weights(*units, shared=labels is not None, num_resamples=num_resamples, seed=seed)
    first, second = (_pairs(x_ND, b_MD, kernel, *units) for x_ND in (a_ND, c_ND))
    change_R = _distances(second, *weights) - _distances(first, *weights)
    return _interval(_point(second) - _point(first), change_R, level)


Blocks = tuple[tuple[np.ndarray, np.ndarray], ...]
"""Kernel values and which of them count (0 or 1): within the generated, within the real, between them."""


def _pairs(a_ND: np.ndarray, b_MD: np.ndarray, kernel: Kernel, a_N: np.ndarray, b_M: np.ndarray) -> Blocks:
    if a_ND.shape[1] != b_MD.shape[1]:
        raise ValueError(f"both sets need the same features, got {a_ND.shape[1]} and {b_MD.shape[1]} numbers each")
    sides = ((a_ND, a_N, a_ND, a_N), (b_MD, b_M, b_MD, b_M), (a_ND, a_N, b_MD, b_M))
    counts = [(left[:, None] != right).astype(np.float64) for _, left, _, right in sides]
    return tuple((_kernel(x, y, kernel) * count, count) for (x, _, y, _), count in zip(sides, counts, strict=True))


def _kernel(x_ND: np.ndarray, y_MD: np.ndarray, kernel: Kernel) -> Float[np.ndarray, " n m"]:
    product, features = x_ND @ y_MD.T, x_ND.shape[1]
    if kernel == "cubic":
        return np.asarray((product / features + 1.0) ** 3)
    squares = (x_ND**2).sum(axis=1)[:, None] + (y_MD**2).sum(axis=1) - 2.0 * product
    return np.asarray(np.exp(-np.maximum(squares, 0.0) / (2 * features)))


def _point(pairs: Blocks) -> float:
    n, m = pairs[2][0].shape
    return float(_distances(pairs, np.ones((1, n)), np.ones((1, m)))[0])


def _distances(pairs: Blocks, a_RN: np.ndarray, b_RM: np.ndarray) -> Float[np.ndarray, " r"]:
    """The distance under R weightings of the vectors: how often each was drawn."""
    found = []
    for start in range(0, len(a_RN), _CHUNK):
        a, b = a_RN[start : start + _CHUNK], b_RM[start : start + _CHUNK]
        within, real, between = (
            ((left @ values) * right).sum(axis=1) / ((left @ count) * right).sum(axis=1)
            for (values, count), left, right in zip(pairs, (a, b, a), (a, b, b), strict=True)
        )
        found.append(within + real - 2.0 * between)
    return np.concatenate(found)


def _units(
    n: int, m: int, labels: Labels | None, real_labels: Labels | None
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " m"]]:
    """Labels of both sets as numbers; without labels, all different."""
    if labels is None and real_labels is None:
        return np.arange(n), np.arange(n, n + m)
    if labels is None or real_labels is None or len(labels) != n or len(real_labels) != m:
        raise ValueError(
            f"labels ({'none' if labels is None else len(labels)}) and real_labels "
            f"({'none' if real_labels is None else len(real_labels)}) must name each of the {n} generated and {m} real "
            f"images: give both or neither"
        )
    if set(labels) != set(real_labels) or len(set(labels)) < 2:
        lonely = next(iter(set(labels) ^ set(real_labels)), None)
        raise ValueError(
            f"labels and real_labels must be the same two or more values, got {len(set(labels))} and "
            f"{len(set(real_labels))}{'' if lonely is None else f', of which one side only has {lonely!r}'}"
        )
    return _codes(labels, labels), _codes(real_labels, labels)


def _codes(values: Labels, order: Iterable[Hashable]) -> np.ndarray:
    code_of = {label: code for code, label in enumerate(dict.fromkeys(order))}
    return np.array([code_of[value] for value in values])


def _weights(
    a_N: np.ndarray, b_M: np.ndarray, *, shared: bool, num_resamples: int, seed: int
) -> tuple[Float[np.ndarray, " r n"], Float[np.ndarray, " r m"]]:
    """How often each generated and each real image is drawn, in each resample."""
    if num_resamples < 1:
        raise ValueError(f"num_resamples must be at least 1, got {num_resamples}: 1000 is the default")
    rng = np.random.default_rng(seed)
    if shared:
        drawn_RU = _counts(int(a_N.max()) + 1, num_resamples, rng)
        return drawn_RU[:, a_N], drawn_RU[:, b_M]
    return _counts(len(a_N), num_resamples, rng), _counts(len(b_M), num_resamples, rng)


def _counts(units: int, num_resamples: int, rng: np.random.Generator) -> Float[np.ndarray, " r u"]:
    """How often each unit is drawn; a resample of one unit again and again has no pair and is drawn anew."""
    counts = rng.multinomial(units, np.full(units, 1.0 / units), size=num_resamples).astype(np.float64)
    while len(single := np.flatnonzero((counts > 0).sum(axis=1) < 2)):
        counts[single] = rng.multinomial(units, np.full(units, 1.0 / units), size=len(single))
    return np.asarray(counts)


def _interval(point: float, replicate_R: np.ndarray, level: float) -> Interval:
    """Percentiles, wide enough to hold the point."""
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}: write 95 % as 0.95")
    low, high = np.quantile(replicate_R, [(1 - level) / 2, (1 + level) / 2])
    return Interval(mean=point, low=min(float(low), point), high=max(float(high), point))


def _checked(features: np.ndarray, name: str) -> Float[np.ndarray, " n d"]:
    array = np.asarray(features, dtype=np.float64)
    if array.ndim != 2 or len(array) < 2 or array.shape[1] == 0:
        raise ValueError(f"{name} must be at least two feature vectors [N, D], got the shape {list(array.shape)}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} holds numbers that are not finite: drop failed images first")
    return array
