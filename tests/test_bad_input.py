"""Whatever a user can get wrong ends with one paragraph that says what to change, and with nothing overwritten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from tiny_runs import TinyRuns, tiny_runs

from flowrl.cli import COMMANDS, main

CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_sd3_folder: Path) -> TinyRuns:
    runs = tiny_runs(tmp_path_factory.mktemp("bad"), tiny_sd3_folder)
    (runs.folder / "empty.txt").write_text("\n\n")
    (runs.folder / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"\n')
    (runs.folder / "plain.jsonl").write_text('{"prompt": "a"}\n')
    (runs.folder / "no_pipeline").mkdir()
    return runs


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every attempt to load a model; none succeeds."""
    seen: list[Any] = []

    def refuse(*arguments: Any, **options: Any) -> None:
        seen.append(arguments)
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", refuse)
    return seen


def _snapshot(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")
            if "__pycache__" not in path.parts}  # fmt: skip


def _error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one paragraph that a command ends with."""
    capsys.readouterr()
    assert main(arguments) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("flowrl: ")
    assert "Traceback" not in shown
    assert "\n\n" not in shown.strip()
    return shown


def _reward(body: str) -> str:
    return f"def reward(images, prompts, metadata):\n    {body}\n"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["num_iteration=3"], ["num_iteration", "num_iterations"]),
        (["sampler.knd=1"], ["sampler.knd"]),
        (["num_iterations=many"], ["num_iterations", "many"]),
        (["prompts.train=absent.txt"], ["absent.txt"]),
        (["prompts.train={folder}/empty.txt"], ["empty.txt", "holds no prompt"]),
        (["prompts.eval={folder}/broken.jsonl"], ["broken.jsonl, line 2", "JSON"]),
        (["group_size=1"], ["group_size", "at least 2"]),
        (["updates_per_rollout=3"], ["updates_per_rollout (3)"]),
        (["sampler.kernel=ode"], ["ode", "flow_sde"]),
        (["sampler.noise_level=0"], ["noise_level"]),
        (["policy.target_modules=[attn.to_z]"], ["attn.to_z", "attn.to_q"]),
        (["policy.init_lora=absent"], ["absent"]),
        (["rewards=[{file: absent.py, function: f}]"], ["absent.py", "does not exist"]),
        (["rewards=[{file: {folder}/brightness.py, function: brightnes}]"], ["brightnes", "brightness"]),
        (["rewards=[{name: genval}]"], ["genval", "geneval"]),
        (["rewards=[{name: geneval}]"], ["prompts.txt", ".jsonl", "geneval"]),
        (["rewards=[{name: geneval}]", "prompts.train={folder}/plain.jsonl"], ["plain.jsonl", "tag", "'a'"]),
        (["pipeline.model={folder}/no_pipeline"], ["no_pipeline", "model_index.json"]),
        (["pipeline.model=./absent"], ["absent"]),
        (["pipeline.model=asset:tiny-sd4"], ["tiny-sd4"]),
        (["pipeline.device=tpu"], ["tpu", "cuda"]),
        pytest.param(["pipeline.device=cuda"], ["cuda", "cpu"], marks=CPU_ONLY),
        pytest.param(["pipeline.device=cuda:1"], ["cuda:1", "cpu"], marks=CPU_ONLY),
        (["eval_every=1"], ["prompts.eval"]),
        (["resume={folder}/no_pipeline"], ["resume"]),
    ],
    ids=lambda given: " ".join(given).replace("{folder}/", "") if isinstance(given, list) else "",
)  # fmt: skip
def test_wrong_settings_are_refused_before_a_model_loads(
    runs: TinyRuns, loads: list[Any], overrides: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = _snapshot(runs.folder)
    given = [override.replace("{folder}", str(runs.folder)) for override in overrides]
    shown = _error(["train", str(runs.config), f"out={runs.folder / 'never'}", *given], capsys)
    assert all(word in shown for word in said), shown
    assert loads == []
    assert _snapshot(runs.folder) == before


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise RuntimeError('no luck')", ["no luck", "rewards_", ":2"]),
        (
            "return [float('nan')] * len(prompts)",
            ["8 of 8 images", "not_finite 8", "Nothing was trained yet"],
        ),
        ("return [1.0]", ["8 numbers", "[1]"]),
        ("return 'good'", ["8 numbers", "str"]),
    ],
)
def test_rewards_that_go_wrong_name_the_users_line(
    runs: TinyRuns, body: str, said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    shown = _error(["train", str(runs.config), f"out={out}", runs.rewards(_reward(body))], capsys)
    assert all(word in shown for word in said), shown
    assert not out.exists()  # nothing came of it, so the name is free again


def test_a_reward_that_never_changes_stops_the_run(
    runs: TinyRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = runs.rewards(_reward("return [0.25] * len(prompts)"))
    shown = _error(["train", str(runs.config), f"out={tmp_path / 'run'}", reward, "num_iterations=9"], capsys)
    assert "0.25 for every image in 3 iterations in a row" in shown


def test_a_reward_file_that_cannot_be_imported_is_said_early(
    runs: TinyRuns, loads: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for source, said in (("def reward(images:\n", "SyntaxError"), ("import absent_module\n", "absent_module")):
        shown = _error(["train", str(runs.config), runs.rewards(source)], capsys)
        assert said in shown
    assert loads == []


def test_a_folder_that_holds_anything_is_left_alone(
    runs: TinyRuns, loads: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    shown = _error(["train", str(runs.config), f"out={tmp_path}"], capsys)
    assert "not empty" in shown
    assert "out=" in shown
    assert _snapshot(tmp_path) == {tmp_path / "thesis.txt": b"mine"}
    assert loads == []


def test_a_configuration_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert "tiny_grpo_geneval" in _error(["train", "tiny_grpo_genval"], capsys)
    assert "absent.yaml" in _error(["train", "absent.yaml"], capsys)


def test_resume_takes_a_run_and_few_settings(
    runs: TinyRuns, loads: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(runs.config.read_text())
    assert "optim.lr=1" in _error(["train", f"resume={tmp_path}", "optim.lr=1"], capsys)
    assert "is not a run folder" in _error(["train", f"resume={tmp_path / 'absent'}"], capsys)
    assert "is not a run folder" in _error(["train", f"resume={runs.folder}"], capsys)
    inside = tmp_path / "with_resume.yaml"
    inside.write_text(runs.config.read_text() + f"resume: {tmp_path}\n")
    assert "command line" in _error(["train", str(inside)], capsys)
    assert loads == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], ["--prompt", "--prompts"]),
        (["--prompt", "a", "--seeds", "3-1"], ["--seeds", "3-1", "0-3"]),
        (["--prompt", "a", "--seeds", "one"], ["--seeds", "one"]),
        (["--prompt", "a", "--before-training", "--lora", "x"], ["--before-training", "--lora"]),
        (["--prompts", "absent.txt"], ["absent.txt"]),
    ],
)
def test_sample_says_what_it_needs(
    loads: list[Any], arguments: list[str], said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = _error(["sample", "asset:tiny-sd3", "--out", str(tmp_path / "out"), *arguments], capsys)
    assert all(word in shown for word in said), shown
    assert loads == []
    assert not (tmp_path / "out").exists()


def test_report_wants_a_run(runs: TinyRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not a run" in _error(["report", str(runs.folder / "no_pipeline")], capsys)
    assert "absent" in _error(["report", str(tmp_path / "absent")], capsys)


def test_a_misspelt_command_is_recognised(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean train?" in _error(["trian"], capsys)
    assert f"there are {', '.join(COMMANDS)}" in _error(["xyzzy"], capsys)
