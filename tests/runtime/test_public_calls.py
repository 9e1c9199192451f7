"""Calls of the Python interface: the words that files keep of them, what they silence, and how their errors speak."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import TinyRuns, start, tiny_runs

import flowrl
from flowrl.runtime.files import read_json
from flowrl.runtime.scrubbing import say

SCRIPT = """
import flowrl

run = flowrl.train("tiny.yaml", num_iterations=1, out="run")
panel = {"rewards": "jpeg_compressibility"}
flowrl.evaluate(run, "panel", prompts="prompts.txt", options=panel, num_prompts=2, samples=2, steps=1, out="evaluation")
"""
SECONDS = 600
"""How long a thread may take."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_sd3_folder: Path) -> TinyRuns:
    return tiny_runs(tmp_path_factory.mktemp("calls"), tiny_sd3_folder)


@pytest.mark.slow
def test_files_keep_the_calls_of_a_script_and_not_its_arguments(runs: TinyRuns, warm_python: str) -> None:
    (runs.folder / "my.py").write_text(SCRIPT)
    script = start(["my.py", "--my-flag", "3"], runs.folder, PYTHON_EXEC=warm_python)
    out, error = script.communicate(timeout=SECONDS)
    assert script.returncode == 0, error
    assert re.search(r"^Starting run: grpo .* images, on the CPU \(\d+ threads?\)$", out, re.MULTILINE)
    made = [read_json(runs.folder / file)["command"] for file in ("run/manifest.json", "evaluation/result.json")]
    assert made == [
        "flowrl.train(config='tiny.yaml', num_iterations=1, out='run')",
        "flowrl.evaluate(models='run', benchmark='panel', out='evaluation', prompts='prompts.txt', num_prompts=2, "
        "samples=2, options={'rewards': 'jpeg_compressibility'}, steps=1)",
    ]


@pytest.mark.slow
def test_a_silent_call_in_a_thread_silences_itself_alone(runs: TinyRuns, capsys: pytest.CaptureFixture[str]) -> None:
    within, told = threading.Event(), threading.Event()
    made: list[Any] = []

    def watch(number: int, row: object) -> None:
        print(f"iteration {number} of mine")
        within.set()
        assert told.wait(SECONDS)

    def train() -> None:
        made.append(flowrl.train(runs.config, out=runs.folder / "thread", on_iteration=watch, show=False))

    thread = threading.Thread(target=train, daemon=True)
    print("before")
    thread.start()
    assert within.wait(SECONDS)
    print("beside")
    say("a note of the main thread")
    told.set()
    thread.join(SECONDS)
    print("after")
    assert made[0].finished
    lines = ["before", "iteration 0 of mine", "beside", "a note of the main thread", "iteration 1 of mine", "after"]
    assert capsys.readouterr() == ("\n".join([*lines, ""]), "")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: flowrl.sample(prompts="a", before_training=True, lora="x"), "`before_training` .* `lora` adds one"),
        (lambda: flowrl.sample(), "`prompts` .* `prompt_file`"),
        (lambda: flowrl.evaluate(models="toy", images="x"), "`images` .* `models` has no place"),
        (lambda: flowrl.score("jpeg_compressibility", ".", prompt="a", prompts="b"), "`prompt` .* `prompts`"),
        (lambda: flowrl.reward_card("jpeg_compressibility"), "`folder` of images or `model`"),
        (lambda: flowrl.serve("jpeg_compressibility", device="cpu", devices="cpu"), "`device` .* `devices`"),
        (lambda: flowrl.compare("tiny_g2rpo", out="x", budget="images=8", num_seeds=0), "`num_seeds`"),
        (lambda: flowrl.bench("sana_grpo_pickscore_24gb"), "`card` 24"),
        (lambda: flowrl.plan("tiny_g2rpo", bench="absent"), "`bench`"),
    ],
)
def test_errors_name_parameters(
    call: Callable[[], object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(flowrl.FlowrlError, match=words) as caught:
        call()
    assert " --" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
