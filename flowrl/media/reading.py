"""Reads image files in one way for all uses: 8 bits of red, green and blue.

Images are turned by their EXIF orientation; transparent ones get a white background. Grey becomes three equal channels,
16 bits are scaled to 8 (65535 to 255), CMYK and palettes become RGB, and an animation gives its first frame.
"""

from __future__ import annotations

import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image, ImageOps, TiffImagePlugin

from flowrl.runtime.shapes import UInt8

warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # twice as many pixels are an error
BROKEN = (
    OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, EOFError, struct.error, zlib.error,
    Image.DecompressionBombError,
)  # fmt: skip
"""Errors that Pillow raises for bad files, and for small ones with very many pixels."""

_WIDE = ("I", "I;16", "I;16B", "I;16L", "I;16N")  # grey, 16 bits
_MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", *_WIDE}
_TIFF_LEVELS: dict[int, Any] = {258: (1,), 339: (1,), 262: 1}  # tags of what grey levels are, what they are without
_STEPS = {"L;2": 85, "L;4": 17}  # how PNG's grey levels of few bits are stored, and how far apart they are in 8
_ORIENTATION, _ON_ITS_SIDE = 0x0112, (5, 6, 7, 8)  # EXIF's tag, and its values that exchange width and height


@contextmanager
def open_image(source: str | Path | IO[bytes], formats: tuple[str, ...] | None = None) -> Iterator[Image.Image]:
    """Opens an image file and reads only its header; `as_rgb` unpacks it.

    Args:
        source: the file, or what its bytes are read from.
        formats: names of the allowed formats; None allows all that Pillow reads.

    Raises:
        one of BROKEN: it is no image.
    """
    if isinstance(source, (str, Path)) and Path(source).exists() and not Path(source).is_file():
        raise OSError("it is a folder, a pipe or a device")  # a pipe would be waited for without an end
    with Image.open(source, formats=formats) as image:
        yield image


def as_rgb(image: Image.Image) -> Image.Image:
    """An image of any kind as 8-bit RGB, as the module says. Raises ValueError: its pixels have no fixed range."""
    if said := lacks_range(image):
        raise ValueError(f"it {said}")
    clear, tiles = image.info.get("transparency"), getattr(image, "tile", ())  # the one level that is not seen
    if isinstance(clear, int) and tiles and image.format == "PNG":  # Pillow scales the levels alone to 8 bits
        image.info["transparency"] = clear * _STEPS.get(str(tiles[0].args), 1)
    image = ImageOps.exif_transpose(image)
    if image.mode in _WIDE:
        levels = np.asarray(image).astype(np.float64)
        if levels.size and (levels.min() < 0 or levels.max() > 65535):
            raise ValueError("it has grey levels beyond 0 to 65535, which have no fixed range: save it as 8-bit RGB")
        grey = np.rint(levels / 257).astype(np.uint8)  # Pillow's own conversion cuts at 255
        clear = image.info.get("transparency")
        if isinstance(clear, int):
            grey[levels == clear] = 255
        return Image.fromarray(grey).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image).convert("RGB")


def lacks_range(image: Image.Image) -> str:
    """The fault of an image's kind of pixels, from its header; empty if they have a range."""
    if image.mode not in _MODES:
        return f"has pixels of Pillow's mode {image.mode}, which has no fixed range: save it as 8-bit RGB"
    if isinstance(image, TiffImagePlugin.TiffImageFile) and image.mode in _WIDE:
        bits, kind, zero = (image.tag_v2.get(tag, usual) for tag, usual in _TIFF_LEVELS.items())
        if (bits, kind, zero) != ((16,), (1,), 1):  # Pillow gives these as they are stored
            return (
                f"has grey levels of {bits[0]} bits, SampleFormat {kind[0]} and PhotometricInterpretation {zero}, and "
                "of those of more than 8 bits only whole ones of 16 in which 0 is black have a known range: save it as "
                "8-bit RGB"
            )
    return ""


def read_rgb(source: str | Path | IO[bytes], *, owner: str = "") -> Image.Image:
    """An image file as 8-bit RGB, as the module says. Raises ValueError: it is no image, is damaged, or its pixels have
    no fixed range; names it."""
    try:
        with open_image(source) as image:
            return as_rgb(image)
    except BROKEN as error:
        start = f"{owner}: " if owner else ""
        raise ValueError(
            f"{start}{source} cannot be read as an image ({reason(error)}): remove or replace it."
        ) from error


def read_image(source: str | Path | IO[bytes], *, owner: str = "") -> UInt8[np.ndarray, " h w 3"]:
    """`read_rgb` as an array of its own."""
    return np.array(read_rgb(source, owner=owner))


def image_size(source: str | Path) -> tuple[int, int]:
    """Width and height of `read_rgb`'s result, with little reading. Raises ValueError: it is no image; names it."""
    try:
        with open_image(source) as image:
            width, height = image.size
            known = isinstance(image, TiffImagePlugin.TiffImageFile)  # Pillow turns these itself
            turned = width != height and not known and image.getexif().get(_ORIENTATION) in _ON_ITS_SIDE
    except BROKEN as error:
        raise ValueError(f"{source} cannot be read as an image ({reason(error)}): remove or replace it.") from error
    return (height, width) if turned else (width, height)


def reason(error: BaseException) -> str:
    """Pillow's message on a file, or the kind of error if the message is empty."""
    said = str(error)
    return said if isinstance(error, (OSError, SyntaxError, ValueError)) and said else f"{type(error).__name__}: {said}"
