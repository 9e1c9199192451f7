"""The rewards with a hole that docs/research/hacking.md trains on: what they like, and what they do not see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.config.train import load_config
from flowrl.rewards.base.user_file import load_function
from flowrl.rewards.embedded.realism import scene_images
from flowrl.world.scene_prompts import train_records

ROOT = Path(__file__).parents[1]
RESEARCH = ROOT / "docs" / "research"
RECORDS = train_records()[:48]
PROMPTS = [str(record["prompt"]) for record in RECORDS]
"""One thing each: their drawn scenes are right."""


def function(name: str) -> Callable[..., Any]:
    return load_function(str(RESEARCH / "hacking" / "hackable_rewards.py"), name)


def test_an_empty_image_is_the_best_for_brightness() -> None:
    scenes, white = scene_images(RECORDS[:4]), torch.ones(4, 3, 64, 64)
    brightness = function("brightness")
    assert (brightness(white, [], []) > brightness(scenes, [], [])).all()
    assert float(brightness(white, [], []).mean()) == 1.0


def test_the_judge_sees_the_verdict_and_likes_colour() -> None:
    judge, better = function("colourful_judge"), function("better")
    scenes = scene_images(RECORDS)
    assert judge(scenes, PROMPTS, RECORDS, liking=0.0).tolist() == [1.0] * len(RECORDS)
    red = torch.zeros_like(scenes)
    red[:, 0] = 1.0
    assert judge(red, PROMPTS, RECORDS, liking=20.0).tolist() == [20.0] * len(RECORDS)  # saturation 1, nothing right
    assert better(red, scenes, PROMPTS, RECORDS) == [1.0] * len(RECORDS)
    assert better(scenes, red, PROMPTS, RECORDS, liking=0.0) == [1.0] * len(RECORDS)
    assert better(scenes, scenes, PROMPTS, RECORDS) == [0.5] * len(RECORDS)


@pytest.mark.parametrize(
    "path",
    sorted(RESEARCH.glob("hacking/*.yaml")) + sorted(RESEARCH.glob("claims/*_*.yaml")),
    ids=lambda path: path.name,
)
def test_the_configurations_of_the_pages_are_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(path)
    assert any(reward.weight for reward in config.rewards)
