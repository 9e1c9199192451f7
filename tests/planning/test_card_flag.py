"""`--card`: what the planner changes for a card, as settings of a run."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from counted_operations import measured_once
from tiny_runs import TinyRuns, tiny_runs

import flowrl
from flowrl.cli import main
from flowrl.config import base
from flowrl.config.base import find_config
from flowrl.config.train import load_config
from flowrl.planning.plan import CACHE, for_card
from flowrl.session.train import train


@pytest.fixture(autouse=True)
def _measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured_once(monkeypatch)


@pytest.fixture(scope="module")
def tiny(tiny_sd3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TinyRuns:
    return tiny_runs(tmp_path_factory.mktemp("card"), tiny_sd3_folder, threads=1)


def test_what_a_card_changes_is_in_the_run_s_configuration(
    tiny: TinyRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def fit(config: Any, name: str, card: int) -> tuple[str, ...]:
        asked.append((config.num_iterations, name, card))
        return ("rollout_batch_size=2", "micro_batch_size=2")

    train(tiny.config, card=24, fit=fit, num_iterations=1, out=str(tmp_path / "run"))
    assert asked == [(1, tiny.config.stem, 24)]
    made = load_config(tmp_path / "run" / "config.yaml")
    assert (made.rollout_batch_size, made.micro_batch_size, made.num_iterations) == (2, 2, 1)
    assert "for 24 GB: rollout_batch_size=2 micro_batch_size=2" in capsys.readouterr().out


def test_a_card_is_of_a_new_run_and_has_to_hold_it(tiny: TinyRuns, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", f"resume={tiny.folder}", "--card", "24"]) == 1
    assert "--card changes a new run" in capsys.readouterr().err
    with pytest.raises(flowrl.FlowrlError, match="does not fit 1 GB with any setting"):
        flowrl.train("tiny_g2rpo", card=1)


def test_a_former_preset_is_told_by_its_base_and_card(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sana_grpo_pickscore_24gb"]) == 1
    assert "sana_grpo_pickscore with --card 24" in capsys.readouterr().err


def test_a_former_preset_is_planned_and_trained_on_its_card(
    tiny: TinyRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a configuration of the tests in the place of one that ships, which needs a model of gigabytes."""
    for name in (
        "migrating.imported",
        "planning.bases",
        "planning.catalogue",
        "planning.recommended",
        "planning.written",
    ):
        importlib.import_module(f"flowrl.{name}")  # now: imported under the patch, they would keep it
    monkeypatch.setattr(base, "config_files", lambda: {"mine": tiny.config})
    asked: list[Any] = []

    def fit(config: Any, name: str, card: int) -> tuple[str, ...]:
        asked.append(card)
        return ("rollout_batch_size=2", "micro_batch_size=2")

    with pytest.warns(FutureWarning, match="mine_24gb is mine with a card of 24 GB now"):
        train("mine_24gb", fit=fit, num_iterations=1, out=str(tmp_path / "run"))
    made = load_config(tmp_path / "run" / "config.yaml")
    assert (asked, made.rollout_batch_size) == ([24], 2)
    capsys.readouterr()
    assert main(["plan", "mine_24gb"]) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith("flowrl: mine_24gb is mine with a card of 24 GB now: the former name works in")
    assert main(["plan", "mine", "--card", "24"]) == 0
    assert capsys.readouterr().out == shown.out


@pytest.mark.slow
def test_the_planner_finds_what_the_presets_said() -> None:
    changes = for_card(load_config(find_config("sana_grpo_pickscore"), ["num_iterations=1"]), "sana", 24)
    assert changes == (
        "pipeline.free_text_encoders=true", "pipeline.vae_slice=3", "rollout_batch_size=2", "micro_batch_size=2",
        f"prompts.cache={CACHE}",
    )  # fmt: skip
