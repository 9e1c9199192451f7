"""All mistakes of a configuration are told in one answer, by `train`, `plan` and `doctor`, each once."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.cli import main
from flowrl.config.train import ConfigError, find_config, load_config
from flowrl.health.configuration_checks import diagnose_configuration
from flowrl.health.diagnosis import divided
from flowrl.session import preflight
from flowrl.session.advice import sizes_line

TEXT = """
base: tiny_flow_grpo
sampler: {kernel: cpss, guidance: 3}
optim: {learning_rate: 1}
group_sizes: 3
prompts: {train: nowhere.txt}
rewards: [{file: warm.py, function: cold}]
kl_reference: ema
policy: {lora_rank: 0}
"""
SAID = {
    "unknown key 'sampler.guidance'": "did you mean 'sampler.guidance_scale'?",
    "unknown key 'optim.learning_rate'": "",
    "unknown key 'group_sizes'": "did you mean 'group_size'?",
    "policy.lora_rank must be at least 1, got 0": "",
    "kl_reference is ema, but kl_coef is 0": "set kl_coef above 0, or remove kl_reference",
    "there is no 'nowhere.txt'": "give a path that exists",
    "got 'cpss'": "did you mean 'cps'?",
    "unknown function 'cold'": "allowed: warm",
}


@pytest.fixture
def wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "warm.py").write_text("def warm(images, prompts, metadata):\n    return images.mean((1, 2, 3))\n")
    (tmp_path / "wrong.yaml").write_text(TEXT)
    return tmp_path / "wrong.yaml"


@pytest.mark.parametrize("command", ["train", "plan"])
def test_everything_is_told_in_one_answer(command: str, wrong: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, str(wrong)]) == 1
    said = capsys.readouterr().err
    for part in SAID:
        assert said.count(part) == 1, part
    assert f"{wrong}: {len(SAID)} mistakes" in said
    assert list(wrong.parent.glob("runs*")) == []


def test_doctor_gives_each_mistake_a_line_with_its_cure(wrong: Path) -> None:
    checks = diagnose_configuration(str(wrong), (), step=False, offline=True).checks
    assert len(checks) == len(SAID)
    for part, cure in SAID.items():
        (check,) = [check for check in checks if part in check.found]
        assert check.state == "fault"
        assert check.cure.startswith(cure)


def test_mistakes_of_right_keys_are_told_at_once_too(wrong: Path) -> None:
    settings = ["prompts.train=nowhere.txt", "sampler.kernel=cpss", "rewards=[{file: warm.py, function: cold}]"]
    checks = diagnose_configuration("tiny_flow_grpo", settings, step=False, offline=True).checks
    faults = [check for check in checks if check.state == "fault"]
    assert len(faults) == 3
    assert sum("cold" in check.found for check in checks) == 1


def test_a_misspelt_key_beside_plain_ones_costs_no_further_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = list[object]()

    def look(given: object, *, here: bool) -> preflight.Looked:
        looked.append(given)
        return preflight.Looked()

    monkeypatch.setattr(preflight, "look", look)
    for number, more in enumerate(("seed: 4", "prompts: {train: nowhere.txt}")):
        (tmp_path / "own.yaml").write_text(f"base: tiny_flow_grpo\nnum_iteration: 3\noptim: {{lr: 0.001}}\n{more}\n")
        with pytest.raises(ConfigError, match="unknown key 'num_iteration'"):
            preflight.load_checked(tmp_path / "own.yaml")
        assert len(looked) == number


@pytest.mark.parametrize(
    ("sentence", "cure"),
    [
        ("reward file 'warm.py': unknown function 'cold'; allowed: warm.", "allowed: warm."),
        ("a.jsonl, line 3: prompt 'x: take it' has 0 source images, and kontext takes 1: give them", "give them"),
        ("4 of 4 images got no valid reward (x 4). Fix the reward or its server", "Fix the reward or its server"),
        ("run.yaml: the file is empty", ""),
    ],
)
def test_cures_stand_behind_the_arrow(sentence: str, cure: str) -> None:
    found, behind = divided(sentence)
    assert behind == cure
    assert sentence.startswith(found)


def test_a_smaller_batch_is_said() -> None:
    config = load_config(find_config("tiny_flow_grpo"), ["prompts_per_step=6", "group_size=4", "rollout_batch_size=24"])
    assert sizes_line(config, 1) == ""
    assert sizes_line(config, 2) == "rollout_batch_size is 12, the largest up to 24 that divides 12 images"
