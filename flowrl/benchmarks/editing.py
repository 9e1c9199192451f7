"""Benchmarks of image editing and of judges: how their judgements become scores.

    GEdit-Bench            two sub-scores each for instruction and for quality, 0 to 10    `viescore`, `gedit_mean`
    ImgEdit-Bench          three scores from 1 to 5                                        `imgedit`
    EditReward-Bench       pairs of scores of a better and a worse edit                    `pair_accuracy`
    ConsistencyRank        orders of images by likeness to a reference                     `rank_agreement`
    MMRB2                  pairs judged in both orders                                     `both_orders`

The data belong to others (MMRB2: CC BY-NC 4.0, for benchmarking only; the other licences are not known) and are not
shipped.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Winner = Literal["A", "B"]


@dataclass(frozen=True, slots=True)
class VIEScore:
    """GEdit's scores of an image, 0 to 10: instruction followed, quality, and `sqrt(semantic * quality)`."""

    semantic: float
    quality: float

    @property
    def overall(self) -> float:
        return math.sqrt(self.semantic * self.quality)


def viescore(semantic: Sequence[float], quality: Sequence[float]) -> VIEScore:
    """The smaller of the sub-scores on each side.

    Raises:
        ValueError: a side without sub-scores, or one outside 0 to 10.
    """
    for name, scores in (("semantic", semantic), ("quality", quality)):
        if not scores or not all(0 <= score <= 10 for score in scores):
            raise ValueError(f"the {name} sub-scores must be numbers from 0 to 10, got {list(scores)}.")
    return VIEScore(min(semantic), min(quality))


@dataclass(frozen=True, kw_only=True, slots=True)
class GEditScore:
    """Means over the images that were judged; the overall is the mean of theirs, not that of the two means."""

    semantic: float
    quality: float
    overall: float
    judged: int
    failed: int


