"""Names of published scorers and benchmarks: each says what it reproduces, in one place that page and manifest read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flowrl import cli
from flowrl.config.rewards import RewardConfig
from flowrl.evaluation.benchmark import BENCHMARKS
from flowrl.evaluation.published import published_page
from flowrl.rewards import REWARDS, build_reward, reproduction_of
from flowrl.rewards.compose import sum_of
from flowrl.training.resume_check import reproduced_in

OUR_OWN = {
    "attributes", "edit_verdict", "grid_verdict", "loudness", "motion_verdict", "noisy", "preference_head", "remote",
    "sound_sync", "temporal_smoothness", "votes",
}  # fmt: skip
"""Rewards without a published name, which have no published number to meet."""


def test_every_published_name_says_what_it_reproduces() -> None:
    lines = {name: reproduction_of(name) for name in REWARDS}
    assert {name for name, line in lines.items() if line is None} == OUR_OWN
    reproduces = {name: known.reproduces for name, known in BENCHMARKS.items() if known.reproduces is not None}
    assert reproduces.keys() == BENCHMARKS.keys() - {"diversity", "panel", "video_panel"}
    for name, line in [*lines.items(), *reproduces.items()]:
        assert line is None or ("\n" not in line and 60 < len(line) < 500), name


def test_the_page_is_what_the_code_says(capsys: pytest.CaptureFixture[str]) -> None:
    committed = (Path(__file__).parents[2] / "docs" / "published.md").read_text()
    assert committed == published_page(), "flowrl reward published > docs/published.md"
    assert cli.main(["reward", "published"]) == 0
    assert capsys.readouterr().out == committed


def test_another_text_is_told_with_the_line() -> None:
    line = reproduction_of("hpsv3")
    assert line is not None
    told = reproduction_of("hpsv3", {"template": "mine.txt"})
    assert told is not None
    assert told.startswith(line)
    assert "mine.txt" in told
    assert reproduction_of("hpsv3", {"template": None}) == line
    assert reproduction_of(None) is None
    assert reproduction_of("a_function") is None


def test_the_manifest_tells_the_lines_of_a_runs_rewards() -> None:
    def entry(name: str, **more: object) -> tuple[object, RewardConfig]:
        return build_reward(name, device=torch.device("cpu")), RewardConfig(name=name, **more)  # type: ignore[arg-type]

    trained = sum_of([entry("jpeg_compressibility", label="small"), entry("temporal_smoothness")])  # type: ignore[list-item]
    watched = sum_of([entry("jpeg_incompressibility")])  # type: ignore[list-item]
    scorer = {"reward": "jpeg_compressibility", "options": {"scale": "ddpo"}}
    ranked = build_reward("rank", options=scorer), RewardConfig(name="rank", options=scorer)
    rated = (
        build_reward("win_rate", options={"comparator": scorer}),
        RewardConfig(name="win_rate", options={"comparator": scorer}),
    )
    assert reproduced_in(sum_of([ranked, rated]), None) == {
        "reward rank": reproduction_of("rank"),
        "reward rank/jpeg_compressibility": reproduction_of("jpeg_compressibility"),
        "reward win_rate": reproduction_of("win_rate"),
        "reward win_rate/jpeg_compressibility": reproduction_of("jpeg_compressibility"),
    }
    assert reproduced_in(trained, watched) == {
        "reward small": reproduction_of("jpeg_compressibility"),
        "eval reward jpeg_incompressibility": reproduction_of("jpeg_incompressibility"),
    }
