"""Images of prompts: kinds of pixels, orientation, size, and what is kept in memory."""

from __future__ import annotations

import atexit
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flowrl.prompts import source_images
from flowrl.prompts.source_images import check_image, keep_image, read_image

LEVELS = np.random.default_rng(0).integers(0, 256, size=(6, 8, 3), dtype=np.uint8)


def save(image: Image.Image, path: Path, **options: object) -> Path:
    image.save(path, **options)  # type: ignore[arg-type]
    return path


def test_rgb_is_read_as_it_is(tmp_path: Path) -> None:
    image = read_image(save(Image.fromarray(LEVELS), tmp_path / "a.png"))
    assert image.dtype == torch.float32
    assert image.shape == (3, 6, 8)
    assert image.is_contiguous()
    assert torch.equal(image, torch.from_numpy(LEVELS.transpose(2, 0, 1).astype(np.float32) / np.float32(255)))


def test_grey_in_8_and_16_bits_and_black_and_white(tmp_path: Path) -> None:
    grey = LEVELS[..., 0]
    eight = read_image(save(Image.fromarray(grey), tmp_path / "8.png"))
    sixteen = read_image(save(Image.fromarray(grey.astype(np.uint16) * 257), tmp_path / "16.png"))
    with Image.open(tmp_path / "16.png") as image:
        assert image.mode == "I;16"
    assert torch.equal(eight, sixteen)
    assert torch.equal(eight * 255, torch.from_numpy(grey).float().expand(3, 6, 8))
    two = read_image(save(Image.fromarray(grey > 127), tmp_path / "1.png"))
    assert torch.equal(two[0], torch.from_numpy(grey > 127).float())


def test_transparency_lies_on_white(tmp_path: Path) -> None:
    image = Image.new("RGBA", (3, 1), (255, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 0, 0))
    image.putpixel((2, 0), (0, 0, 0, 51))  # a fifth of black
    read = read_image(save(image, tmp_path / "a.png"))
    assert (read[:, 0] * 255).T.round().tolist() == [[255, 0, 0], [255, 255, 255], [204, 204, 204]]
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([0, 0, 255, 0, 255, 0])
    palette.putpixel((1, 0), 1)
    path = save(palette, tmp_path / "p.png", transparency=1)
    assert read_image(path)[:, 0].T.tolist() == [[0, 0, 1], [1, 1, 1]]


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by a quarter
    path = save(Image.fromarray(LEVELS), tmp_path / "a.png", exif=exif)
    turned = torch.from_numpy(np.rot90(LEVELS, -1).transpose(2, 0, 1).copy())
    assert torch.equal((read_image(path) * 255).round().byte(), turned)


def test_an_animation_gives_its_first_frame(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (2, 2), colour) for colour in ((255, 0, 0), (0, 0, 255))]
    path = save(frames[0], tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert read_image(path)[:, 0, 0].tolist() == [1, 0, 0]


def test_a_size_covers_and_cuts_evenly_without_stretching(tmp_path: Path) -> None:
    wide = np.zeros((40, 120, 3), dtype=np.uint8)
    wide[:, :40], wide[:, 40:80], wide[:, 80:] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    path = save(Image.fromarray(wide), tmp_path / "wide.png")
    square = read_image(path, (20, 20))
    assert square.shape == (3, 20, 20)
    assert torch.equal(square[:, :, 3:-3], torch.tensor([0.0, 1.0, 0.0])[:, None, None].expand(3, 20, 14))
    assert torch.equal(read_image(path, (40, 120)), read_image(path))
    half = read_image(path, (20, 60))
    assert half.shape == (3, 20, 60)
    assert half[:, 10, [5, 30, 55]].T.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    tall = read_image(path, (80, 40))  # doubled, then a sixth of its width from the middle
    assert torch.equal(tall[:, :, 5:-5], torch.tensor([0.0, 1.0, 0.0])[:, None, None].expand(3, 80, 30))


def test_shrinking_is_antialiased(tmp_path: Path) -> None:
    board = (np.indices((64, 64)).sum(0) % 2 * 255).astype(np.uint8)
    small = read_image(save(Image.fromarray(board), tmp_path / "board.png"), (8, 8))
    assert (small - 0.5).abs().max() < 0.02


def test_a_file_that_changed_is_read_again_and_results_are_the_callers_own(tmp_path: Path) -> None:
    path = save(Image.new("RGB", (4, 4), (255, 0, 0)), tmp_path / "a.png")
    read_image(path).zero_()
    assert read_image(path)[0].min() == 1
    save(Image.new("RGB", (5, 5), (0, 0, 255)), path)
    assert read_image(path).shape == (3, 5, 5)
    assert read_image(path)[2].min() == 1


def test_damaged_and_missing_images_and_bad_sizes_are_refused(tmp_path: Path) -> None:
    whole = save(Image.fromarray(np.tile(LEVELS, (20, 20, 1))), tmp_path / "whole.png")
    cut = tmp_path / "cut.png"
    cut.write_bytes(whole.read_bytes()[: len(whole.read_bytes()) // 2])
    check_image(cut)  # its header is there
    with pytest.raises(ValueError, match=r"cut\.png cannot be read as an image"):
        read_image(cut)
    for read in (read_image, check_image):
        with pytest.raises(ValueError, match=r"absent\.png cannot be read \(No such file"):
            read(tmp_path / "absent.png")
    cut.write_bytes(b"")
    with pytest.raises(ValueError, match="not an image that Pillow can open"):
        check_image(cut)
    with pytest.raises(ValueError, match=r"size is \(height, width\) in pixels, each at least 1, got \(0, 4\)"):
        read_image(whole, (0, 4))


def test_bytes_become_one_file_named_by_their_hash() -> None:
    encoded = [io.BytesIO() for _ in range(2)]
    for stream, kind in zip(encoded, ("PNG", "JPEG"), strict=True):
        Image.fromarray(LEVELS).save(stream, format=kind)
    png, jpeg = (keep_image(stream.getvalue()) for stream in encoded)
    assert (png.suffix, jpeg.suffix) == (".png", ".jpeg")
    assert png.stem != jpeg.stem
    assert keep_image(encoded[0].getvalue()) == png
    assert png.read_bytes() == encoded[0].getvalue()
    with pytest.raises(ValueError, match="the bytes are not an image"):
        keep_image(b"none")


def test_the_folder_of_kept_images_goes_with_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    folder = Path(source_images._folder.__wrapped__().name)
    (folder / "a.png").write_bytes(b"...")
    for leave in at_exit:
        leave()
    assert not folder.exists()
