"""`flowrl init`: what it writes is accepted by `flowrl plan`, whatever was asked for; nothing is written otherwise."""

from __future__ import annotations

import io
import os
import pty
from pathlib import Path

import pytest

from flowrl import cli
from flowrl.config.train import load_config
from flowrl.planning.bases import Wish, base_for

PROMPTS = "a red cube\na blue ball\na green cone\na red ball\n"


@pytest.mark.slow
def test_the_file_is_short_commented_and_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, prompts = tmp_path / "my.yaml", tmp_path / "prompts.txt"
    prompts.write_text(PROMPTS)
    words = ["--model", "asset:tiny-sd3", "--card", "24", "--reward", "jpeg_compressibility"]
    assert cli.main(["init", *words, "--prompts", str(prompts), "--out", str(file)]) == 0
    assert "flowrl plan" in capsys.readouterr().out
    lines = file.read_text().splitlines()
    assert 15 <= len(lines) <= 32
    assert max(map(len, lines)) <= 120
    config = load_config(file)
    assert [reward.name for reward in config.rewards] == ["jpeg_compressibility"]
    assert (config.prompts.train, config.prompts.eval, config.eval_every) == (str(prompts), None, 0)
    assert cli.main(["plan", str(file)]) == 0
    assert cli.main(["init", *words, "--out", str(file)]) == 1  # it is not written over
    assert "exists already" in capsys.readouterr().err


@pytest.mark.slow
def test_batches_are_sized_by_the_plan_until_it_has_nothing_to_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sd3.yaml"
    words = ["--model", "stabilityai/stable-diffusion-3.5-medium", "--card", "24", "--reward", "pick_score"]
    assert cli.main(["init", *words, "--out", str(file)]) == 0
    assert "everyday" in capsys.readouterr().out
    assert load_config(file).micro_batch_size == load_config(file).rollout_batch_size
    assert cli.main(["plan", str(file), "--card", "24"]) == 0
    assert "fits 24 GB as it is" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("wish", "base"),
    [
        (Wish(model="black-forest-labs/FLUX.1-dev", card=24), "flux_grpo_pickscore"),
        (Wish(model="Qwen/Qwen-Image", card=141), "qwen_image_grpo_pickscore"),
        (Wish(model="stabilityai/stable-diffusion-3.5-medium", card=48, reward="geneval"), "sd35m_grpo_geneval"),
    ],
)
def test_the_nearest_configuration_is_built_on(wish: Wish, base: str) -> None:
    assert base_for(wish) == base


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "asset:tiny-sd3"], "--card are needed"),
        (["--model", "asset:tiny-sd3", "--card", "24", "--reward", "pickscore"], "pick_score"),
        (["--model", "nobody/knows-this", "--card", "24"], "nobody/knows-this"),
        (["--model", "black-forest-labs/FLUX.1-dev", "--card", "2"], "does not fit 2 GB"),
    ],
)
def test_what_cannot_be_is_said_and_nothing_is_written(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my.yaml"
    assert cli.main(["init", *words, "--out", str(file)]) == 1
    assert said in capsys.readouterr().err
    assert not file.exists()


def test_on_a_terminal_a_wrong_answer_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    wrong_then_right = [
        "stabilityai/stable-diffusion-3.5-mediun", "nowhere", "asset:tiny-sd3", "much", "24",
        "jpeg_compresibility", "mine.py:f", "jpeg_compressibility", "no/such.txt", "",
    ]  # fmt: skip
    os.write(master, "".join(f"{answer}\n" for answer in wrong_then_right).encode())
    said = io.StringIO()
    with os.fdopen(slave, encoding="utf-8") as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        monkeypatch.setattr("sys.stderr", said)
        assert cli.main(["init", "--out", str(tmp_path / "my.yaml")]) == 0
    os.close(master)
    for hint in ("did you mean stabilityai/stable-diffusion-3.5-medium?", "there is no 'nowhere'", "24 say, got much",
                 "did you mean jpeg_compressibility?", "FILE.py:FUNCTION", "there is no 'no/such.txt'"):  # fmt: skip
        assert hint in said.getvalue()
    config = load_config(tmp_path / "my.yaml")
    assert (config.pipeline.model, config.rewards[0].name) == ("asset:tiny-sd3", "jpeg_compressibility")
