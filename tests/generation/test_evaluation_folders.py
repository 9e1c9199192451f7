"""GenEval's folder layout is read as the original scripts write it; what is incomplete or foreign is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from evaluation_folders import RECORDS, right, write_folder

from flowrl.generation.folders import DRAWN, is_folder_of_images, read_folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["{:05d}.png", "{:04d}.png", "{}.png"])
def test_images_come_in_order_whatever_the_digits(tmp_path: Path, name: str) -> None:
    images = read_folder(write_folder(tmp_path / "a", samples=11, name=name))
    assert [(p.index, p.sample) for p in images] == [(i, s) for i in range(len(RECORDS)) for s in range(11)]
    assert [p.record for p in images[::11]] == RECORDS
    assert [p.prompt for p in images[::11]] == [record["prompt"] for record in RECORDS]
    assert images[13].file == f"00001/samples/{name.format(2)}"
    assert np.array_equal(images[2].pixels(), right(RECORDS[0], 2))


def test_grids_and_other_files_are_left_alone(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a")
    (folder / "00000" / "grid.png").write_bytes(b"grid")
    (folder / "00000" / "samples" / ".00002.png.x.tmp").write_bytes(b"cut")
    (folder / "00000" / "samples" / "notes.txt").write_text("x")
    (folder / "results.jsonl").write_text("x")
    (folder / "old").mkdir()
    assert len(read_folder(folder)) == 2 * len(RECORDS)
    assert is_folder_of_images(folder)
    assert not is_folder_of_images(folder / "old")
    assert not is_folder_of_images(folder / "results.jsonl")


def test_numbers_need_not_start_at_zero(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", name="1{:03d}.png")
    (folder / "00000").rename(folder / "00900")
    images = read_folder(folder)
    assert [p.sample for p in images] == [0, 1] * len(RECORDS)
    assert [p.index for p in images[::2]] == [1, 2, 3, 4, 5, 900]


def test_a_stamp_changes_with_the_image(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a")
    before = [p.stamp for p in read_folder(folder)]
    (folder / "00001" / "samples" / "00000.png").write_bytes(b"another")
    after = [p.stamp for p in read_folder(folder)]
    assert [a == b for a, b in zip(before, after, strict=True)] == [i != 2 for i in range(len(before))]
    assert len(set(before)) == len(before)


def test_missing_images_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a")
    (folder / "00003" / "samples" / "00001.png").unlink()
    with pytest.raises(ValueError, match=r"half-written: 6 prompts with 2 images.*prompt 00003 has 1 images"):
        read_folder(folder)
    for path in (folder / "00003" / "samples").iterdir():
        path.unlink()
    (folder / "00003" / "samples").rmdir()
    with pytest.raises(ValueError, match="prompt 00003 has 0 images"):
        read_folder(folder)


def test_an_own_folder_that_lacks_prompts_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a")
    (folder / DRAWN).write_text(json.dumps({"num_prompts": 7, "samples": 2}))
    with pytest.raises(ValueError, match=r"half-written: 7 prompts .* 6 are there.*Finish it with the command"):
        read_folder(folder)
    (folder / DRAWN).write_text(json.dumps({"num_prompts": 6, "samples": 3}))
    with pytest.raises(ValueError, match="prompt 00000 has 2 images"):
        read_folder(folder)
    (folder / DRAWN).write_text('{"num_')
    with pytest.raises(ValueError, match="not valid JSON"):
        read_folder(folder)


def test_foreign_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        read_folder(tmp_path / "none")
    with pytest.raises(ValueError, match="GenEval's layout is"):
        read_folder(tmp_path)
    folder = write_folder(tmp_path / "a")
    (folder / "00002" / "metadata.jsonl").write_text('{"prompt": "a photo')
    with pytest.raises(ValueError, match=r"00002/metadata.jsonl, line 1: not valid JSON .* half-written or another"):
        read_folder(folder)
    (folder / "00002" / "metadata.jsonl").unlink()
    with pytest.raises(ValueError, match="half-written or another kind"):
        read_folder(folder)


def test_one_number_twice_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a")
    (folder / "00001" / "samples" / "0001.png").write_bytes(b"again")
    with pytest.raises(ValueError, match="two images of one number"):
        read_folder(folder)
    folder = write_folder(tmp_path / "b")
    write_folder(tmp_path / "c", RECORDS[:1])
    (tmp_path / "c" / "00000").rename(folder / "0000")
    with pytest.raises(ValueError, match="two sub-folders of one number"):
        read_folder(folder)


def test_an_image_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a")
    path = folder / "00001" / "samples" / "00000.png"
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(ValueError, match="cannot be read as an image"):
        read_folder(folder)[2].pixels()
