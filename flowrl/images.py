"""Images to files: one PNG, or a captioned grid of many. Files appear whole or not at all.

Pixels are float in [0, 1], channels first, as the pipelines decode them; they are rounded to 8 bits, never truncated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from flowrl.files import replacing

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

BACKGROUND = (255, 255, 255)
INK = (32, 36, 42)
TOLERANCE = 1e-3  # how far a decoder's clamp may miss [0, 1] before it is an error


def save_png(image: Tensor | np.ndarray | Image.Image, path: str | Path) -> Path:
    """Write one image, [3, H, W] float in [0, 1] or an already drawn PIL image, and return its path.

    The file is written beside its place and moved there, so a reader or a killed run never meets half a picture.
    Missing folders are made.

    Raises:
        ValueError: another shape or dtype, or values that are not finite or leave [0, 1].
    """
    picture = image if isinstance(image, Image.Image) else Image.fromarray(to_pixels(image))
    path = Path(path)
    with replacing(path) as stream:
        picture.save(stream, format="PNG")
    return path


def grid(
    images: Tensor | np.ndarray,
    columns: int | None = None,
    padding: int = 2,
    captions: Sequence[str] | None = None,
    scale: int = 1,
) -> Image.Image:
    """Lay images out row by row on white, each with its caption wrapped below it.

    Args:
        images: [N, 3, H, W] float in [0, 1].
        columns: cells in a row; None takes the squarest arrangement.
        padding: pixels around every cell.
        captions: one text an image; a row of cells is as tall as its longest caption needs.
        scale: whole factor by which pixels are repeated, so that tiny images can be seen (no smoothing).

    Raises:
        ValueError: no images, a wrong shape or range, another number of captions, or options below their minimum.
    """
    count = _check_grid(images, columns, padding, captions, scale)
    columns = min(columns or math.ceil(math.sqrt(count)), count)
    pixels = [to_pixels(image) for image in images]
    height, width = (side * scale for side in pixels[0].shape[:2])
    font = ImageFont.load_default(size=min(max(12, round(width / 24)), 28))
    lines = [wrap(text, font, width) for text in captions] if captions is not None else [[] for _ in pixels]
    line_height = math.ceil(font.size * 1.25) if isinstance(font, ImageFont.FreeTypeFont) else 13
    text_heights = [
        max(len(cell) for cell in lines[start : start + columns]) * line_height for start in range(0, count, columns)
    ]
    total_height = padding + sum(height + text + padding for text in text_heights)
    canvas = Image.new("RGB", (padding + columns * (width + padding), total_height), BACKGROUND)
    draw = ImageDraw.Draw(canvas)
    for index, cell in enumerate(pixels):
        row, column = divmod(index, columns)
        left = padding + column * (width + padding)
        top = padding + row * (height + padding) + sum(text_heights[:row])
        canvas.paste(Image.fromarray(cell).resize((width, height), Image.Resampling.NEAREST), (left, top))
        for number, line in enumerate(lines[index]):
            draw.text((left, top + height + number * line_height), line, fill=INK, font=font)
    return canvas


def wrap(text: str, font: Font, width: int) -> list[str]:
    """Break `text` into lines at most `width` pixels wide, between words where possible, inside a word where not."""
    lines: list[str] = []
    line = ""
    for word in text.split():
        if font.getlength(f"{line} {word}".strip()) <= width:
            line = f"{line} {word}".strip()
            continue
        if line:
            lines.append(line)
        line = word
        while len(line) > 1 and font.getlength(line) > width:
            cut = max((end for end in range(1, len(line)) if font.getlength(line[:end]) <= width), default=1)
            lines.append(line[:cut])
            line = line[cut:]
    return [*lines, line] if line else lines


def to_pixels(image: Tensor | np.ndarray) -> UInt8[np.ndarray, " height width 3"]:
    """[3, H, W] float in [0, 1] to 8-bit [H, W, 3], rounded to the nearest level.

    Raises:
        ValueError: another shape or dtype, or values that are not finite or leave [0, 1].
    """
    array = image.detach().float().cpu().numpy() if isinstance(image, Tensor) and image.is_floating_point() else image
    array = array.cpu().numpy() if isinstance(array, Tensor) else np.asarray(array)
    if array.ndim != 3 or array.shape[0] != 3 or 0 in array.shape:
        raise ValueError(f"an image must have the shape [3, H, W], got {list(array.shape)}: put the channels first")
    if not np.issubdtype(array.dtype, np.floating):
        raise ValueError(f"an image must be float in [0, 1], got {array.dtype}: divide 8-bit values by 255")
    if not np.isfinite(array).all():
        raise ValueError("an image holds values that are not finite: the decoder or the sampler before it broke down")
    if array.min() < -TOLERANCE or array.max() > 1 + TOLERANCE:
        raise ValueError(
            f"an image must lie in [0, 1], got {array.min():.3g} to {array.max():.3g}: map [-1, 1] by x / 2 + 0.5"
        )
    levels = np.rint(np.clip(array, 0, 1) * 255).astype(np.uint8)
    return np.ascontiguousarray(levels.transpose(1, 2, 0))


def _check_grid(
    images: Tensor | np.ndarray, columns: int | None, padding: int, captions: Sequence[str] | None, scale: int
) -> int:
    if images.ndim != 4 or len(images) == 0:
        raise ValueError(f"images must have the shape [N, 3, H, W] with N >= 1, got {list(images.shape)}")
    if captions is not None and len(captions) != len(images):
        raise ValueError(
            f"captions has {len(captions)} texts for {len(images)} images: give one for each image or None"
        )
    if (columns is not None and columns < 1) or padding < 0 or scale < 1:
        raise ValueError(
            f"columns ({columns}) and scale ({scale}) must be at least 1 and padding ({padding}) at least 0: raise them"
        )
    return len(images)
