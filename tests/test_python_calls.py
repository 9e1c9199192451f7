"""The functions for Python: light imports, one path with the commands, callbacks, results, errors; their doctests."""

from __future__ import annotations

import doctest
import importlib
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from tiny_runs import TinyRuns, lora, metrics, tiny_runs
from toy_pipeline import toy_runs

import flowrl
from flowrl.health.diagnosis import Examination
from flowrl.rendering.notebook import SHOWN, curve, images_row
from flowrl.runs.trained_run import columns
from flowrl.runtime.files import read_json


def with_examples() -> list[str]:
    """Every module of the package whose docstrings hold an example."""
    root = Path(flowrl.__file__).resolve().parent
    paths = [
        *root.rglob("*.py"),
        *(path for name in ("samplers", "rewards", "pipelines") for path in (root / name).rglob("*.py")),
    ]
    names = {
        ".".join(("flowrl", *path.relative_to(root).with_suffix("").parts))
        for path in paths
        if ">>> " in path.read_text(encoding="utf-8")
    }
    return sorted(name.removesuffix(".__init__") for name in names)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_sd3_folder: Path) -> TinyRuns:
    return tiny_runs(tmp_path_factory.mktemp("python"), tiny_sd3_folder)


@pytest.fixture
def toys(tmp_path: Path) -> Iterator[TinyRuns]:
    """Of the toy, where nothing is drawn outside a training."""
    yield from toy_runs(tmp_path)


def test_importing_and_asking_for_a_function_is_light() -> None:
    code = "import sys, flowrl; flowrl.train; print(sorted({'torch', 'numpy', 'rich'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert {"train", "sample", "evaluate", "plan", "compare", "read_run"} <= set(dir(flowrl))
    assert callable(flowrl.pretrain), "a function, whatever was imported before"
    with pytest.raises(AttributeError, match="there are FlowrlError, bench, compare"):
        _ = flowrl.trian  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", with_examples())
def test_examples_in_docstrings(module: str) -> None:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    found = doctest.testmod(importlib.import_module(module), extraglobs={"flowrl": flowrl}, optionflags=flags)
    assert found.attempted > 0
    assert found.failed == 0


def test_a_function_trains_what_the_command_trains(toys: TinyRuns, capsys: pytest.CaptureFixture[str]) -> None:
    settings = yaml.safe_load(toys.config.read_text())
    seen: list[tuple[int, Mapping[str, Any]]] = []
    run = flowrl.train(
        settings, out=toys.folder / "function", on_iteration=lambda number, row: seen.append((number, row)), show=False
    )
    assert capsys.readouterr() == ("", "")
    command = toys.train("command")
    assert metrics(run.folder) == metrics(command)
    assert lora(run.folder) == lora(command)
    assert run.finished
    assert [number for number, _ in seen] == [0, 1]
    assert run.metrics["iteration"] == (0, 1)
    assert run.metrics["reward"] == tuple(row["reward"] for _, row in seen)
    assert run.lora == run.folder / "lora"
    assert flowrl.read_run(run.folder).metrics == run.metrics
    assert "finished after 2 iterations" in run._repr_html_()
    with pytest.raises(FrozenInstanceError):
        run.finished = False  # type: ignore[misc]


@pytest.mark.slow
def test_false_from_a_callback_stops_and_the_run_goes_on(toys: TinyRuns) -> None:
    whole = toys.train("whole", "num_iterations=3")
    run = flowrl.train(
        toys.config, num_iterations=3, out=toys.folder / "stopped", on_iteration=lambda number, row: number < 1
    )
    assert not run.finished
    assert len(run.metrics["iteration"]) == 2
    again = flowrl.train(resume=run)
    assert again.finished
    assert lora(again.folder) == lora(whole)


def test_what_a_callback_raises_ends_the_run_saved(toys: TinyRuns) -> None:
    def fails(number: int, row: Mapping[str, Any]) -> None:
        raise KeyError("my own mistake")

    with pytest.raises(flowrl.FlowrlError, match=r"my own mistake.*last good checkpoint.*000001") as caught:
        flowrl.train(
            toys.config,
            num_iterations=3,
            checkpoint_every=3,
            out=toys.folder / "raised",
            on_iteration=fails,
            show=False,
        )
    assert isinstance(caught.value.__cause__, KeyError)
    assert flowrl.train(resume=toys.folder / "raised", show=False).finished


