"""Names that were given up still work for a version, and say what they are called now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flowrl
from flowrl.cli import COMMANDS, main
from flowrl.config.base import config_for_card
from flowrl.config.strict_yaml import ConfigError, dotted_keys
from flowrl.config.train import TrainConfig, load_config
from flowrl.runtime import former_names
from flowrl.runtime.call import answering
from flowrl.training.resume_check import changes

ENDS = "now: the former name works in this version and in none after it"
BASE = {"base": "tiny_g2rpo"}


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if two keys had been renamed."""
    monkeypatch.setitem(former_names.KEYS, "optim.learning_speed", "optim.lr")
    monkeypatch.setitem(former_names.KEYS, "rounds", "num_iterations")


def test_what_is_called_something_now_is_there() -> None:
    known = set(dotted_keys(TrainConfig))
    assert set(former_names.KEYS.values()) <= known
    assert not former_names.KEYS.keys() & known
    assert set(former_names.COMMANDS.values()) <= COMMANDS.keys()
    assert not former_names.COMMANDS.keys() & COMMANDS.keys()
    assert set(former_names.FUNCTIONS.values()) <= set(dir(flowrl))
    assert not former_names.FUNCTIONS.keys() & set(dir(flowrl))


@pytest.mark.usefixtures("keys")
def test_a_former_key_sets_the_key_of_today(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("base: tiny_g2rpo\noptim: {learning_speed: 0.5}\n")
    with pytest.warns(FutureWarning, match=f"^optim.learning_speed is optim.lr {ENDS}$"):
        assert load_config(file).optim.lr == 0.5
    with pytest.warns(FutureWarning, match=f"^rounds is num_iterations {ENDS}$"):
        assert load_config(BASE, ["rounds=7"]).num_iterations == 7
    with pytest.warns(FutureWarning), pytest.raises(ConfigError, match="override 'rounds=x': num_iterations must be"):
        load_config(BASE, ["rounds=x"])


@pytest.mark.usefixtures("keys")
def test_a_former_key_beside_its_new_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="rounds is num_iterations now, and both are given: leave out rounds"):
        load_config({"base": "tiny_g2rpo", "rounds": 3, "num_iterations": 4})


@pytest.mark.usefixtures("keys")
def test_a_run_of_before_a_renaming_goes_on() -> None:
    before: dict[str, Any] = {"config": {"rounds": 3, "optim.learning_speed": 0.5}}
    now: dict[str, Any] = {"config": {"num_iterations": 3, "optim.lr": 0.5}}
    assert changes(before, now, load_config(BASE)) == []
    now["config"]["optim.lr"] = 0.25
    assert changes(before, now, load_config(BASE)) == ["config: optim.lr 0.5 -> 0.25"]


def test_a_former_command_runs_todays(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(former_names.COMMANDS, "published", "reward published")
    assert main(["published"]) == 0
    shown = capsys.readouterr()
    assert shown.err == f"flowrl: flowrl published is flowrl reward published {ENDS}\n"
    assert main(["reward", "published"]) == 0
    assert capsys.readouterr().out == shown.out
    monkeypatch.setenv("RANK", "1")
    assert main(["published"]) == 0
    assert capsys.readouterr().err == ""


def test_a_former_function_is_todays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(former_names.FUNCTIONS, "assess", "doctor")
    with pytest.warns(FutureWarning, match=f"^flowrl.assess is flowrl.doctor {ENDS}$"):
        assert flowrl.assess is flowrl.doctor  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no attribute 'asses'"):
        _ = flowrl.asses  # type: ignore[attr-defined]


def test_a_former_preset_is_its_base_with_a_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = f"sana_grpo_pickscore_24gb is sana_grpo_pickscore with a card of 24 GB {ENDS}"
    with pytest.warns(FutureWarning, match=f"^{said}$"):
        assert config_for_card("sana_grpo_pickscore_24gb", None) == ("sana_grpo_pickscore", 24)
    with answering("flowrl train sana_grpo_pickscore_24gb"):
        assert config_for_card("sana_grpo_pickscore_24gb", 40) == ("sana_grpo_pickscore", 40)
    assert capsys.readouterr().err == f"flowrl: {said}\n"
    mine = tmp_path / "sana_grpo_pickscore_24gb"
    mine.touch()
    for given in (None, BASE, "tiny_g2rpo", "sd35m_grpo_clip_24gb", "none_24gb", str(mine)):
        assert config_for_card(given, None) == (given, None)
