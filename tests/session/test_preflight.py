"""A configuration that can be trained is resolved once; what typed words and values of Python say is the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_pipeline import toy_config, write_toy

from flowrl.config.base import find_config
from flowrl.config.overrides import typed_settings
from flowrl.config.train import load_config
from flowrl.credit import CREDIT
from flowrl.pipelines import PIPELINES
from flowrl.session.preflight import preflight

TINY = find_config("tiny_grpo_geneval")


def test_what_a_run_is_made_of_is_resolved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PIPELINES, "sd3", "toy_pipeline")
    config = toy_config(write_toy(tmp_path), "sampler.noise_level=0.5")
    ready = preflight(config)
    assert ready.config is config
    assert ready.kernel.noise_level == 0.5
    assert ready.method is CREDIT[config.credit.method]
    assert [one.entry for one in ready.rewards] == [*config.rewards]
    assert ready.family.name == "sd3"
    assert ready.layout.world == 1
    assert ready.objective == ready.recipe.objective_of(config)


def test_a_run_elsewhere_may_have_more_processes_than_are_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PIPELINES, "sd3", "toy_pipeline")
    config = toy_config(write_toy(tmp_path), "parallel.replicate=2")
    assert preflight(config, here=False).layout.data == 2
    with pytest.raises(ValueError, match="1 process was launched"):
        preflight(config)


def test_settings_as_words_and_as_values_are_the_same() -> None:
    words = ["optim.lr=1e-3", "seed=1", "seed=3", "out=2024", "rewards.0.weight=2", "eval.grid=linspace"]
    values = {"optim": {"lr": 1e-3}, "seed": 3, "out": Path("2024"), "rewards.0.weight": 2, "eval.grid": "linspace"}
    made = load_config(TINY, words)
    assert made == load_config(TINY, typed_settings(words)) == load_config(TINY, values)
    assert made.out == "2024"


def test_a_setting_of_the_name_of_a_parameter_is_refused_as_a_setting() -> None:
    assert typed_settings(["show=3", "seed=1"], taken=("show",)).keys() == {"show=", "seed"}
    with pytest.raises(ValueError, match=r"override 'show=3'.*unknown key 'show'|unknown key 'show'"):
        load_config(TINY, typed_settings(["show=3"], taken=("show",)))


def test_what_no_file_could_hold_is_refused() -> None:
    for value in (len, float("nan"), {1, 2}, [{"a": {1: 2}}]):  # of the last JSON would make text
        with pytest.raises(ValueError, match="cannot stand in a configuration"):
            load_config(TINY, {"seed": value})
    with pytest.raises(ValueError, match=r"rewards\.0=.*a reward of your own is \{'file'"):
        load_config({"base": str(TINY), "rewards": [lambda images, prompts, metadata: images.mean((1, 2, 3))]})
