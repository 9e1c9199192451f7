"""Writes images to files: one PNG, a captioned grid, or sources beside their edits. Files appear whole or not at all.

Pixels are float in [0, 1], channels first, as the pipelines decode them; they are rounded to 8 bits, never truncated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from flowrl.media.reading import as_rgb
from flowrl.runtime.files import replacing
from flowrl.runtime.shapes import Float, UInt8

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

BACKGROUND = (255, 255, 255)
INK = (32, 36, 42)
FAINT = (118, 126, 138)
SMALL = 128  # a shorter side below this is enlarged for people
VISIBLE = 192  # to at least this
TOLERANCE = 1e-3  # how far a decoder's clamp may miss [0, 1] before it is an error


def save_png(image: Tensor | np.ndarray | Image.Image, path: str | Path, *, durable: bool = False) -> Path:
    """Write one image, [3, H, W] float in [0, 1] or an already drawn PIL image, and return its path.

    The file is written beside its place and moved there, so a reader or a killed run never sees half an image. With
    `durable` this also holds after a power cut, at a cost of some milliseconds. Missing folders are made. Raises
    ValueError: another shape or dtype, or values that are not finite or leave [0, 1].
    """
    drawn = image if isinstance(image, Image.Image) else Image.fromarray(to_pixels(image))
    path = Path(path)
    with replacing(path, durable=durable) as stream:
        drawn.save(stream, format="PNG")
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
        captions: one text per image; a row of cells is as tall as its longest caption needs.
        scale: whole factor by which pixels are repeated, so that tiny images can be seen (no smoothing).
    """
    count = _check_grid(images, columns, padding, captions, scale)
    columns = min(columns or math.ceil(math.sqrt(count)), count)
    pixels = [to_pixels(image) for image in images]
    height, width = (side * scale for side in pixels[0].shape[:2])
    font, line_height = lettering(width)
    lines = [wrap(text, font, width) for text in captions] if captions is not None else [[] for _ in pixels]
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


def beside(
    sources: Sequence[Sequence[Tensor]], results: Sequence[Tensor], captions: Sequence[str] | None = None
) -> Float[Tensor, "3 height width"]:
    """Edits as a grid: in every cell the sources, an arrow, and the result, with the caption below.

    Args:
        sources: for each result its source images, [3, h, w] float in [0, 1] of any size; they are drawn as tall as the
            result, or smaller if they would be wider than twice that. A result without one stands alone.
        results: [3, H, W], all of one size, drawn pixel by pixel.
        captions: one text per result, usually the instruction.
    """
    if not results or len(sources) != len(results):
        raise ValueError(
            f"{len(results)} results came with {len(sources)} lists of sources: give one result or more, and for each "
            "the list of its images"
        )
    if len({tuple(result.shape) for result in results}) > 1:
        raise ValueError(f"results differ in size, {sorted({tuple(r.shape) for r in results})}: give them one size")
    height, width = results[0].shape[-2:]
    drawn = [[_as_tall(source, height) for source in own] for own in sources]
    gap, arrow, middle = max(4, height // 48), max(24, height // 6), height // 2
    room = max(sum(image.width + gap for image in own) + (arrow + gap if own else 0) for own in drawn)
    cells = []
    for own, result in zip(drawn, results, strict=True):
        cell = Image.new("RGB", (room + width, height), BACKGROUND)
        start = 0
        for image in own:
            cell.paste(image, (start, (height - image.height) // 2))
            start += image.width + gap
        if own:
            draw, head, left, tip = ImageDraw.Draw(cell), arrow // 3, start + arrow // 6, start + arrow - arrow // 6
            shaft = [(left, middle), (tip - head // 2, middle)]
            draw.line(shaft, fill=FAINT, width=max(2, arrow // 12))
            rear = tip - head
            draw.polygon([(rear, middle - head * 2 // 3), (tip, middle), (rear, middle + head * 2 // 3)], fill=FAINT)
            start += arrow + gap
        cell.paste(Image.fromarray(to_pixels(result)), (start, 0))
        cells.append(as_tensor(cell))
    columns = max(1, round(math.sqrt(len(cells) * cells[0].shape[1] / cells[0].shape[2])))
    return as_tensor(grid(torch.stack(cells), columns=columns, captions=captions, padding=4 * gap))


def enlargement(height: int, width: int) -> int:
    """Whole factor that makes pixels visible: 1 if the shorter side is at least 128, else the one that makes it 192."""
    shorter = min(height, width)
    return 1 if shorter >= SMALL else math.ceil(VISIBLE / shorter)


def fit(images: Tensor, longest: int) -> Tensor:
    """Scales images [..., 3, H, W] for viewing: repeats pixels of small ones, reduces larger ones to `longest`."""
    height, width = images.shape[-2:]
    factor = enlargement(height, width)
    if factor > 1:
        return images.repeat_interleave(factor, -2).repeat_interleave(factor, -1)
    if max(height, width) <= longest:
        return images
    size = [max(1, round(side * longest / max(height, width))) for side in (height, width)]
    flat = images.reshape(-1, *images.shape[-3:]).float()
    reduced = torch.nn.functional.interpolate(flat, size=size, mode="bilinear", antialias=True)
    return reduced.reshape(*images.shape[:-2], *size)


def evenly(total: int, count: int) -> list[int]:
    """`count` of `total` places, spread evenly with the first and the last among them."""
    if count == 1:
        return [0]
    return [round(k * (total - 1) / (count - 1)) for k in range(count)]


def as_tensor(image: Image.Image) -> Float[Tensor, "3 height width"]:
    """Converts a PIL image to [3, H, W] float32 in [0, 1], as `to_pixels` takes it."""
    array = np.asarray(as_rgb(image), dtype=np.float32) / 255
    return torch.from_numpy(array).permute(2, 0, 1).contiguous()


def lettering(width: int) -> tuple[Font, int]:
    """The font of captions below something `width` pixels wide, and the height of a line."""
    font = ImageFont.load_default(size=min(max(12, round(width / 24)), 28))
    return font, math.ceil(font.size * 1.25) if isinstance(font, ImageFont.FreeTypeFont) else 13


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
    """[3, H, W] float in [0, 1] to 8-bit [H, W, 3], rounded to the nearest level. Raises ValueError: another shape or
    dtype, or values that are not finite or leave [0, 1]."""
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


def _as_tall(image: Tensor, height: int) -> Image.Image:
    """An image as tall as its neighbour, and at most twice as wide as that; whole factors repeat pixels."""
    drawn = Image.fromarray(to_pixels(image))
    ratio = min(height / drawn.height, 2 * height / drawn.width)
    size = (max(1, round(drawn.width * ratio)), max(1, round(drawn.height * ratio)))
    whole = ratio >= 1 and ratio == int(ratio)
    return drawn.resize(size, Image.Resampling.NEAREST if whole else Image.Resampling.LANCZOS)