def test_images_come_as_images(runs: TinyRuns, tmp_path: Path) -> None:
    run = flowrl.train(runs.config, num_iterations=1, out=tmp_path / "run", show=False)
    drawn = flowrl.sample(run, ["a red circle", "a blue square"], seeds=[0, 3], out=tmp_path / "drawn", show=False)
    assert drawn.seeds == (0, 3, 0, 3)
    with Image.open(tmp_path / "drawn" / "001_seed3.png") as file:
        assert file.tobytes() == drawn.images[3].tobytes()
    alone = flowrl.sample(run, "a blue square", seeds=3, show=False)
    assert alone.folder is None
    assert drawn._repr_html_().count("<img") == 4


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: flowrl.train({"num_iteration": 3}), "num_iterations"),
        (lambda: flowrl.train({"base": "tiny_g2rp"}), "tiny_g2rpo"),
        (lambda: flowrl.train(rewards=[{"function": len}]), "cannot stand in a configuration"),
        (lambda: flowrl.sample(), "no prompt was given"),
        (lambda: flowrl.sample(prompts="a circle", steps=-1), "must be a whole number"),
        (lambda: flowrl.plan("tiny_g2rpo", group_size=0), "group_size"),
        (lambda: flowrl.compare([Path("a"), {"b": 1}], out="nowhere", budget="nfe=10"), "give files or names"),  # type: ignore[list-item]
        (lambda: flowrl.compare("tiny_g2rpo", out="nowhere", budget="nfes=10"), "nfe=NUMBER"),
        (lambda: flowrl.evaluate(benchmark="genevil"), "did you mean 'geneval'"),
        (lambda: flowrl.read_run("nowhere"), "is not a folder"),
    ],
)
def test_bad_input_is_an_error_of_flowrl(call: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(flowrl.FlowrlError, match=said):
        call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_evaluation_has_scores_differences_and_images(runs: TinyRuns, tmp_path: Path) -> None:
    found = flowrl.evaluate(
        runs.train("evaluated"), "geneval", baseline="base", prompts="world", num_prompts=6, samples=1, steps=2,
        out=tmp_path, show=False,
    )  # fmt: skip
    assert found.benchmark == "geneval"
    assert all(0 <= score.mean <= 1 for score in found.scores.values())
    assert set(found.differences) <= set(found.scores)
    assert {score.mean for score in found.differences.values()} <= {0.0}, "two iterations change no verdict"
    assert [row["prompt"] for row in found.rows] == list(dict.fromkeys(row["prompt"] for row in found.rows))
    assert len(found.images) == len(found.rows) == 6
    assert "change" in found._repr_html_()
    assert (found.folder / "page.html").is_file()


def test_columns_keep_rows_apart() -> None:
    found = columns([{"iteration": 0, "name": "x"}, {"iteration": 1, "kl": 0.5}])
    assert found.keys() == {"iteration", "kl"}
    assert math.isnan(found["kl"][0])


def test_html_shows_few_images_and_no_curve_of_one_number() -> None:
    images = [Image.new("RGB", (8, 8))] * (SHOWN + 2)
    assert images_row(images, ["<b>"] * len(images)).count("<img") == SHOWN
    assert "<b>" not in images_row(images, ["<b>"] * len(images))
    assert curve("reward", (1.0,)) == ""
    assert "0.500 at last" in curve("reward", (0.25, math.nan, 0.5))


def test_a_run_says_by_which_call_it_was_made(toys: TinyRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["my.py", "--my-flag", "3"])
    run = flowrl.train(toys.config, num_iterations=1, out=tmp_path / "run", show=False)
    told = read_json(run.folder / "manifest.json")["command"]
    assert told == f"flowrl.train(config='{toys.config}', show=False, num_iterations=1, out='{run.folder}')"


def test_a_diagnosis_has_its_parts_as_they_come(runs: TinyRuns) -> None:
    run, parts = runs.train("diagnosed"), list[Examination]()
    found = flowrl.doctor(run, on_examination=parts.append)
    assert found.examinations == (*parts,)
    assert (found.of_run, found.stops) == (True, False)
    assert str(run) in " ".join(str(found).split())
    assert "<table" in found._repr_html_()
    with pytest.raises(flowrl.FlowrlError, match="has no effect on the run"):
        flowrl.doctor(run, num_iterations=3)
    with pytest.raises(flowrl.FlowrlError, match="name that first"):
        flowrl.doctor(num_iterations=3)
