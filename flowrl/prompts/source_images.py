"""Images that prompts name: headers checked when a prompt file is read, pixels read when they are used.

An image of a dataset has no file. It is written into a folder of this process, as the bytes it came in and named by
their hash, so that every image is a file for whoever reads it. The folder lies in `TMPDIR` until the process ends.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from flowrl.media.reading import BROKEN, lacks_range, open_image, read_rgb, reason
from flowrl.runtime.digests import file_stamp
from flowrl.runtime.shapes import Float, UInt8
from flowrl.runtime.temporary import TemporaryFolder

Size = tuple[int, int]

CACHED_IMAGES = 32
"""Images whose pixels are kept, as 8 bits: 3 MB each at 1024 x 1024."""


def check_image(path: str | Path) -> None:
    """Opens an image's header, once for each version of the file. Raises ValueError: Pillow cannot open it, or its
    pixels are of a kind that has no fixed range."""
    path = Path(path)
    _check_header(path, _stamp(path))


def read_image(path: str | Path, size: Size | None = None) -> Float[Tensor, " 3 h w"]:
    """An image as RGB in [0, 1], read as `flowrl.media.reading` says.

    Args:
        size: (height, width) to bring it to, or None for its own. It is scaled (Lanczos, antialiased) until it covers
            the size and what sticks out is cut off evenly on both sides, so that nothing is stretched.

    Raises ValueError: no such file, no image, or a size below 1.
    """
    if size is not None and min(size) < 1:
        raise ValueError(f"size is (height, width) in pixels, each at least 1, got {size}")
    path = Path(path)
    pixels = _pixels(path, size, _stamp(path))
    return torch.from_numpy(pixels).permute(2, 0, 1).float().div(255).contiguous()


def keep_image(data: bytes) -> Path:
    """A file of this process with an image's bytes, one for the same bytes. Raises ValueError: they are no image."""
    name = hashlib.sha256(data).hexdigest()[:32]
    try:
        with open_image(io.BytesIO(data)) as image:
            suffix = (image.format or "image").lower()
    except BROKEN as error:
        raise ValueError(f"the bytes are not an image that Pillow can open ({reason(error)}): replace them") from error
    path = Path(_folder().name) / f"{name}.{suffix}"
    if not path.exists():
        path.write_bytes(data)
    return path


@functools.cache
def _folder() -> TemporaryFolder:
    folder = TemporaryFolder("flowrl-images-")
    atexit.register(folder.cleanup)
    return folder


def _stamp(path: Path) -> tuple[int, ...]:
    """What changes when a file is written again."""
    try:
        return file_stamp(path.stat())
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): give an image that is there") from error


@functools.lru_cache(maxsize=1 << 17)
def _check_header(path: Path, stamp: tuple[int, ...]) -> None:
    try:
        with open_image(path) as image:
            said = lacks_range(image)
    except BROKEN as error:
        raise ValueError(
            f"{path} is not an image that Pillow can open ({reason(error)}): remove or replace it"
        ) from error
    if said:
        raise ValueError(f"{path} {said}")


@functools.lru_cache(maxsize=CACHED_IMAGES)
def _pixels(path: Path, size: Size | None, stamp: tuple[int, ...]) -> UInt8[np.ndarray, " h w 3"]:
    _check_header(path, stamp)
    image = read_rgb(path)
    if size is not None:
        image = ImageOps.fit(image, (size[1], size[0]), Image.Resampling.LANCZOS)
    return np.array(image)
