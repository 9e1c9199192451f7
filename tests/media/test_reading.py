"""Image files become pixels in one way: kinds of pixels, orientation, transparency, damage; nobody reads otherwise."""

from __future__ import annotations

import ast
import importlib
import io
import os
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flowrl.media import reading
from flowrl.media.images import as_tensor
from flowrl.media.reading import as_rgb, image_size, read_image, read_rgb

ROOT = Path(__file__).resolve().parents[2]
LEVELS = np.random.default_rng(0).integers(0, 256, size=(6, 8, 3), dtype=np.uint8)
ALLOWED = {
    "flowrl/media/reading.py",  # the reader itself
    "rewards/serving/score_server.py",  # is copied elsewhere and imports nothing of flowrl
}
READERS = {"imread", "imdecode", "decode_image", "decode_png", "decode_jpeg", "load_image", "exif_transpose"}
OTHERS = {"cv2", "imageio", "skimage", "torchvision.io", "matplotlib.image", "tifffile"}


def saved(tmp_path: Path, image: Image.Image, name: str = "a.png", **options: object) -> Path:
    image.save(tmp_path / name, **options)  # type: ignore[arg-type]
    return tmp_path / name


def mean(path: Path) -> float:
    return float(read_image(path).mean() / 255)


def test_rgb_is_read_as_it_is(tmp_path: Path) -> None:
    path = saved(tmp_path, Image.fromarray(LEVELS))
    assert np.array_equal(read_image(path), LEVELS)
    assert np.array_equal(np.asarray(read_rgb(io.BytesIO(path.read_bytes()))), LEVELS)
    assert image_size(path) == (8, 6)


def test_sixteen_bits_are_scaled(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 64 * 64).round().astype(np.uint16).reshape(64, 64)
    wide = saved(tmp_path, Image.fromarray(ramp))
    assert mean(wide) == pytest.approx(0.5, abs=1e-3)
    eight = saved(tmp_path, Image.fromarray(np.rint(ramp / 257).astype(np.uint8)), "b.png")
    assert np.array_equal(read_image(wide), read_image(eight))
    for mode, dtype in (("I;16", "<u2"), ("I;16B", ">u2"), ("I", "<i4")):
        image = Image.frombytes(mode, (64, 64), ramp.astype(dtype).tobytes())
        assert np.array_equal(np.asarray(as_rgb(image)), read_image(eight)), mode


def test_transparency_lies_on_white(tmp_path: Path) -> None:
    red = np.zeros((8, 8, 4), dtype=np.uint8)
    red[..., 0], red[:, :4, 3] = 255, 255
    assert mean(saved(tmp_path, Image.fromarray(red))) == pytest.approx(2 / 3, abs=1e-3)
    black = Image.fromarray(np.dstack([np.zeros((4, 4)), np.full((4, 4), 51)]).astype(np.uint8), "LA")
    assert np.unique(read_image(saved(tmp_path, black, "la.png"))).tolist() == [204]
    levels = np.array([[0, 1000, 65535]], dtype=np.uint16)
    clear = saved(tmp_path, Image.fromarray(levels), "clear.png", transparency=1000)
    assert read_image(clear)[0, :, 0].tolist() == [0, 255, 255]


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr"])
def test_other_kinds_keep_their_colours(tmp_path: Path, mode: str) -> None:
    image = Image.new("RGB", (4, 4), (255, 255, 255))
    path = saved(tmp_path, image.convert(mode), "a.tif")
    assert read_image(path).min() == 255


@pytest.mark.parametrize(
    "image", [Image.new("F", (2, 2), 0.5), Image.new("I", (2, 2), 70_000), Image.new("LAB", (2, 2))]
)
def test_pixels_without_a_range_are_refused(tmp_path: Path, image: Image.Image) -> None:
    with pytest.raises(ValueError, match=r"a\.tif cannot be read as an image .*range: save it as 8-bit RGB"):
        read_image(saved(tmp_path, image, "a.tif"))


