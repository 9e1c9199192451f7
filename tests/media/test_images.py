"""Images on disk: exact pixels, whole files, readable grids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFont

from flowrl.media.images import BACKGROUND, grid, save_png, to_pixels, wrap


def test_png_round_trip_keeps_every_eight_bit_level(tmp_path: Path) -> None:
    level = torch.arange(256, dtype=torch.float32).reshape(1, 16, 16).expand(3, 16, 16) / 255
    path = save_png(level, tmp_path / "deep" / "levels.png")
    assert np.array_equal(np.asarray(Image.open(path)), (level * 255).round().byte().permute(1, 2, 0).numpy())
    assert [p.name for p in path.parent.iterdir()] == ["levels.png"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_tensors_and_arrays_agree_and_round_to_nearest(dtype: torch.dtype) -> None:
    image = torch.rand(3, 5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = np.floor(image.float().numpy() * 255 + 0.5).transpose(1, 2, 0)
    assert np.array_equal(to_pixels(image), expected)
    assert np.array_equal(to_pixels(image.float().numpy()), expected)


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_png(torch.zeros(3, 4, 4), tmp_path / "a.png")
    old = path.read_bytes()

    def broken(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Image.Image, "save", broken)
    with pytest.raises(OSError, match="disk full"):
        save_png(torch.ones(3, 4, 4), path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


def test_grid_places_every_image_and_repeats_its_pixels() -> None:
    images = torch.arange(5, dtype=torch.float32).reshape(5, 1, 1, 1).expand(5, 3, 4, 6) / 5
    canvas = np.asarray(grid(images, columns=2, padding=3, scale=2))
    assert canvas.shape == (3 + 3 * (8 + 3), 3 + 2 * (12 + 3), 3)
    for index in range(5):
        row, column = divmod(index, 2)
        cell = canvas[3 + row * 11 : 11 + row * 11, 3 + column * 15 : 15 + column * 15]
        assert (cell == round(index / 5 * 255)).all()
    assert (canvas[-8:, -14:] == BACKGROUND).all()  # the sixth cell stays empty


def test_default_columns_are_the_squarest_and_never_more_than_images() -> None:
    assert grid(torch.zeros(9, 3, 10, 10), padding=0).size == (30, 30)
    assert grid(torch.zeros(2, 3, 10, 10), columns=7, padding=0).size == (20, 10)


def test_captions_stay_in_their_cell_and_make_room() -> None:
    text = "a photo of a red circle above a blue square"
    images = torch.zeros(2, 3, 64, 64)
    plain, captioned = grid(images, padding=2), grid(images, padding=2, captions=[text, "short"])
    assert captioned.width == plain.width
    below = np.asarray(captioned)[66:]
    assert (below[:, 2:66] < 128).any()  # ink under the first cell
    assert (below[:, 66:68] == BACKGROUND).all()  # none in the gutter


def test_wrapping_keeps_the_words_and_the_width() -> None:
    font = ImageFont.load_default(size=11)
    text = "a photo of three supercalifragilisticexpialidocious green triangles"
    lines = wrap(text, font, 64)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert max(font.getlength(line) for line in lines) <= 64
    assert wrap("", font, 64) == []


def test_errors_teach() -> None:
    with pytest.raises(ValueError, match="channels first"):
        to_pixels(torch.zeros(4, 4, 3))
    with pytest.raises(ValueError, match="divide 8-bit values by 255"):
        to_pixels(torch.zeros(3, 4, 4, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"got -1 to 1: map"):
        to_pixels(np.linspace(-1, 1, 48).reshape(3, 4, 4))
    with pytest.raises(ValueError, match="not finite"):
        to_pixels(torch.full((3, 2, 2), float("nan")))
    with pytest.raises(ValueError, match="1 texts for 2 images"):
        grid(torch.zeros(2, 3, 4, 4), captions=["x"])
    with pytest.raises(ValueError, match=r"\[N, 3, H, W\]"):
        grid(torch.zeros(3, 4, 4))
    with pytest.raises(ValueError, match=r"scale \(0\)"):
        grid(torch.zeros(1, 3, 4, 4), scale=0)
