"""`flowrl init`: what it writes is accepted by `flowrl plan`, whatever was asked for; nothing is written otherwise."""

from __future__ import annotations

import io
import json
import os
import pty
from pathlib import Path

import pytest
from counted_operations import measured_once

from flowrl import cli
from flowrl.config.base import find_config
from flowrl.config.train import load_config
from flowrl.migrating.init import hold_out
from flowrl.planning.bases import Wish, base_for
from flowrl.prompts.loading import read_prompts


@pytest.fixture(autouse=True)
def _measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured_once(monkeypatch)


@pytest.mark.slow
def test_the_file_is_short_commented_and_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, prompts = tmp_path / "my.yaml", tmp_path / "prompts.txt"
    prompts.write_text("".join(f"a red cube number {k}\n" for k in range(60)))
    words = ["--model", "asset:tiny-sd3", "--card", "24", "--reward", "clip_score", "--hours", "2"]
    assert cli.main(["init", *words, "--prompts", str(prompts), "--out", str(file), "optim.lr=1e-4"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "flowrl plan" in said
    assert "fits 24 GB as it is" in said
    lines = file.read_text().splitlines()
    assert 25 <= len(lines) <= 45
    assert max(map(len, lines)) <= 120
    assert not {"`", "\u2026"} & set(file.read_text())
    config = load_config(file)
    assert {reward.name: reward.weight for reward in config.rewards} == {"clip_score": 1, "jpeg_compressibility": 0}
    assert (config.recipe, config.objective.name, config.optim.lr) == ("forward", "nft", 1e-4)
    assert (config.eval_every, config.eval.initial) == (config.num_iterations, True)
    assert config.budget.seconds == 7200
    held_out = Path(config.prompts.eval or "").read_text().splitlines()
    trained = Path(config.prompts.train).read_text().splitlines()
    assert len(held_out) == 6
    assert sorted(held_out + trained) == sorted(prompts.read_text().splitlines())
    assert cli.main(["plan", str(file)]) == 0
    assert cli.main(["init", *words, "--out", str(file)]) == 1  # it is not written over
    assert "exists already" in capsys.readouterr().err


def test_a_prompt_is_held_out_or_trained_on_and_never_both(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    rows = [{"prompt": f"cube {k % 45}", "tag": k} for k in range(90)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    train, held_out = hold_out(str(file)) or ("", "")
    sides = [{json.loads(line)["prompt"] for line in Path(side).read_text().splitlines()} for side in (train, held_out)]
    assert not sides[0] & sides[1]
    assert (len(sides[0]), len(sides[1])) == (41, 4)
    assert hold_out(str(file)) == (train, held_out)  # the same again
    Path(held_out).write_text("{}\n")
    with pytest.raises(ValueError, match="exists already with other prompts"):
        hold_out(str(file))
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows[:30]))
    assert hold_out(str(file)) is None  # three would tell nothing
    assert hold_out("asset:prompts/everyday.txt") == ("asset:prompts/everyday.txt", "asset:prompts/everyday_eval.txt")


def test_a_table_is_split_by_rows_and_keeps_its_header(tmp_path: Path) -> None:
    file = tmp_path / "p.csv"
    rows = [f'{k};"cube {k}, or\na ball";"tag ""{k}"""' for k in range(50)]
    file.write_text("\n".join(["sep=;", "id; prompt;note", *rows, ";;", ""]))
    train, held_out = hold_out(str(file)) or ("", "")
    assert (Path(train).name, Path(held_out).name) == ("p_train.csv", "p_heldout.csv")
    for side in (train, held_out):
        assert Path(side).read_text().startswith("sep=;\nid; prompt;note\n")
    sides = [read_prompts(side) for side in (train, held_out)]
    assert [len(side) for side in sides] == [45, 5]
    kept = {"id": "9", "prompt": "cube 9, or\na ball", "note": 'tag "9"'}
    assert sides[1][0].metadata == kept
    whole = {prompt.text for prompt in read_prompts(str(file))}
    assert {prompt.text for side in sides for prompt in side} == whole
    assert not {p.text for p in sides[0]} & {p.text for p in sides[1]}


@pytest.mark.slow
def test_the_recommended_recipe_fits_the_card_and_ends_in_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sd3.yaml"
    words = ["--model", "stabilityai/stable-diffusion-3.5-medium", "--card", "24", "--hours", "10"]
    assert cli.main(["init", *words, "--out", str(file)]) == 0
    said = capsys.readouterr().out
    assert "everyday" in said
    assert "unproven at this size" in said
    config, evening = load_config(file), load_config(find_config("sd35m_evening"))
    length = ("num_iterations", "prompts_per_step", "group_size", "updates_per_rollout", "eval_every", "budget")
    for key in ("recipe", *length, "optim", "times", "objective", "sampler", "prompts", "rewards"):
        assert getattr(config, key) == getattr(evening, key), key
    assert cli.main(["plan", str(file), "--card", "24"]) == 0
    assert "fits 24 GB as it is" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("wish", "base"),
    [
        (Wish(model="black-forest-labs/FLUX.1-dev", card=24), "flux_grpo_pickscore"),
        (Wish(model="Qwen/Qwen-Image", card=141), "qwen_image_grpo_pickscore"),
        (Wish(model="stabilityai/stable-diffusion-3.5-medium", card=48, reward="geneval"), "sd35m_grpo_geneval"),
        (Wish(model="black-forest-labs/FLUX.1-dev", card=24, recommended=True), "flux_recommended"),
        (Wish(model="Qwen/Qwen-Image-Edit", card=24, recommended=True), "qwen_image_edit_grpo"),
        (Wish(model="asset:tiny-wan", card=24, recommended=True), "tiny_wan_recommended"),
        (Wish(model="Wan-AI/Wan2.2-TI2V-5B-Diffusers", card=24, recommended=True), "wan_recommended"),
    ],
)
def test_the_nearest_configuration_is_built_on(wish: Wish, base: str) -> None:
    assert base_for(wish) == base


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "asset:tiny-sd3"], "--card are needed"),
        (["--model", "asset:tiny-sd3", "--card", "24", "--hours", "-3"], "--hours must be above 0"),
        (["--model", "asset:tiny-sd3", "--card", "24", "--reward", "pickscore"], "pick_score"),
        (["--model", "nobody/knows-this", "--card", "24"], "nobody/knows-this"),
        (["--model", "black-forest-labs/FLUX.1-schnel", "--card", "24"], "mean black-forest-labs/FLUX.1-schnell"),
        (["--model", "asset:tiny-sd3", "--card", "24", "--prompts", "absent.txt"], "there is no 'absent.txt'"),
        (["--model", "sd3.5m", "--card", "24"], "did you mean stabilityai/stable-diffusion-3.5-medium?"),
        (["--model", "Efficient-Large-Model/Sana_1600M_1024px_diffusers", "--card", "2"], "does not fit 2 GB"),
    ],
)
def test_what_cannot_be_is_said_and_nothing_is_written(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my.yaml"
    assert cli.main(["init", *words, "--out", str(file)]) == 1
    assert said in capsys.readouterr().err
    assert not file.exists()


def test_a_place_that_cannot_be_written_is_refused_before_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "file").touch()
    assert cli.main(["init", "--model", "nobody/knows-this", "--card", "24", "--out", str(file / "x")]) == 1
    assert "is not one: give another --out" in capsys.readouterr().err


