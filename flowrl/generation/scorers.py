"""Uses rewards as scorers: scores each image once and keeps answers in the journal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowrl.generation.folders import ImageFile
from flowrl.generation.image_folder import check_needs, score_items
from flowrl.generation.named_rewards import reward_specs
from flowrl.rewards import Reward, addresses_of
from flowrl.rewards.base.specs import parse_reward_specs, validate_reward_specs
from flowrl.rewards.compose import build_weighted_sum
from flowrl.rewards.judges.chat import with_identities
from flowrl.runtime.files import plain
from flowrl.runtime.journal import Journal, Row
from flowrl.runtime.shapes import Float64
from flowrl.training.model_files import named_files

AT_ONCE = 512  # images whose answers are lost at most when a run is cut short


def scorer_specs(rewards: str, options: Mapping[str, str]) -> list[dict[str, Any]]:
    """The scorers of a command line as checked specs of rewards. Loads no weights.

    Args:
        rewards: names or FILE.py:FUNCTION by commas, or a YAML file with a list `rewards:`.
        options: `pick_score.scale` -> text.

    Raises ValueError: an unknown reward or option, or a bad value.
    """
    specs = reward_specs(rewards, [f"{name}={text}" for name, text in options.items()])
    validate_reward_specs(specs)
    return specs


def load_rewards(specs: Sequence[Mapping[str, Any]], device: torch.device | str) -> dict[str, Reward]:
    """Checked and built rewards by key."""
    validate_reward_specs(specs)
    return {term.key: term.reward for term in build_weighted_sum(specs, device=device).terms}


def load_scorers(specs: Sequence[Mapping[str, Any]], device: torch.device | str) -> dict[str, Reward]:
    """The rewards by key. Raises ValueError: one compares a prompt's images: its mean is the same for all models."""
    rewards = load_rewards(specs, device)
    for name, reward in rewards.items():
        if reward.kind in ("groupwise", "pairwise"):
            raise ValueError(
                f"reward {name!r} compares the images of a prompt with each other, so its mean is the same for "
                f"every model: take one that judges an image by itself."
            )
    return rewards


def answers_of(benchmark: str, name: str, reward: Reward, spec: Mapping[str, Any], folder: Path) -> Journal:
    """The journal of a reward's answers on a subject's images: one per version, options, and content of their files."""
    identity = {"benchmark": benchmark, "reward": name, "version": reward.version}
    return Journal(folder, identity | said_by(spec))


def said_by(spec: Mapping[str, Any]) -> dict[str, Any]:
    """All of a spec that can change a value: options, content of their files, frames, but not addresses of servers."""
    (entry,) = parse_reward_specs([spec])
    moved = addresses_of(entry.name or "")
    options = with_identities({option: value for option, value in entry.options.items() if option not in moved})
    found = {"options": options, "files": named_files(entry.options), "frames": plain(entry.frames)}
    return {part: value for part, value in found.items() if value}


def has_prompts(items: Sequence[ImageFile], prompt: str | None) -> bool:
    """Whether prompts were given; an empty one may be given on purpose."""
    return prompt is not None or any(item.prompt for item in items)


def score_images(
    name: str, reward: Reward, images: Sequence[ImageFile], journal: Journal, *, batch_size: int, label: str
) -> list[Row]:
    """Scores images: one row {value, parts, error} per image in order. Failures are null: the next run asks again."""
    keys = [image.key_with(image.read_with) for image in images]
    missing = [place for place, key in enumerate(keys) if key not in journal.rows]
    check_needs(reward, [images[place] for place in missing], key=name, prompts_given=True)
    found: dict[int, Row] = {}
    for first in range(0, len(missing), AT_ONCE):
        places = missing[first : first + AT_ONCE]
        scores = score_items(reward, [images[place] for place in places], key=name, batch_size=batch_size, label=label)
        for row, place in enumerate(places):
            parts = {part: float(values[row]) for part, values in scores.parts.items()}
            found[place] = plain({"value": float(scores.values[row]), "error": scores.errors[row], "parts": parts})
            if scores.errors[row] is None:
                journal.add(keys[place], found[place])
    return [found.get(place) or journal.rows[key] for place, key in enumerate(keys)]


def values_of(rows: Sequence[Row]) -> Float64[np.ndarray, " n"]:
    """Values of rows, NaN for failures."""
    return np.array([math.nan if row["value"] is None else row["value"] for row in rows], dtype=np.float64)
