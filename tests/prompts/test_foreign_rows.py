"""Edit files of other toolkits, row by row as they are published: prompt and source images are found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flowrl.prompts.prompt_files import Prompt, prompt_of, read_file, relative_to

CONDITION = {"modality": "image", "role": "condition"}
ROWS: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "Flow-Factory": ({"prompt": "edit", "image": "v2v_1.png", "clue": 70}, "edit", ["images/v2v_1.png"]),
    "Flow-Factory, several": ({"prompt": "edit", "images": ["v2v_1.png", "a.png"]}, "edit",
                              ["images/v2v_1.png", "a.png"]),
    "flow_grpo": ({"prompt": "edit", "image": "input/1.png"}, "edit", ["input/1.png"]),
    "flow_grpo, two references": (
        {"tag": "dual_ref", "prompt": "edit", "ctrl_image": "input/1.png", "ref_image": "referenced/1.png",
         "sup_image": "supervise/1.png"}, "edit", ["input/1.png", "referenced/1.png"]),
    "UniRL": ({"prompt": "edit", "media": [{**CONDITION, "uri": "input/1.png"}], "metadata": {}}, "edit",
              ["input/1.png"]),
    "DanceGRPO": ({"target_image": "images/2_1.jpg", "source_image": "images/v2v_1.png", "instruction": "edit",
                   "task_type": ["text-modify"]}, "edit", ["images/v2v_1.png"]),
    "ours before theirs": ({"prompt": "edit", "source": "a.png", "image": "input/1.png"}, "edit", ["a.png"]),
    "not an image": ({"prompt": "oil", "media": "oil on canvas", "image": "a dog"}, "oil", []),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("images/v2v_1.png", "a.png", "input/1.png", "referenced/1.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("toolkit", ROWS)
def test_rows_are_read_as_they_are(toolkit: str, folder: Path) -> None:
    row, text, sources = ROWS[toolkit]
    (folder / "train.jsonl").write_text(json.dumps(row))
    (found,) = read_file(folder / "train.jsonl")
    assert (found.text, found.metadata) == (text, row)
    assert found.sources == tuple(str(folder / name) for name in sources)
    assert found.where == f"{folder / 'train.jsonl'}, line 1"
    again = prompt_of(found.record, "record", find=relative_to(Path("/elsewhere")))
    assert (again.text, again.sources) == (found.text, found.sources)


def test_a_table_has_them_too(folder: Path) -> None:
    (folder / "t.csv").write_text("instruction,images\nedit,a.png;input/1.png\nmore,\n")
    edit, more = read_file(folder / "t.csv")
    assert edit.sources == (str(folder / "a.png"), str(folder / "input" / "1.png"))
    assert more == Prompt(text="more", metadata={"instruction": "more", "images": ""})


def test_two_that_contradict_each_other_are_refused(folder: Path) -> None:
    (folder / "t.jsonl").write_text(json.dumps({"prompt": "edit", "image": "a.png", "source_image": "input/1.png"}))
    with pytest.raises(ValueError, match=r"t\.jsonl, line 1: image and source_image name different images"):
        read_file(folder / "t.jsonl")
    (folder / "t.jsonl").write_text(
        json.dumps({"prompt": "edit", "image": "v2v_1.png", "images": ["images/v2v_1.png"]})
    )
    assert len(read_file(folder / "t.jsonl")[0].sources) == 1


@pytest.mark.parametrize(
    "value",
    ["data:image/png;base64,AAAA", "https://a.org/1?size=2", "a.heic", "a.png ", "A" * 400, {"bytes": "AAAA"},
     {"path": "a.png"}, ["a.png", None], ["a.png", "a.txt"], [{"modality": "image", "uri": "a.png"}]],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_an_image_that_is_no_path_is_not_left_out(folder: Path, value: Any) -> None:
    (folder / "t.jsonl").write_text(json.dumps({"prompt": "edit", "image": value}))
    with pytest.raises(ValueError, match=r"t\.jsonl, line 1: image holds .* save the image as one, and give its path"):
        read_file(folder / "t.jsonl")


def test_a_file_that_is_there_needs_no_ending(folder: Path) -> None:
    (folder / "a.png").rename(folder / "a")
    (folder / "t.jsonl").write_text(json.dumps({"prompt": "edit", "image": "a"}))
    assert read_file(folder / "t.jsonl")[0].sources == (str(folder / "a"),)


def test_an_image_that_is_not_there_is_refused_with_both_places(folder: Path) -> None:
    (folder / "t.jsonl").write_text(json.dumps({"prompt": "edit", "image": "gone.png"}))
    with pytest.raises(
        ValueError, match=r"image names 'gone.png', which is not there: .*folder, and in the folder images"
    ):
        read_file(folder / "t.jsonl")
