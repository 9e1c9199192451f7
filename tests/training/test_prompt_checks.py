"""What prompts lack for a model or a reward is refused before anything loads, by the whole file, with file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flowrl.config.train import TrainConfig, find_config, load_config
from flowrl.planning.refusals import obstacles
from flowrl.prompts.prompt_files import read_file
from flowrl.rewards import REWARDS, load_target
from flowrl.rewards.base.prompt_needs import NeedsOfPrompt, NeedsToLearn, lack_of
from flowrl.rewards.base.text_limits import TextLimit, cut_line
from flowrl.session.preflight import look, preflight
from flowrl.training.parts import model_family

JUDGE = {"server": "http://127.0.0.1:9/v1", "model": "nobody"}
RECORD = {"tag": "single_object", "include": [{"class": "circle", "count": 1}]}


def written(folder: Path, *rows: dict[str, Any] | str, name: str = "rows.jsonl") -> Path:
    """A file of prompts, and an image `a.png` beside it."""
    Image.new("RGB", (64, 64), (255, 0, 0)).save(folder / "a.png")
    path = folder / name
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def config(name: str, path: Path, *overrides: str) -> TrainConfig:
    settings = [f"prompts.train={path}", "prompts.eval=null", "eval_every=0", *overrides]
    return load_config(find_config(name), settings)


def refused(name: str, path: Path, *overrides: str) -> str:
    """What train, plan and doctor say alike."""
    made = config(name, path, *overrides)
    with pytest.raises(ValueError, match="prompt ") as caught:
        preflight(made)
    found = obstacles(made, model_family(made.pipeline), 1)
    assert str(caught.value) in found.refused
    assert str(caught.value) in found.of_prompts
    return str(caught.value)


def edit(**more: Any) -> dict[str, Any]:
    return {"prompt": "make it blue", "scene": [], "target": [], "tag": "color", **more}


def test_a_row_without_a_source_is_found_wherever_it_stands(tmp_path: Path) -> None:
    rows = [edit(source="a.png") for _ in range(8)]
    said = refused("tiny_kontext_grpo", written(tmp_path, *rows, edit(picture="a.png"), *rows), "rewards=[{name: "
                   "jpeg_compressibility}]")  # fmt: skip
    for part in ("rows.jsonl, line 9: prompt 'make it blue'", "only such among 17", "has 0 source images, and kontext "
                 "takes 1", "its row has 'picture'", "rename the key to 'source'"):  # fmt: skip
        assert part in said
    preflight(config("tiny_kontext_grpo", written(tmp_path, *rows), "rewards=[{name: edit_verdict}]"))


def test_a_source_that_the_family_does_not_take(tmp_path: Path) -> None:
    record = {"prompt": "a red circle moving left", "shape": "circle", "color": "red", "direction": "left"}
    said = refused("tiny_wan_grpo", written(tmp_path, record, {**record, "source": "a.png"}))
    assert "line 2: prompt 'a red circle moving left'" in said
    assert "has 1 source images (under 'source'), and wan takes no source image: take 'source' out of the row" in said


def test_images_under_keys_that_are_not_read_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "a", **RECORD}, {"prompt": "b", "input_image": "a.png", "reference": "a.png", **RECORD}]
    preflight(config("tiny_flow_grpo", written(tmp_path, *rows)))
    said = capsys.readouterr().err
    assert "rows.jsonl, line 2: 'input_image' names a.png, and is metadata alone" in said
    assert "reference" not in said


def test_evaluation_files_are_looked_at_too(tmp_path: Path) -> None:
    good, bad = written(tmp_path, edit(source="a.png"), name="good.jsonl"), written(tmp_path, edit(), name="bad.jsonl")
    settings = [f"prompts.train={good}", f"prompts.eval={bad}", "rewards=[{name: jpeg_compressibility}]"]
    (said,) = look(load_config(find_config("tiny_kontext_grpo"), settings)).faults
    assert "bad.jsonl, line 1" in said


LACKING: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "typographic quotes": ({"name": "ocr"}, {"prompt": "a sign that says “Hello World”"}, "has “Hello World” in"),
    "single quotes": ({"name": "ocr"}, {"prompt": "a sign that says 'Hello'"}, "has 'Hello' in quotes of another kind"),
    "no quotes": ({"name": "ocr"}, {"prompt": "the dog's bone"}, "and has none: write"),
    "target field": ({"name": "ocr", "options": {"target_field": "text"}}, {"prompt": "a"}, "needs 'text' in its"),
    "geneval": ({"name": "geneval"}, {"prompt": "a"}, "needs a GenEval record"),
    "attributes": ({"name": "attributes"}, {"prompt": "a", "tag": "single_object",
                   "include": [{"class": "dog", "count": 1}]}, "asks for 'dog'"),
    "motion": ({"name": "motion_verdict"}, {"prompt": "a"}, "needs 'color' and 'direction' and 'shape'"),
    "grid": ({"name": "grid_verdict"}, {"prompt": "a"}, "needs the record of a grid"),
    "references": ({"name": "similarity"}, {"prompt": "a"}, "needs a reference image"),
    "edit": ({"name": "edit_verdict"}, edit(), "needs a source image"),
    "noisy": ({"name": "noisy", "options": {"reward": "ocr"}}, {"prompt": "a"}, "straight double quotes"),
    "rank": ({"name": "rank", "options": {"reward": "geneval"}}, {"prompt": "a"}, "needs a GenEval record"),
    "win_rate": ({"name": "win_rate", "options": {"comparator": {"judge": JUDGE, "media": "edit"}}}, {"prompt": "a"},
                 "needs a source image"),
    "comparator": ({"name": "win_rate", "options": {"comparator": {"reward": "ocr"}}}, {"prompt": "a"}, "straight"),
    "questions": ({"name": "yes_no", "options": {"judge": JUDGE, "questions_field": "asked"}}, {"prompt": "a"},
                  "needs questions in the field 'asked'"),
    "requirement": ({"name": "edit_score", "options": {"judge": JUDGE}}, edit(source="a.png"), "field 'requirement'"),
    "principles": ({"name": "edit_principles", "options": {"judge": JUDGE}}, edit(source="a.png", principles=[1]),
                   "needs other principles"),
    "unified": ({"name": "unified_reward", "options": {"judge": JUDGE, "style": "edit"}}, {"prompt": "a"}, "source"),
    "subfigures": ({"name": "subfigures", "options": {"reward": "jpeg_compressibility"}}, {"prompt": "a 2x2 grid"},
                   "needs a sub-prompt for each of its 2x2 cells, and has 0"),
    "no grid": ({"name": "subfigure_similarity"}, {"prompt": "a fox"}, "needs a grid of two cells or more"),
    "world": ({"name": "adversarial", "options": {"backbone": "attributes", "references": "world"}}, {"prompt": "a"},
              "needs 'include' in its record"),
}  # fmt: skip


@pytest.mark.parametrize("case", LACKING)
def test_what_a_reward_needs_of_a_prompt(case: str, tmp_path: Path) -> None:
    reward, row, part = LACKING[case]
    options = load_target(REWARDS[str(reward["name"])])
    (prompt,) = read_file(written(tmp_path, row))
    lack = lack_of(options(**reward.get("options", {})), prompt)
    assert lack is not None
    assert lack.startswith("needs ")
    assert part in lack


def test_every_reward_that_reads_more_than_a_text_says_what_it_needs() -> None:
    told = {name for name, place in REWARDS.items() if issubclass(load_target(place), NeedsOfPrompt | NeedsToLearn)}
    assert told == {
        "adversarial", "attributes", "dreamsim", "edit_principles", "edit_reward", "edit_score", "edit_verdict",
        "geneval", "grid_consistency", "grid_verdict", "motion_verdict", "noisy", "ocr", "pyiqa", "rank", "similarity",
        "subfigure_similarity", "subfigures", "tournament", "unified_reward", "win_rate", "yes_no",
    }  # fmt: skip


def test_prompts_that_a_reward_cannot_score_are_refused_with_their_number(tmp_path: Path) -> None:
    path = written(tmp_path, 'a sign "OK"', "a sign that says “Hello World”", "a sign", name="signs.txt")
    said = refused("tiny_flow_grpo", path, "rewards=[{name: ocr}]")
    assert "signs.txt, line 2: prompt 'a sign that says “Hello World”' (one of 2 such among 3 prompts)" in said
    assert "can get no value of reward ocr" in said
    both = "rewards=[{name: ocr}, {name: jpeg_compressibility}]"
    assert "reward ocr" in refused("tiny_flow_grpo", path, both)
    preflight(config("tiny_flow_grpo", path, both, "reward_partial=renormalise"))
    preflight(config("tiny_flow_grpo", path, "rewards=[{name: ocr, options: {on_empty_target: prompt}}]"))


def test_a_plan_looks_at_no_stand_in(tmp_path: Path) -> None:
    made = config("tiny_flow_grpo", tmp_path / "later.txt", "rewards=[{name: ocr}]")
    found = obstacles(made, model_family(made.pipeline), 1)
    assert found.refused == []
    assert "later.txt is not here" in found.absent[0]


class Limited:
    text_limit = TextLimit(tokens=7, tokenizer="nowhere")


def test_rewards_say_what_they_cut() -> None:
    prompts = ["one two three four five", "one, two, three", "one two three four five six", "it's a dog's day off now"]
    assert cut_line("short", Limited(), prompts) == (
        "short reads 7 tokens of a prompt: at least 2 of 4 prompts are longer"
    )
    assert cut_line("short", Limited(), prompts[:1]) == cut_line("other", object(), prompts) == ""
