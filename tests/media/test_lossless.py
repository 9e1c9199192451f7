"""Clips that are scored: exact to the 8-bit level, whole or not there, and read back from any kind of file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flowrl.media.lossless import clip_size, is_clip, read_clip, read_rate, save_lossless
from flowrl.media.videos import save_mp4


def test_frames_come_back_exactly(tmp_path: Path) -> None:
    video = torch.randint(0, 256, (5, 3, 13, 17), generator=torch.Generator().manual_seed(0)).float() / 255
    path = save_lossless(video, tmp_path / "new" / "clip.mkv", 8.0)
    assert torch.equal(read_clip(path), video)
    assert read_rate(path) == 8.0
    assert clip_size(path) == (17, 13, 5)
    assert path.read_bytes() == save_lossless(video, tmp_path / "again.mkv", 8.0).read_bytes()
    assert [one.name for one in path.parent.iterdir()] == ["clip.mkv"]


def test_levels_between_are_rounded(tmp_path: Path) -> None:
    video = torch.full((2, 3, 4, 4), 100.4 / 255)
    assert torch.equal(read_clip(save_lossless(video, tmp_path / "a.mkv", 16)), torch.full_like(video, 100 / 255))


def test_clips_of_other_kinds_are_read(tmp_path: Path) -> None:
    video = torch.full((4, 3, 128, 128), 0.5)
    path = save_mp4(video, tmp_path / "a.mp4", 12)
    assert torch.allclose(read_clip(path), video, atol=2 / 255)
    assert (read_rate(path), clip_size(path)) == (12.0, (128, 128, 4))
    assert is_clip(path)
    assert not is_clip(tmp_path / "a.png")


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "a.mkv").write_bytes(b"no clip at all")
    for name in ("a.mkv", "b.mkv"):
        assert clip_size(tmp_path / name) is None
        with pytest.raises(ValueError, match="is not a clip that can be read"):
            read_clip(tmp_path / name)


@pytest.mark.parametrize(
    ("shape", "fps", "words"), [((3, 4, 4), 8.0, "must have the shape"), ((2, 3, 4, 4), 0.0, "fps")]
)
def test_what_is_no_video_is_refused(tmp_path: Path, shape: tuple[int, ...], fps: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        save_lossless(torch.zeros(shape), tmp_path / "a.mkv", fps)