def test_on_a_terminal_a_wrong_answer_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    prompts = tmp_path / "mine.txt"
    prompts.write_text("".join(f"a blue ball number {k}\n" for k in range(50)))
    (tmp_path / "there.yaml").touch()
    wrong_then_right = [
        "stabilityai/stable-diffusion-3.5-mediun", "nowhere", str(tmp_path), "asset:tiny-sd3", "much", "24",
        "no/such.txt", str(prompts), "", "jpeg_compresibility", "mine.py:f", "jpeg_compressibility", "soon", "3",
        str(tmp_path / "there.yaml"), str(tmp_path / "my.yaml"),
    ]  # fmt: skip
    os.write(master, "".join(f"{answer}\n" for answer in wrong_then_right).encode())
    said = io.StringIO()
    with os.fdopen(slave, encoding="utf-8") as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        monkeypatch.setattr("sys.stderr", said)
        assert cli.main(["init"]) == 0
    os.close(master)
    for hint in ("did you mean stabilityai/stable-diffusion-3.5-medium", "ships for nowhere", "model_index.json",
                 "24, or as 4090 or", "mean 'jpeg_compressibility'?", "FILE.py:FUNCTION", "exists already",
                 "there is no 'no/such.txt'", "got soon"):  # fmt: skip
        assert hint in said.getvalue(), hint
    config = load_config(tmp_path / "my.yaml")
    assert (config.pipeline.model, config.rewards[0].name) == ("asset:tiny-sd3", "jpeg_compressibility")
    assert config.prompts.eval == str(tmp_path / "mine_heldout.txt")
    assert config.budget.seconds == 3 * 3600
