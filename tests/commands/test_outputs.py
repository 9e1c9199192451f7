"""Commands replace the files that they wrote themselves, and none of others."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flowrl.cli import main
from flowrl.runtime.files import refuse_foreign

MINE = "mine\n"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder of one image."""
    (tmp_path / "images").mkdir()
    Image.fromarray(np.full((16, 16, 3), 9, dtype=np.uint8)).save(tmp_path / "images" / "0.png")
    return tmp_path / "images"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder of one iteration."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("num_iterations: 1\n")
    (folder / "metrics.jsonl").write_text('{"iteration": 0, "reward": 1.0}\n')
    return folder


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(arguments) == 1
    shown = capsys.readouterr().err
    assert "will not be overwritten: give another --out, or move it away" in shown
    return shown


def test_an_empty_file_and_one_of_its_own_hand_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a"
    refuse_foreign(path, own=False)
    path.touch()
    refuse_foreign(path, own=False)
    path.write_text(MINE)
    refuse_foreign(path, own=True)
    for other in (path, tmp_path):
        with pytest.raises(ValueError, match="--here"):
            refuse_foreign(other, own=False, flag="--here")


def test_a_report_replaces_reports_alone(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    assert main(["report", str(run), "--out", str(out)]) == 0
    assert main(["report", str(run), "--out", str(out)]) == 0
    out.write_text(MINE)
    assert str(out) in refused(["report", str(run), "--out", str(out)], capsys)
    assert out.read_text() == MINE


@pytest.mark.parametrize("name", ["s.csv", "s.jsonl"])
def test_scores_replace_scores_alone(
    name: str, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / name
    command = ["reward", "score", "jpeg_compressibility", str(images), "--prompt", "a", "--out", str(out)]
    assert main(command) == 0
    assert main(command) == 0
    prompts = "file,prompt\n0.png,a\n" if name == "s.csv" else '{"file": "0.png", "prompt": "a"}\n'  # for --prompts
    out.write_text(prompts)
    refused(command, capsys)
    assert out.read_text() == prompts


@pytest.mark.slow
def test_an_image_of_too_many_pixels_is_a_failed_item(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("1", (30_000, 30_000)).save(images / "1.png")
    out = tmp_path / "s.jsonl"
    command = ["reward", "score", "jpeg_compressibility", str(images), "--prompt", "a", "--out", str(out)]
    assert main(command) == 0
    assert "failed: unreadable 1" in capsys.readouterr().out
    assert [json.loads(line)["error"] for line in out.read_text().splitlines()] == [
        None, {"jpeg_compressibility": "unreadable"},
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["result.json", "page.html"])
def test_an_evaluation_leaves_other_results(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "drawn" / "00000"
    (place / "samples").mkdir(parents=True)
    record = {"tag": "single_object", "include": [{"class": "circle", "count": 1}], "prompt": "a photo of a circle"}
    (place / "metadata.jsonl").write_text(json.dumps(record) + "\n")
    Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(place / "samples" / "0000.png")
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text(MINE)
    refused(["eval", "--images", str(tmp_path / "drawn"), "--out", str(out)], capsys)
    assert [path.name for path in out.iterdir()] == [name]
    assert (out / name).read_text() == MINE


def test_a_card_and_a_sheet_leave_files_of_others(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "card.json").write_text("{}")
    refused(["reward", "card", "jpeg_compressibility", str(images), "--prompt", "a", "--out", str(out)], capsys)
    (out / "grid.png").write_text(MINE)
    refused(["sample", "asset:tiny-sd3", "--prompt", "a", "--out", str(out)], capsys)
    assert sorted(path.name for path in out.iterdir()) == ["card.json", "grid.png"]
