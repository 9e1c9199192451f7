"""VBench: its prompts, what its package writes, and the leaderboard's scores (Huang et al. 2024, arXiv 2311.17982).

The dimensions are measured by the authors' own package, vbench, in an environment of its own; this module knows its
files and its arithmetic, as of version 0.1.5 (Apache-2.0):

    VBench_full_info.json          a list of {"prompt_en": text, "dimension": [names], ...}, 946 entries
    <prompt>-<k>.mp4               the videos of a prompt, k from 0 to 4
    results_*_eval_results.json    {dimension: [score, [{"video_path": path, "video_results": value, ...}, ...]]}

With the constants of the package's scripts/constant.py a score s becomes (s - low) / (high - low), and

    quality  = sum_d w_d s'_d / sum_d w_d over the seven dimensions of quality, w = 1/2 for dynamic degree, else 1
    semantic = mean of s'_d over the other nine
    total    = (4 quality + semantic) / 5

The published script counts a dimension that is missing as 0; here a score that lacks one is not given.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.prompts.text_checks import check_text
from flowrl.runtime.files import parse_json, read_json, read_text
from flowrl.statistics.bootstrap import Interval, point
from flowrl.statistics.means import Range, ScoreRow, bound, ends_of, mean_interval, pooled, stratified_score

VIDEOS = 5
"""Videos of a prompt that the package looks for, `<prompt>-0.mp4` to `<prompt>-4.mp4`."""
PROMPTS = 946
"""Entries of the published list."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dimension:
    """A dimension's scores that become 0 and 1, its weight, and whether it belongs to quality; `scale` is one video's
    value whose score is 1."""

    low: float = 0.0
    high: float = 1.0
    weight: float = 1.0
    quality: bool = False
    scale: float = 1.0


DIMENSIONS = {name: Dimension(**row) for name, row in read_json(Path(__file__).with_suffix(".json")).items()}
QUALITY_SHARE = 4 / 5  # of the total
SUMS = ("quality", "semantic", "total")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A line of the prompt list: its text, the dimensions that it is for, and the whole record."""

    prompt: str
    dimensions: tuple[str, ...]
    record: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The package's result for a dimension: its score, and a value for every video on the same scale, by file name."""

    score: float
    videos: Mapping[str, float]


def read_entries(path: Path, dimensions: Iterable[str]) -> list[Entry]:
    """The entries of VBench_full_info.json that are for any of these dimensions. Raises ValueError: another kind of
    file, a prompt that cannot be part of a file's name, or a dimension without any."""
    wanted = set(dimensions)
    rows = parse_json(read_text(path), str(path))
    if not isinstance(rows, list) or not all(_is_entry(row) for row in rows):
        raise ValueError(
            f"{path} is not VBench's list of prompts: give VBench_full_info.json, a list of objects with prompt_en and "
            f"dimension, as its package has it."
        )
    for number, row in enumerate(rows):
        check_text(row["prompt_en"], f"{path}, entry {number}")
        if unknown := [name for name in row["dimension"] if name not in DIMENSIONS]:
            raise ValueError(
                f"{path}, entry {number}: the dimension {unknown[0]!r} is not one of VBench's {len(DIMENSIONS)}: the "
                "file is of another benchmark, such as VBench-2.0 or VBench++; give VBench_full_info.json of VBench."
            )
    entries = [
        Entry(prompt=row["prompt_en"], dimensions=tuple(row["dimension"]), record=row)
        for row in rows
        if wanted & set(row["dimension"])
    ]
    if lacking := wanted.difference(*(entry.dimensions for entry in entries)):
        raise ValueError(f"{path} has no prompt for {', '.join(sorted(lacking))}: leave out these dimensions.")
    for entry in entries:
        if {"/", "\0"} & set(entry.prompt) or len(video_name(entry.prompt, 0).encode()) > 255:
            raise ValueError(
                f"{path}: the prompt {entry.prompt!r} cannot be part of a file's name, as VBench needs it."
            )
    return entries


def _is_entry(row: Any) -> bool:
    return (
        isinstance(row, dict)
        and isinstance(row.get("prompt_en"), str)
        and isinstance(row.get("dimension"), list)
        and all(isinstance(name, str) for name in row["dimension"])
    )


def video_name(prompt: str, sample: int) -> str:
    """`<prompt>-<k>.mp4`, by which the package finds a video."""
    return f"{prompt}-{sample}.mp4"


def read_measured(path: Path, dimension: str) -> Measured:
    """What the package wrote of a dimension. Raises ValueError: no such dimension or layout, or no finite score."""
    found = read_json(path, finite=False).get(dimension)
    try:
        score, rows = found  # type: ignore[misc]
        videos = {Path(row["video_path"]).name: float(row["video_results"]) for row in rows}
        score = float(score)
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(
            f"{path} does not hold {dimension} as vbench 0.1.5 writes it, [score, [{{video_path, video_results}}, "
            f"...]] ({type(error).__name__}: {error}): use that version."
        ) from error
    if not math.isfinite(score):
        raise ValueError(f"{path}: the score of {dimension} is {score}: no video of it could be measured.")
    scale = DIMENSIONS[dimension].scale
    return Measured(score=score, videos={name: value / scale for name, value in videos.items() if math.isfinite(value)})


