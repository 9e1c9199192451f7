"""Clips for scoring: keeps 8-bit frames exactly (FFV1 in Matroska), and reads the frames of any clip.

H.264 (`flowrl.media.videos`) is for viewing: it halves the colour planes and smooths small differences between frames.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.media.images import to_pixels
from flowrl.media.sound_files import add_sound, write_sound
from flowrl.runtime.files import replacing
from flowrl.runtime.shapes import Float, UInt8

LOSSLESS, PLAYED = ".mkv", ".mp4"
CLIPS = (LOSSLESS, PLAYED, ".webm", ".mov", ".avi", ".gif")
"""Endings of clip files, also those of other programs."""


def save_lossless(video: Tensor, path: str | Path, fps: float, sound: tuple[Tensor, int] | None = None) -> Path:
    """Writes one video as FFV1 in RGB, rounded to 8 bits, whole or not at all; returns its path.

    Args:
        video: [F, 3, H, W] float in [0, 1].
        path: the file; missing folders are made.
        sound: [channels, samples] float in [-1, 1] and samples per second; it becomes a track of 16-bit PCM.
    """
    if video.ndim != 4 or not len(video):
        raise ValueError(f"a clip must have the shape [F, 3, H, W] with F >= 1, got {list(video.shape)}.")
    return write_clip(
        [to_pixels(x) for x in video], path, fps, sound, LOSSLESS, encoder="ffv1", form={"format": "bgr0"}
    )


def write_clip(
    frames: Sequence[UInt8[np.ndarray, " h w 3"]],
    path: str | Path,
    fps: float,
    sound: tuple[Tensor, int] | None,
    ending: str,
    *,
    encoder: str,
    form: Mapping[str, Any],
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Writes 8-bit frames by one thread, so that the same ones give the same bytes, whole or not at all.

    Args:
        ending: `LOSSLESS`, whose sound is exact, or `PLAYED`.
        encoder: PyAV's name of it.
        form: what frames are reformatted to.
        settings: attributes of the encoder's context.

    Raises ValueError: a rate that is not above 0.
    """
    import av

    if not math.isfinite(fps) or fps <= 0:
        raise ValueError(f"fps must be a number above 0, got {fps}: give the frames per second")
    options = {"fflags": "+bitexact", **({"movflags": "+faststart"} if ending == PLAYED else {})}
    with tempfile.TemporaryDirectory() as folder:  # headers are written at the end, which needs a real file
        whole = Path(folder) / f"clip{ending}"
        with av.open(str(whole), "w", options=options) as container:
            stream = container.add_stream(encoder, rate=Fraction(fps).limit_denominator(1001))
            assert isinstance(stream, av.VideoStream)
            stream.height, stream.width = frames[0].shape[:2]
            stream.pix_fmt = form["format"]
            for name, value in {"thread_count": 1, **settings}.items():
                setattr(stream.codec_context, name, value)
            exact = ending == LOSSLESS
            track = None if sound is None else add_sound(container, sound[1], len(sound[0]), exact=exact)
            for pixels in frames:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(**form)))
            container.mux(stream.encode(None))
            if track is not None and sound is not None:
                write_sound(container, track, *sound)
        with replacing(Path(path)) as out:
            out.write(whole.read_bytes())
    return Path(path)


def read_clip(path: str | Path) -> Float[Tensor, " f 3 h w"]:
    """All frames of a clip, float32 in [0, 1]. Raises ValueError: the file is missing, no video, or not whole."""
    import av

    try:
        with av.open(str(path)) as container:
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(container.streams.video[0])]
    except (av.FFmpegError, OSError, IndexError, ValueError) as error:
        raise ValueError(f"{path} is not a clip that can be read ({error}): draw it again or replace it.") from error
    if not frames:
        raise ValueError(f"{path} has no frames: draw it again or replace it.")
    return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).float() / 255


def read_rate(path: str | Path) -> float | None:
    """Frames per second; None if the file does not say."""
    import av

    with av.open(str(path)) as container:
        return float(container.streams.video[0].average_rate or 0) or None


def clip_size(path: str | Path) -> tuple[int, int, int] | None:
    """Width, height and number of frames without decoding; None if the file cannot be read."""
    import av

    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            count = sum(packet.size > 0 for packet in container.demux(stream))
            return stream.width, stream.height, count
    except (av.FFmpegError, OSError, IndexError, ValueError):
        return None


def is_clip(path: str | Path) -> bool:
    """Whether a file's name is that of a clip."""
    return Path(path).suffix.lower() in CLIPS
