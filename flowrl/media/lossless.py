"""Clips for scoring: keeps 8-bit frames exactly (FFV1 in Matroska), and reads the frames of any clip.

H.264 (`flowrl.media.videos`) is for viewing: it halves the colour planes and smooths small differences between frames.
"""

from __future__ import annotations

import math
import tempfile
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flowrl.media.images import to_pixels
from flowrl.media.sound_files import add_sound, write_sound
from flowrl.runtime.files import replacing
from flowrl.runtime.shapes import Float

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
    import av

    if video.ndim != 4 or not len(video):
        raise ValueError(f"a clip must have the shape [F, 3, H, W] with F >= 1, got {list(video.shape)}.")
    if not math.isfinite(fps) or fps <= 0:
        raise ValueError(f"fps must be a number above 0, got {fps}: give the frames per second.")
    frames = [to_pixels(frame) for frame in video]
    with tempfile.TemporaryDirectory() as folder:  # the length is written into the header at the end
        whole = Path(folder) / "clip.mkv"
        with av.open(str(whole), "w", format="matroska", options={"fflags": "+bitexact"}) as container:
            stream = container.add_stream("ffv1", rate=Fraction(fps).limit_denominator(1001))
            assert isinstance(stream, av.VideoStream)
            stream.height, stream.width = frames[0].shape[:2]
            stream.pix_fmt = "bgr0"
            stream.codec_context.thread_count = 1
            track = None if sound is None else add_sound(container, sound[1], len(sound[0]), exact=True)
            for pixels in frames:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format="bgr0")))
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
