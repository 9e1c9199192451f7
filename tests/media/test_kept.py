"""What training leaves for people while it runs."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image

from flowrl.media.kept import write_latest


def test_the_latest_are_one_row_of_stills(tmp_path: Path) -> None:
    images = [torch.full((3, 16, 16), level) for level in (0.0, 0.5, 1.0)]
    stills = write_latest(tmp_path, images)
    with Image.open(tmp_path / "latest.png") as row:
        assert row.width > 2.9 * row.height
        middle = row.height // 2
        centres = [row.convert("RGB").getpixel((round((k + 0.5) * row.width / 3), middle)) for k in range(3)]
    assert centres == [(0, 0, 0), (128, 128, 128), (255, 255, 255)]
    assert len(stills) == 3
    clip = torch.zeros(5, 3, 16, 16)
    clip[2] = 1.0  # of a video the middle frame
    (still,) = write_latest(tmp_path, [clip])
    assert still.getpixel((0, 0)) == (255, 255, 255)
    assert not list(tmp_path.glob(".*"))
