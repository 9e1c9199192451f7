"""The last words of a run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from flowrl.config.base import find_config
from flowrl.config.train import load_config
from flowrl.runtime.files import read_json
from flowrl.session.summary import _try, summarise
from flowrl.session.train import _way_on


def evaluation(folder: Path, iteration: int, values: list[float | None]) -> None:
    (folder / "eval").mkdir(exist_ok=True)
    rows = [
        {"prompt_id": n // 2, "prompt": f"p{n // 2}", "task": "", "sample": n % 2, "correct": None, "graded": None,
         "rewards": {"brightness": value}}
        for n, value in enumerate(values)
    ]  # fmt: skip
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "eval" / f"iteration_{iteration:06d}.jsonl").write_text(text, encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    row = {"iteration": 0, "eval/reward/brightness": 0.5, "eval/reward/brightness_low": 0.4}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    evaluation(tmp_path, 0, [0.0, 1.0, 0.5, None, 0.25, 0.75])
    evaluation(tmp_path, 4, [0.5, 1.5, 1.0, 3.0, 1.0, None])
    return tmp_path


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return found


def words_of(folder: Path, *, finished: bool) -> str:
    config = load_config(find_config("tiny_grpo_geneval"))
    return summarise(folder, config, folder / "report.html", finished=finished)


def test_held_out_rewards_are_compared_by_the_samples_that_were_scored_both_times(folder: Path) -> None:
    shown = summarise(folder, load_config(find_config("tiny_grpo_geneval")), folder / "report.html", finished=True)
    assert "Held-out rewards, 6 samples" in shown
    row = next(line for line in shown.splitlines() if "brightness" in line)
    assert row.split() == ["brightness", "0.4375", "1", "+0.562", "(+0.0967", "to", "+1.03)"]
    found = summary(folder)["rewards"]["brightness"]
    assert (found["before"], found["after"], found["change"]["mean"]) == (0.4375, 1.0, 0.5625)
    assert found["change"]["low"] == pytest.approx(0.0967, abs=5e-5)


def test_a_reward_that_changed_alike_everywhere_has_no_interval_and_the_reason_is_told(folder: Path) -> None:
    evaluation(folder, 4, [0.5, 1.5, 1.0, 3.0, 0.75, None])
    shown = summarise(folder, load_config(find_config("tiny_grpo_geneval")), folder / "report.html", finished=True)
    assert "No interval for brightness: all values of a task agree, which leaves their spread unknown" in " ".join(
        shown.split()
    )
    assert summary(folder)["rewards"]["brightness"]["change"] == {"mean": 0.5, "low": None, "high": None}
    assert max(len(line) for line in shown.splitlines() if str(folder) not in line) <= 80


def test_rewards_of_one_name_are_told_apart_within_80_columns(folder: Path) -> None:
    """The configuration has `geneval` twice, with two kinds of credit."""
    for file in (folder / "eval").glob("*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        both = [row | {"rewards": {"geneval": 1.0, "geneval_2": row["rewards"]["brightness"]}} for row in rows]
        file.write_text("".join(json.dumps(row) + "\n" for row in both))
    low = {f"eval/reward/{name}_low": 0.4 for name in ("geneval", "geneval_2")}
    (folder / "metrics.jsonl").write_text(json.dumps({"iteration": 0} | low) + "\n")
    lines = words_of(folder, finished=True).splitlines()
    assert [line[2:32].rstrip() for line in lines if "(credit: " in line] == [
        "geneval (credit: graded)",
        "geneval_2 (credit: official)",
    ]
    assert max(len(line) for line in lines if str(folder) not in line) <= 80


def test_a_reward_of_ones_own_is_told_beside_the_geneval_score(folder: Path) -> None:
    for file in (folder / "eval").glob("*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for number, row in enumerate(rows):
            row |= {"task": "colors", "correct": number > 1}
            row["rewards"] |= {"geneval": 1.0, "geneval/official": 1.0}
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = ("brightness", "brightness_low", "geneval", "geneval_low", "geneval/official")
    row = {"iteration": 0, "eval/geneval/score_low": 0.4} | {f"eval/reward/{name}": 0.5 for name in names}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    shown = summarise(folder, load_config(find_config("tiny_grpo_geneval")), folder / "report.html", finished=True)
    lines = [line.split() for line in shown.splitlines()]
    assert ["brightness", "0.4375", "1", "+0.562", "(+0.0967", "to", "+1.03)"] in lines
    assert any(line[:1] == ["score"] for line in lines)
    assert not any("geneval" in word for line in lines for word in line[:1]), "the table of tasks says it"
    assert {"before", "after", "change", "rewards"} <= summary(folder).keys()


def test_the_command_to_try_takes_an_evaluated_prompt_and_its_images(folder: Path) -> None:
    (folder / "samples").mkdir()
    listed = [{"prompt": "make the cat's ball blue", "sample": 0, "seed": 1, "sources": ["an image.png"]}]
    (folder / "samples" / "prompts.json").write_text(json.dumps(listed), encoding="utf-8")
    shown = summarise(folder, load_config(find_config("tiny_grpo_geneval")), folder / "report.html", finished=True)
    words = shlex.split(shown.split("Try       ")[1].replace("\\\n", " "))
    assert words[:2] == ["flowrl", "sample"]
    assert words[3:7] == ["--prompt", "make the cat's ball blue", "--source", "an image.png"]


def test_a_reward_without_any_score_says_so(folder: Path) -> None:
    evaluation(folder, 4, [None] * 6)
    shown = summarise(folder, load_config(find_config("tiny_grpo_geneval")), folder / "report.html", finished=False)
    row = next(line for line in shown.splitlines() if "brightness" in line)
    assert row.split() == ["brightness", "-", "-", "-", "(-)"]
    assert "No interval for brightness: there are no image rows of both evaluations to pair" in " ".join(shown.split())
    assert "nan" not in shown


def test_one_iteration_has_one_reward_and_failures_are_told(folder: Path) -> None:
    row = {"iteration": 0, "reward": 0.5, "invalid_ratio": 0.125, "reward_errors/score/not_finite": 1}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    assert "\nMean training reward 0.500\nWarning   rewards failed" in words_of(folder, finished=True)
    assert words_of(folder, finished=True).count("score/not_finite 1\n") == 1
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"iteration": 1, "reward": 0.75}) + "\n")
    assert "\nMean training reward 0.500 -> 0.750\n" in words_of(folder, finished=True)


def test_evaluations_of_one_image_have_dashes_and_a_readable_file(folder: Path) -> None:
    evaluation(folder, 0, [0.25])
    evaluation(folder, 4, [0.75])
    shown = summarise(folder, load_config(find_config("tiny_grpo_geneval")), folder / "report.html", finished=True)
    row = next(line for line in shown.splitlines() if "brightness" in line)
    assert row.split() == ["brightness", "0.25", "0.75", "+0.5", "(-)"]
    assert "No interval for brightness: there is a single image" in shown
    assert "nan" not in shown
    found = read_json(folder / "summary.json")["rewards"]["brightness"]
    assert found == {"before": 0.25, "after": 0.75, "change": {"mean": 0.5, "low": None, "high": None}}


@pytest.mark.parametrize(("prompts", "told"), [
    (1, "Not testable: +1.000, there is a single image"),
    (8, "Better: +1.000, 95 % interval +0."),
])  # fmt: skip
def test_an_unknown_interval_is_told_with_its_reason(tmp_path: Path, prompts: int, told: str) -> None:
    (tmp_path / "metrics.jsonl").write_text("", encoding="utf-8")
    (tmp_path / "eval").mkdir()
    for iteration, correct in ((0, False), (4, True)):
        rows = [
            {"prompt_id": k, "prompt": f"p{k}", "task": "colors", "sample": 0, "correct": correct, "graded": 0.0,
             "rewards": {"geneval": 0.0}}
            for k in range(prompts)
        ]  # fmt: skip
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "eval" / f"iteration_{iteration:06d}.jsonl").write_text(text, encoding="utf-8")
    config = load_config(find_config("tiny_grpo_geneval"))
    shown = summarise(tmp_path, config, tmp_path / "report.html", finished=False)
    assert told in shown
    assert "nan" not in shown
    assert ("covers prompts of this kind, not another training" in shown) == (prompts > 1)


def test_what_weights_and_biases_kept_is_sent_by_a_line_to_copy(folder: Path) -> None:
    path = find_config("tiny_grpo_geneval")
    (folder / "wandb" / "offline-run-20260101_120000-abc").mkdir(parents=True)
    for mode in ("offline", "none"):
        shown = summarise(folder, load_config(path, [f"logging.wandb={mode}"]), folder / "report.html", finished=True)
        said = f"W&B       wandb sync {folder}/wandb/offline-run-*"
        assert (said in shown.splitlines()) == (mode == "offline")


def test_a_printed_command_can_be_pasted(tmp_path: Path) -> None:
    run = tmp_path / "a b; c"
    run.mkdir()
    words = shlex.split(
        _try(run, load_config(find_config("tiny_recommended"))).replace("Try ", "").replace("\\\n", " ")
    )
    assert words[:3] == ["flowrl", "sample", str(run)]
    assert _way_on(run).count(shlex.quote(str(run))) == 1
