"""Clips of an evaluation: the layout of images with a file for each clip, going on after a kill, kinds that differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation_folders import RECORDS
from toy_pipeline import FRAMES, VideoToy

from flowrl.generation import generate
from flowrl.generation.folders import DRAWN, read_folder
from flowrl.generation.generate import draw_folder
from flowrl.generation.models import Source
from flowrl.media.lossless import CLIPS, LOSSLESS, PLAYED, read_clip, read_rate
from flowrl.prompts.loading import Prompt

SOURCE = Source(
    model="toy", lora=None, num_steps=2, guidance_scale=1.0, grid="diffusers", max_sequence_length=16, dtype="float32"
)
PROMPTS = [Prompt(text=record["prompt"], metadata=record) for record in RECORDS[:3]]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    loaded: list[str] = []

    def load(source: Source, device: str) -> Any:
        loaded.append(source.model)
        return VideoToy()

    monkeypatch.setattr(generate, "load_source", load)
    monkeypatch.setattr(generate, "fingerprint", lambda source: f"mark of {source.model}")
    return loaded


def drawn(folder: Path, suffix: str = LOSSLESS) -> dict[str, bytes]:
    draw_folder(SOURCE, PROMPTS, folder, label="toy", samples=2, seed=5, batch_size=4, device="cpu", show=False,
                suffix=suffix)  # fmt: skip
    return {clip.file: clip.path.read_bytes() for clip in read_folder(folder, CLIPS)}


def test_a_file_for_each_clip_in_the_layout_of_images(tmp_path: Path, loads: list[str]) -> None:
    files = drawn(tmp_path / "a")
    assert list(files) == [f"{i:05d}/samples/{k:05d}.mkv" for i in range(3) for k in range(2)]
    assert len(set(files.values())) == 6
    clip = read_clip(tmp_path / "a" / "00000" / "samples" / "00000.mkv")
    assert clip.shape == (FRAMES, 3, 2, 2)
    assert read_rate(tmp_path / "a" / "00000" / "samples" / "00000.mkv") == 8.0
    levels = clip.mean((1, 2, 3)) / clip.mean((1, 2, 3))[2]
    assert torch.allclose(levels, torch.tensor([0.25, 0.625, 1.0, 0.5]), atol=0.02)
    assert json.loads((tmp_path / "a" / DRAWN).read_text())["files"] == ".mkv"


def test_what_is_missing_is_drawn_with_the_same_bytes(tmp_path: Path, loads: list[str]) -> None:
    whole = drawn(tmp_path / "a")
    (tmp_path / "a" / "00001" / "samples" / "00000.mkv").unlink()
    (tmp_path / "a" / "00001" / "samples" / ".00000.mkv.12.tmp").write_bytes(b"half")
    assert drawn(tmp_path / "a") == whole
    assert loads == ["toy", "toy"]
    assert drawn(tmp_path / "a") == whole
    assert loads == ["toy", "toy"]
    assert not list((tmp_path / "a").rglob("*.tmp"))


def test_a_folder_is_not_continued_with_another_kind_of_file(tmp_path: Path, loads: list[str]) -> None:
    assert all(name.endswith(".mp4") for name in drawn(tmp_path / "a", PLAYED))
    with pytest.raises(ValueError, match=r"files '\.mp4' \(now '\.mkv'\)"):
        drawn(tmp_path / "a")
