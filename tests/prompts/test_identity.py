"""What tells rows apart: all that they say, and the content of their files, whatever these are called."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from flowrl.generation.sample import wanted_prompts
from flowrl.prompts.identity import asked_for, distinct, drawn_by, identity, keys_of
from flowrl.prompts.loading import Prompt, eval_items, read_prompts
from flowrl.prompts.overlap import overlap_of_rows
from flowrl.runtime.digests import content_digest
from flowrl.training.prompting import reward_inputs

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def png(path: Path, colour: tuple[int, int, int]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), colour).save(path)
    return str(path)


def rows_of(folder: Path, *rows: dict[str, Any]) -> list[Prompt]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_prompts(file)


def replaced(path: Path, content: bytes) -> None:
    """Other content under the old time of change, as cp -p, rsync -t and archives leave it."""
    before = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    "other",
    [
        {"text": "b"}, {"negative": "blur"}, {"metadata": {"text": "HELLO"}}, {"sources": ("blue.png",)},
        {"references": ("blue.png",)}, {"videos": {"source_video": "blue.png"}},
        {"videos": {"source_video": "red.png", "mask_video": "blue.png"}},
    ],
    ids=str,
)  # fmt: skip
def test_everything_that_a_row_says_is_part_of_it(
    tmp_path: Path, other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, colour in (("red", RED), ("blue", BLUE)):
        png(tmp_path / f"{name}.png", colour)
    row = Prompt(
        text="a",
        metadata={},
        sources=("red.png",),
        references=("red.png",),
        videos={"source_video": "red.png", "mask_video": "red.png"},
    )
    changed = replace(row, **other)
    again = replace(changed)
    assert identity(changed) != identity(row)
    assert identity(again) == identity(changed)
    assert keys_of([row, changed, again])[0] not in keys_of([row, changed, again])[1:]
    assert len(distinct([row, changed, again])) == 2
    drawn_alike = {"metadata", "references"} & other.keys()
    assert (drawn_by(changed) == drawn_by(row)) is bool(drawn_alike)


def test_a_name_is_no_content_and_a_time_of_change_neither(tmp_path: Path) -> None:
    red = Path(png(tmp_path / "red.png", RED))
    row = Prompt(text="make it blue", metadata={}, sources=(str(red),))
    before, digest = asked_for(row), content_digest(red)
    shutil.copy(red, tmp_path / "other.png")
    assert asked_for(replace(row, sources=(str(tmp_path / "other.png"),))) == before
    content = bytearray(red.read_bytes())
    content[-20] ^= 1
    replaced(red, bytes(content))
    assert content_digest(red) != digest
    assert asked_for(row) != before


def test_plain_texts_are_their_own_keys() -> None:
    rows = [Prompt(text=text, metadata={}) for text in ("a", "b", "a")]
    assert keys_of(rows) == ["a", "b", "a"]


def test_rows_of_one_text_with_references_of_their_own_are_scored_with_these(tmp_path: Path) -> None:
    for name, colour in (("red", RED), ("green", GREEN), ("blue", BLUE)):
        png(tmp_path / f"{name}.png", colour)
    text = "a photo of sks toy"
    rows = rows_of(
        tmp_path, *({"prompt": text, "reference": f"{name}.png"} for name in ("red", "green", "blue", "red"))
    )
    pipeline: Any = SimpleNamespace(fps=None, sound_rate=None)
    found = reward_inputs(pipeline, rows, torch.zeros(4, 3, 2, 2), group=torch.arange(4), numbers=range(4), iteration=0)
    assert found.reference_images is not None
    colours = [image[:, 0, 0].tolist() for (image,) in found.reference_images]
    assert colours == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]]
    assert [record["reference"] for record in found.metadata] == ["red.png", "green.png", "blue.png", "red.png"]
    assert found.source_images is None
    items = eval_items(rows)
    assert [(item.prompt_id, item.sample) for item in items] == [(0, 0), (1, 0), (2, 0), (0, 1)]
    assert [item.noise for item in items] == [0, 1, 2, 3]  # as before there were numbers for rows: each image its own


def test_rows_with_negative_prompts_of_their_own_are_all_drawn(tmp_path: Path) -> None:
    rows = [{"prompt": "a red circle", "negative_prompt": name} for name in ("blue", "ugly", "blue")]
    rows_of(tmp_path, *rows)
    assert [row.negative for row in wanted_prompts([], [], tmp_path / "rows.jsonl", "")] == ["blue", "ugly"]


def test_an_image_is_trained_on_whatever_it_is_called(tmp_path: Path) -> None:
    """Both splits of a set of edits count their files from 0."""
    for split, colours in (("train", (RED, GREEN)), ("test", (BLUE, GREEN))):
        for number, colour in enumerate(colours):
            png(tmp_path / split / f"{number:04d}.png", colour)
    text = "make it darker"
    train, test = (
        rows_of(tmp_path / split, *({"prompt": text, "source": f"{number:04d}.png"} for number in range(2)))
        for split in ("train", "test")
    )
    assert not overlap_of_rows(train[:1], test)  # of one name
    shutil.copy(tmp_path / "train" / "0000.png", tmp_path / "test" / "renamed.png")
    renamed = rows_of(tmp_path / "test", {"prompt": "Make it  darker.", "source": "renamed.png"})
    assert len(overlap_of_rows(train, renamed).exact) == 1