@pytest.mark.parametrize("tag", [(258, 12), (339, 2), (262, 0)], ids=["12 bits", "signed", "0 is white"])
def test_tiff_levels_that_pillow_does_not_scale_are_refused(tmp_path: Path, tag: tuple[int, int]) -> None:
    grey = Image.fromarray(np.full((2, 2), 4095, dtype=np.uint16))
    data = bytearray(saved(tmp_path, grey, "a.tif").read_bytes())
    entry = bytes([tag[0] & 255, tag[0] >> 8, 3, 0, 1, 0, 0, 0])
    place = data.find(entry)
    if place < 0:  # Pillow leaves out what is usual: in place of a tag that is not needed
        place = data.find(bytes([284 & 255, 284 >> 8, 3, 0, 1, 0, 0, 0]))
        data[place : place + 8] = entry
    data[place + 8 : place + 10] = bytes([tag[1], 0])
    (tmp_path / "a.tif").write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.tif cannot be read as an image .*known range: save it as 8-bit RGB"):
        read_image(tmp_path / "a.tif")


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_a_clear_level_of_few_bits_is_that_level(tmp_path: Path, bits: int) -> None:
    top = 2**bits - 1
    body = zlib.compress(bytes([0, sum(level << (8 - bits * (place + 1)) for place, level in enumerate((0, top)))]))
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", 2, 1, bits, 0, 0, 0, 0)),
        (b"tRNS", b"\0\0"),
        (b"IDAT", body),
        (b"IEND", b""),
    ]
    chunks = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    ]
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    assert read_image(tmp_path / "a.png")[0, :, 0].tolist() == [255, 255]
    lower = b"\x89PNG\r\n\x1a\n" + b"".join(chunks).replace(chunks[1], struct.pack(">I", 2) + b"tRNS" + bytes([0, top])
            + struct.pack(">I", zlib.crc32(b"tRNS" + bytes([0, top]))))  # fmt: skip
    (tmp_path / "b.png").write_bytes(lower)
    assert read_image(tmp_path / "b.png")[0, :, 0].tolist() == [0, 255]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_size_is_that_of_the_image_that_is_read(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    for name in ("a.png", "a.jpg", "a.webp", "a.tif"):
        path = saved(tmp_path, Image.fromarray(LEVELS), name, exif=exif)
        assert image_size(path) == read_rgb(path).size == ((8, 6) if orientation < 5 else (6, 8)), name


def test_an_animation_gives_its_first_frame(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (2, 2), colour) for colour in ((255, 0, 0), (0, 0, 255))]
    for name in ("a.gif", "a.webp", "a.png"):
        path = saved(tmp_path, frames[0], name, save_all=True, append_images=frames[1:], **{"lossless": True})
        assert read_image(path)[0, 0].tolist() == [255, 0, 0], name


def test_what_is_no_whole_image_is_refused_by_name(tmp_path: Path) -> None:
    whole = saved(tmp_path, Image.fromarray(np.tile(LEVELS, (20, 20, 1))))
    cut = tmp_path / "cut.png"
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    os.mkfifo(tmp_path / "pipe.png")  # would be waited for without an end
    for name in ("cut.png", "absent.png", "pipe.png"):
        with pytest.raises(ValueError, match=rf"pairs: {tmp_path / name} cannot be read as an image \(.+\): remove or"):
            read_image(tmp_path / name, owner="pairs")
    with pytest.raises(ValueError, match="cannot be read as an image"):
        image_size(tmp_path / "absent.png")


def test_drawn_images_become_tensors_by_the_same_rule() -> None:
    assert as_tensor(Image.new("RGBA", (1, 1), (0, 0, 0, 0))).min() == 1


def strange(tree: ast.AST) -> list[str]:
    """What in a file reads or converts images by itself."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name in OTHERS]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names
                      if node.module in OTHERS or f"{node.module}.{alias.name}" in {"PIL.Image.open", *OTHERS}
                      or (alias.name in READERS and not str(node.module).startswith("flowrl."))]  # fmt: skip
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if (node.attr == "open" and owner.endswith("Image")) or (node.attr in READERS):
                found.append(f"{owner}.{node.attr}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "convert":
            modes = [*node.args, *(word.value for word in node.keywords)]
            if modes and isinstance(modes[0], ast.Constant) and str(modes[0].value).startswith("RGB"):
                found.append(f"{ast.unparse(node.func.value)}.convert({modes[0].value!r})")
    return found


@pytest.mark.slow
def test_nobody_else_opens_or_converts_images() -> None:
    wrong = {}
    for folder in ("flowrl", "samplers", "rewards", "pipelines"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.relative_to(ROOT).as_posix() not in ALLOWED and (found := strange(ast.parse(path.read_text()))):
                wrong[path.relative_to(ROOT).as_posix()] = found
    assert not wrong, "read images by flowrl.media.reading"


@pytest.mark.parametrize(
    "source",
    [
        "Image.open(path)", "PIL.Image.open(path).convert('L')", "image.convert('RGB')", "image.convert(mode='RGBA')",
        "from PIL.Image import open as read", "from torchvision.io import decode_image", "from torchvision import io",
        "import cv2", "from diffusers.utils import load_image", "ImageOps.exif_transpose(image)",
    ],
)  # fmt: skip
def test_the_look_for_other_readers_finds_them(source: str) -> None:
    assert strange(ast.parse(source))


def test_very_many_pixels_are_read_without_a_word_and_twice_as_many_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow's own limits, which are too large for a test."""
    path = tmp_path / "large.png"
    Image.new("RGB", (12, 10)).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with warnings.catch_warnings(record=True) as told:
        importlib.reload(reading)
        assert reading.image_size(path) == (12, 10)
    assert told == []
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)
    with pytest.raises(ValueError, match=r"large\.png cannot be read as an image"):
        read_image(path)
