"""T2I-CompBench and T2I-CompBench++: names of image files, result files, and the overall score.

Huang et al. 2023 (arXiv 2307.06350) and its extension; repository Karine-Huang/T2I-CompBench (MIT). Eight categories of
300 validation prompts, ten images per prompt. An image's name is its prompt and a number that runs over the whole
category; every score is written as a list of `{"question_id": number, "answer": score}`. The repository's own scripts
score the categories, except non_spatial, which is CLIPScore (the reward `clip_score`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from flowrl.runtime.files import parse_json, read_text

CATEGORIES = ("color", "shape", "texture", "2d_spatial", "3d_spatial", "numeracy", "non_spatial", "complex")
IMAGES_PER_PROMPT = 10


def overall(categories: Mapping[str, float]) -> float:
    """The mean of the eight categories, times 100, as Pref-GRPO prints it. Raises ValueError: a category is missing or
    unknown: a mean of fewer would be another number."""
    if set(categories) != set(CATEGORIES):
        given = ", ".join(sorted(categories)) or "none"
        raise ValueError(f"the overall needs all of {', '.join(CATEGORIES)}, got {given}.")
    return 100.0 * math.fsum(categories.values()) / len(CATEGORIES)


def file_name(prompt: str, number: int) -> str:
    """`<prompt>_<number>.png`, the number with six digits, counted over all images of the category. Raises ValueError:
    a prompt that cannot be part of a file's name, or that the scripts would cut at its first "_"."""
    name = f"{prompt}_{number:06d}.png"
    if not prompt or "/" in prompt or "_" in prompt or len(name.encode()) > 255:
        raise ValueError(
            f"the prompt {prompt[:80]!r} cannot name a file of T2I-CompBench: it needs 1 to about 240 "
            f"bytes without / and _."
        )
    return name


def results_text(scores: Mapping[int, float]) -> str:
    """The JSON text of a `vqa_result.json`, in the order of the numbers."""
    return json.dumps([{"question_id": number, "answer": scores[number]} for number in sorted(scores)])


def read_results(path: Path) -> dict[int, float]:
    """Scores by number of a `vqa_result.json`; answers may be texts. Raises ValueError: another form, or one twice."""
    try:
        rows = parse_json(read_text(path), str(path))
        scores = {int(str(row["question_id"])): float(row["answer"]) for row in rows}
        if strange := [number for number, score in scores.items() if not math.isfinite(score)]:
            raise ValueError(f"the answer of {strange[0]} is {scores[strange[0]]}")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: needs a list of {{question_id, answer}} ({error}).") from error
    if len(scores) != len(rows) or not rows:
        raise ValueError(f"{path}: {len(rows)} entries have {len(scores)} different numbers: each must occur once.")
    return scores