def gedit_mean(scores: Iterable[VIEScore | None], *, failed_as_zero: bool = False) -> GEditScore:
    """Sums up one language, over the full set or the intersection set.

    Args:
        scores: None where the judge's answer could not be read.
        failed_as_zero: as lmms-eval does; such a number punishes a model for its judge.

    Raises:
        ValueError: nothing to take a mean of.
    """
    listed = list(scores)
    known = [score for score in listed if score is not None]
    failed = len(listed) - len(known)
    if failed_as_zero:
        known += [VIEScore(0.0, 0.0)] * failed
    if not known:
        raise ValueError(f"none of the {len(listed)} images was judged, so there is no score.")
    return GEditScore(
        semantic=_mean([score.semantic for score in known]),
        quality=_mean([score.quality for score in known]),
        overall=_mean([score.overall for score in known]),
        judged=len(listed) - failed,
        failed=failed,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ImgEditScore:
    """`categories` are means over their images, `overall` is the mean of the categories, all from 1 to 5."""

    categories: dict[str, float]
    overall: float
    failed: int


def imgedit_image(scores: Sequence[float]) -> float:
    """The mean of the judge's three scores of an image.

    Raises:
        ValueError: another number of scores, or one outside 1 to 5.
    """
    if len(scores) != 3 or not all(1 <= score <= 5 for score in scores):
        raise ValueError(f"an image of ImgEdit-Bench has three scores from 1 to 5, got {list(scores)}.")
    return _mean(scores)


def imgedit(rows: Iterable[tuple[str, Sequence[float] | None]]) -> ImgEditScore:
    """Sums up the basic suite.

    Args:
        rows: (category, the three scores, or None where they could not be read) of each image.

    Raises:
        ValueError: nothing to take a mean of.
    """
    found: dict[str, list[float]] = {}
    failed = 0
    for category, scores in rows:
        if scores is None:
            failed += 1
        else:
            found.setdefault(category, []).append(imgedit_image(scores))
    if not found:
        raise ValueError(f"none of the {failed} images was judged, so there is no score.")
    categories = {name: _mean(values) for name, values in sorted(found.items())}
    return ImgEditScore(categories=categories, overall=_mean(list(categories.values())), failed=failed)


def pair_accuracy(
    pairs: Mapping[str, Sequence[tuple[float | None, float | None]]], *, ties_win: bool = False
) -> tuple[float, dict[str, float], int]:
    """EditReward-Bench: the mean over task types of the share of pairs whose better edit has the higher score.

    Args:
        pairs: by task type, (score of the better, score of the worse); None or NaN where there is none: such a pair is
            left out and counted.
        ties_win: whether equal scores are right too.

    Returns:
        The mean, the share of each type, and the number of pairs left out.

    Raises:
        ValueError: no pair has both scores.
    """
    shares: dict[str, float] = {}
    failed = 0
    for name, listed in pairs.items():
        known = [(a, b) for a, b in listed if a is not None and b is not None and not math.isnan(a + b)]
        failed += len(listed) - len(known)
        if known:
            shares[name] = _mean([float(a > b or (ties_win and a == b)) for a, b in known])
    if not shares:
        raise ValueError(f"none of the {failed} pairs has both scores, so there is no accuracy.")
    return _mean(list(shares.values())), shares, failed


@dataclass(frozen=True, kw_only=True, slots=True)
class RankAgreement:
    """How well a predicted order agrees with the true one; see `rank_agreement`."""

    accuracy: float
    kendall: float
    spearman: float
    footrule: int
    top_bottom: float


def rank_by_score(scores: Sequence[float]) -> list[int]:
    """Indexes by descending score; equal scores in their given order."""
    return sorted(range(len(scores)), key=lambda i: -scores[i])


def rank_agreement(predicted: Sequence[int], truth: Sequence[int]) -> RankAgreement:
    """ConsistencyRank's measures of two orders of n items, position by position as its script takes them.

        accuracy     share of positions that hold the same item
        kendall      (concordant - discordant pairs) / all pairs, of the two lists as sequences of numbers
        spearman     1 - 6 sum d^2 / (n (n^2 - 1)),  d the difference of the two lists at a position
        footrule     sum |d|
        top_bottom   mean of whether the first and whether the last position agree (T1-B1)

    Raises:
        ValueError: lists that are not both orders of 0 .. n - 1, with n of at least 2.
    """
    count = len(truth)
    if count < 2 or not sorted(predicted) == sorted(truth) == list(range(count)):
        raise ValueError(f"orders must be permutations of 0, 1, ... of two items or more, got {list(predicted)} and "
                         f"{list(truth)}.")  # fmt: skip
    difference = [p - t for p, t in zip(predicted, truth, strict=True)]
    pairs = list(itertools.combinations(range(count), 2))
    agree = [1 if (predicted[i] - predicted[j]) * (truth[i] - truth[j]) > 0 else -1 for i, j in pairs]
    return RankAgreement(
        accuracy=sum(d == 0 for d in difference) / count,
        kendall=sum(agree) / len(pairs),
        spearman=1 - 6 * sum(d * d for d in difference) / (count * (count**2 - 1)),
        footrule=sum(abs(d) for d in difference),
        top_bottom=((difference[0] == 0) + (difference[-1] == 0)) / 2,
    )


@dataclass(frozen=True, slots=True)
class JudgedPair:
    """A pair of MMRB2: the better response, and what the judge said of (A, B) and of (B, A); None where it said none.

    `reverse` is as the judge said it: "A" names the response that it was shown first, which is B.
    """

    chosen: Winner
    forward: Winner | None
    reverse: Winner | None


def both_orders(pairs: Iterable[JudgedPair]) -> tuple[int, int]:
    """Judgements that are right, and those that there are; a missing one is in neither number.

    Judgements of all tasks are pooled: their share is the overall accuracy.
    """
    right = judged = 0
    flipped: dict[Winner, Winner] = {"A": "B", "B": "A"}
    for pair in pairs:
        said = [pair.forward, None if pair.reverse is None else flipped[pair.reverse]]
        judged += sum(winner is not None for winner in said)
        right += sum(winner == pair.chosen for winner in said)
    return right, judged


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
