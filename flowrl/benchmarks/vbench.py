"""VBench: sixteen dimensions of text-to-video, how their raw values become a quality, a semantic and a total score.

Huang et al. 2024 (arXiv 2311.17982); the raw values come from its own package. Videos are named `<prompt>-<k>.mp4`,
five of each of 946 prompts (25 of those for temporal flickering).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from flowrl.config.options import unknown_name

VIDEOS_PER_PROMPT = 5

QUALITY: dict[str, float] = {
    "subject_consistency": 1.0,
    "background_consistency": 1.0,
    "temporal_flickering": 1.0,
    "motion_smoothness": 1.0,
    "dynamic_degree": 0.5,
    "aesthetic_quality": 1.0,
    "imaging_quality": 1.0,
}
"""Dimensions of the quality score and their weights."""

SEMANTIC = (
    "object_class",
    "multiple_objects",
    "human_action",
    "color",
    "spatial_relationship",
    "scene",
    "appearance_style",
    "temporal_style",
    "overall_consistency",
)
"""Dimensions of the semantic score, all of one weight."""

RANGES: dict[str, tuple[float, float]] = {
    "subject_consistency": (0.1462, 1.0),
    "background_consistency": (0.2615, 1.0),
    "temporal_flickering": (0.6293, 1.0),
    "motion_smoothness": (0.706, 0.9975),
    "scene": (0.0, 0.8222),
    "appearance_style": (0.0009, 0.2855),
    "temporal_style": (0.0, 0.364),
    "overall_consistency": (0.0, 0.364),
}
"""Lowest and highest raw value of a dimension; 0 and 1 of those that are not named."""

QUALITY_WEIGHT, SEMANTIC_WEIGHT = 4.0, 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Normalised dimensions, and the three scores made of them; `missing` are the dimensions that were taken as 0."""

    dimensions: dict[str, float]
    quality: float
    semantic: float
    total: float
    missing: tuple[str, ...]


def normalise(name: str, raw: float) -> float:
    """`(raw - low) / (high - low)` of a dimension; not cut off, so it may leave [0, 1] as the published one does.

    Raises:
        ValueError: an unknown dimension or a value that is not finite.
    """
    if name not in QUALITY and name not in SEMANTIC:
        raise ValueError(unknown_name("dimension of VBench", name, (*QUALITY, *SEMANTIC)))
    if not math.isfinite(raw):
        raise ValueError(f"the raw value of {name} must be finite, got {raw}: leave out what could not be measured.")
    low, high = RANGES.get(name, (0.0, 1.0))
    return (raw - low) / (high - low)


def aggregate(raw: Mapping[str, float]) -> Scores:
    """Quality, the weighted mean of seven dimensions; semantic, the mean of nine; total = (4 quality + semantic) / 5.

    Args:
        raw: values by dimension. One that is missing counts as the raw value 0, as on the leaderboard, and is named in
            the result: such a total is no result of a whole evaluation.
    """
    for name in raw:
        normalise(name, raw[name])
    found = {name: normalise(name, raw.get(name, 0.0)) for name in (*QUALITY, *SEMANTIC)}
    quality = math.fsum(weight * found[name] for name, weight in QUALITY.items()) / math.fsum(QUALITY.values())
    semantic = math.fsum(found[name] for name in SEMANTIC) / len(SEMANTIC)
    return Scores(
        dimensions=found,
        quality=quality,
        semantic=semantic,
        total=(QUALITY_WEIGHT * quality + SEMANTIC_WEIGHT * semantic) / (QUALITY_WEIGHT + SEMANTIC_WEIGHT),
        missing=tuple(name for name in found if name not in raw),
    )


def file_name(prompt: str, number: int) -> str:
    """`<prompt>-<number>.mp4`, the number from 0.

    Raises:
        ValueError: a prompt that cannot be part of a file's name.
    """
    name = f"{prompt}-{number}.mp4"
    if not prompt or "/" in prompt or len(name.encode()) > 255:
        raise ValueError(f"the prompt {prompt[:80]!r} cannot name a file of VBench: it needs 1 to about 240 bytes "
                         f"without /.")  # fmt: skip
    return name


def parse_file_name(name: str) -> tuple[str, int]:
    """Prompt and number of a video's name.

    Raises:
        ValueError: another form.
    """
    found = re.fullmatch(r"([^/]+)-(\d+)\.(?:mp4|gif)", name)
    if found is None:
        raise ValueError(f"a video of VBench is named <prompt>-<number>.mp4, got {name!r}.")
    return found[1], int(found[2])


def video_seed(base: int, prompt_index: int, number: int, *, per_prompt: int = VIDEOS_PER_PROMPT) -> int:
    """The seed of a video in Pref-GRPO's evaluation: `base + prompt_index * per_prompt + number`."""
    return base + prompt_index * per_prompt + number