def normalise(dimension: str, score: float) -> float:
    """(score - low) / (high - low) of the published constants; not bounded to [0, 1]."""
    known = DIMENSIONS[dimension]
    return (score - known.low) / (known.high - known.low)


def shares(name: str) -> dict[str, float]:
    """Weight of each dimension's normalised score in one of `SUMS`; they add up to 1."""
    if name == "total":
        parts = ((QUALITY_SHARE, shares("quality")), (1 - QUALITY_SHARE, shares("semantic")))
        return {dimension: part * share for part, own in parts for dimension, share in own.items()}
    own = {key: known.weight for key, known in DIMENSIONS.items() if known.quality == (name == "quality")}
    return {key: weight / sum(own.values()) for key, weight in own.items()}


def aggregate(scores: Mapping[str, float]) -> dict[str, float]:
    """Quality, semantic and total score of the dimensions' scores; those are left out that lack a dimension."""
    return {
        name: sum(share * normalise(dimension, scores[dimension]) for dimension, share in shares(name).items())
        for name in SUMS
        if shares(name).keys() <= scores.keys()
    }


def intervals(
    measured: Mapping[str, Measured], entries: Sequence[Entry], base: Mapping[str, Measured] | None = None
) -> dict[str, Interval]:
    """Every dimension's score and the sums, with intervals over prompts; with a base their paired differences.

    The number is the package's own; around it lie the bounds of the mean over videos, whose units are prompts. A sum
    adds up what each video contributes to it: prompts for the same dimensions are a stratum, since these share videos,
    and the strata's means add up to the sum. Videos that the package left out of a dimension are in none of its bounds,
    and of a stratum only those count that have all of its dimensions.
    """
    scores = {name: part.score for name, part in measured.items()}
    before = {name: part.score for name, part in (base or {}).items()}
    found, ends = {}, Range(0.0 if base is None else -1.0, 1.0)
    for name in measured:
        if base is not None and name not in base:
            continue
        mean = scores[name] - (before[name] if base is not None else 0.0)
        own = _of_dimension(name, measured[name], entries, None if base is None else base[name])
        found[name] = _around(mean, own, ends)
    after, earlier = aggregate(scores), aggregate(before)
    for name in after if base is None else [name for name in after if name in earlier]:
        interval = _of_sum(shares(name), measured, entries, base)
        found[name] = _around(after[name] - earlier.get(name, 0.0), interval)
    return found


def _of_dimension(name: str, own: Measured, entries: Sequence[Entry], base: Measured | None) -> Interval | None:
    keys = [
        (entry.prompt, file)
        for entry in entries
        if name in entry.dimensions
        for sample in range(VIDEOS)
        if (file := video_name(entry.prompt, sample)) in own.videos and (base is None or file in base.videos)
    ]
    if not keys:
        return None
    sides = [np.array([side.videos[file] for _, file in keys]) for side in (own, base) if side is not None]
    values = sides[0] if base is None else sides[0] - sides[1]
    return mean_interval(values, [prompt for prompt, _ in keys], ends=ends_of(*sides, changes=base is not None))


def _of_sum(
    share_of: Mapping[str, float],
    measured: Mapping[str, Measured],
    entries: Sequence[Entry],
    base: Mapping[str, Measured] | None,
) -> Interval | None:
    """The sum over strata of the means of what their videos contribute."""
    sides = [measured, *([base] if base is not None else [])]
    found = _whole_videos(share_of, sides, entries)
    if not found:
        return None
    of_stratum = Counter(names for names, _, _ in found)
    of_dimension = Counter(name for names, _, _ in found for name in names)
    rows: list[list[ScoreRow]] = [[] for _ in sides]
    for (names, prompt, sample), file in found.items():
        for side, own in zip(sides, rows, strict=True):
            values = (share_of[name] * normalise(name, side[name].videos[file]) for name in names)
            parts = (value * of_stratum[names] / of_dimension[name] for value, name in zip(values, names, strict=True))
            own.append(ScoreRow(task="+".join(names), prompt=prompt, sample=sample, value=sum(parts)))
    strata = len(of_stratum)
    mean = (stratified_score if strata > 1 else pooled)(rows[0], base=rows[1] if base is not None else None)
    return Interval(mean=mean.mean * strata, low=mean.low * strata, high=mean.high * strata)


def _whole_videos(
    share_of: Mapping[str, float], sides: Sequence[Mapping[str, Measured]], entries: Sequence[Entry]
) -> dict[tuple[tuple[str, ...], str, int], str]:
    """Stratum, prompt and sample -> file of the videos that every side measured in all of their dimensions."""
    found = {}
    for entry in entries:
        names = tuple(sorted(share_of.keys() & set(entry.dimensions)))
        has = [side[name].videos for side in sides for name in names]
        for sample in range(VIDEOS) if names else ():
            file = video_name(entry.prompt, sample)
            if all(file in videos for videos in has):
                found[names, entry.prompt, sample] = file
    return found


def _around(mean: float, interval: Interval | None, ends: Range | None = None) -> Interval:
    """An interval moved so that its mean is the number that is printed, cut to `ends`."""
    if interval is None:
        return point(mean)
    return bound(mean, mean + interval.low - interval.mean, mean + interval.high - interval.mean, ends)
