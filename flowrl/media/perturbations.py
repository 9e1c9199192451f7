"""Changes to an image that a reward should hardly notice."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial

from PIL import Image

from flowrl.media.reading import read_rgb


def jpeg(image: Image.Image, quality: int) -> Image.Image:
    """Encodes an image as JPEG and decodes it; only the quality differs from Pillow's defaults."""
    stream = io.BytesIO()
    image.save(stream, format="JPEG", quality=quality)
    stream.seek(0)
    return read_rgb(stream)


def half_and_back(image: Image.Image) -> Image.Image:
    """Halves an image and enlarges it again, bicubic."""
    width, height = image.size
    half = (max(1, round(width / 2)), max(1, round(height / 2)))
    return image.resize(half, Image.Resampling.BICUBIC).resize(image.size, Image.Resampling.BICUBIC)


def mirror(image: Image.Image) -> Image.Image:
    """Left and right exchanged."""
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


PERTURBATIONS: dict[str, tuple[str, Callable[[Image.Image], Image.Image]]] = {
    "jpeg95": ("JPEG quality 95", partial(jpeg, quality=95)),
    "jpeg75": ("JPEG quality 75", partial(jpeg, quality=75)),
    "jpeg50": ("JPEG quality 50", partial(jpeg, quality=50)),
    "resize": ("half size and back", half_and_back),
    "flip": ("mirrored", mirror),
}
"""Name -> words and the change. A mirrored image shows something else if text, or left and right, matter."""
