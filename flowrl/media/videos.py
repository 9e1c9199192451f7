"""Videos to files: H.264 clips that any browser plays, and contact sheets for paper and terminals.

A video is [F, 3, H, W] float in [0, 1], frames first, as the pipelines decode it. Files appear whole or not at all.

Letters: B videos, F frames, [H, W] their size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from flowrl.media.images import BACKGROUND, FAINT, as_tensor, enlargement, evenly, fit, grid, lettering, to_pixels
from flowrl.media.lossless import PLAYED, write_clip
from flowrl.runtime.shapes import Float

ENCODERS = ("libx264", "libopenh264", "h264_videotoolbox", "h264_mf")
"""H.264 encoders that PyAV may have, best first, without those that need a certain GPU."""
ROW_WIDTH = 1600  # a row of a contact sheet is about this wide at most
FRAMES = 5  # frames of a video in such a row, at most
GAP = 4  # pixels between the frames of a row
MARGIN = 16  # pixels around a row and its caption
BT709 = 1  # the number of this colour standard in every H.264 field, and in swscale
LIMITED, FULL = 1, 2  # colour ranges 16 to 235 and 0 to 255


def save_mp4(video: Tensor | np.ndarray, path: str | Path, fps: float, sound: tuple[Tensor, int] | None = None) -> Path:
    """Write one video as H.264 in an MP4 (yuv420p, BT.709) that plays while it still loads; returns its path.

    One thread encodes, so the same frames give the same bytes with the same version of the encoder. Odd sides are
    padded by repeating the last row or column, since the colour planes have half the size. A video whose shorter side
    is below 128 is enlarged to at least 192, by whole factors, so that people can see it.

    Args:
        video: [F, 3, H, W] float in [0, 1].
        path: the file; missing folders are made.
        sound: [channels, samples] float in [-1, 1] and samples per second; it becomes an AAC track.

    Raises ValueError: another shape or range, a rate that is not above 0, or a PyAV without an H.264 encoder.
    """
    import av

    _check(video)
    scale = enlargement(*video.shape[-2:])
    frames = [to_pixels(frame).repeat(scale, axis=0).repeat(scale, axis=1) for frame in video]
    height, width = frames[0].shape[:2]
    frames = [np.pad(frame, [(0, height % 2), (0, width % 2), (0, 0)], mode="edge") for frame in frames]
    name = next((name for name in ENCODERS if name in av.codecs_available), None)
    if name is None:
        raise ValueError(
            f"this PyAV {av.__version__} was built without an H.264 encoder (looked for {', '.join(ENCODERS)}): "
            "install the wheel of PyPI, `pip install --force-reinstall --only-binary av av`"
        )
    settings: dict[str, Any] = dict.fromkeys(("color_primaries", "color_trc", "colorspace"), BT709)
    settings["color_range"] = LIMITED
    if name == "libx264":
        # No B-frames: with them equal frames did not always give equal bytes, even on one thread.
        settings["options"] = {"crf": "16", "preset": "medium", "bf": "0"}
    elif math.isfinite(fps):  # or it is refused below; no constant quality: a quarter of a bit per pixel is generous
        settings["bit_rate"] = max(200_000, int(frames[0].shape[0] * frames[0].shape[1] * fps / 4))
    form = {"format": "yuv420p", "dst_colorspace": BT709, "src_color_range": FULL, "dst_color_range": LIMITED}
    return write_clip(frames, path, fps, sound, PLAYED, encoder=name, form=form, settings=settings)


def contact_sheet(
    videos: Tensor | Sequence[Tensor], captions: Sequence[str] | None = None
) -> Float[Tensor, "3 height width"]:
    """Videos as one image: a row for each, its frames from left to right, their numbers on top, its caption below.

    Args:
        videos: [B, F, 3, H, W] float in [0, 1], or a list of [F, 3, H, W] of one size.
    """
    if len(videos) == 0:
        raise ValueError("a contact sheet needs at least one video, got none")
    rows = [contact_row(video) for video in videos]
    body = as_tensor(grid(torch.stack(rows), columns=1, captions=captions, padding=MARGIN))
    places = _places(videos[0])
    column = (rows[0].shape[-1] + GAP) / len(places)
    font, line = lettering(round(2.5 * column))
    heading = Image.new("RGB", (body.shape[-1], line + MARGIN // 2), BACKGROUND)
    draw = ImageDraw.Draw(heading)
    for number, place in enumerate(places):
        text = f"frame {place + 1}"
        draw.text((round(MARGIN + number * column), MARGIN // 2), text, fill=FAINT, font=font)
    return torch.cat([as_tensor(heading), body], dim=-2)


def contact_row(video: Tensor) -> Float[Tensor, "3 height width"]:
    """`FRAMES` frames of a video [F, 3, H, W] side by side, spread evenly, or all. Raises ValueError: another shape."""
    _check(video)
    shown = fit(video[_places(video)].detach().float().cpu(), longest=ROW_WIDTH // FRAMES)
    gap = torch.ones(3, shown.shape[-2], GAP)
    return torch.cat([part for frame in shown for part in (frame, gap)][:-1], dim=-1)


def _places(video: Tensor) -> list[int]:
    return evenly(len(video), min(FRAMES, len(video)))


def _check(video: Tensor | np.ndarray) -> None:
    if video.ndim != 4 or video.shape[1] != 3 or 0 in video.shape:
        raise ValueError(
            f"a video must have the shape [F, 3, H, W] with F >= 1, got {list(video.shape)}: put frames first"
        )
