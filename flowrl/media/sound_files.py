"""A clip's sound track: AAC for players, 16-bit PCM for scoring. A sound is [channels, samples] float in [-1, 1]."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.runtime.shapes import Float

_LAYOUTS = {1: "mono", 2: "stereo"}
_AAC_RATE = 48_000  # every player takes it, and PyAV resamples on the way
_EXACT = "pcm_s16le"


def add_sound(container: Any, rate: int, channels: int, *, exact: bool = False) -> Any:
    """Adds a track to an open PyAV container before anything is written: AAC, or `exact` PCM at its own rate."""
    track = container.add_stream(_EXACT if exact else "aac", rate=rate if exact else max(rate, _AAC_RATE))
    track.layout = _LAYOUTS.get(channels, "mono")
    track.codec_context.thread_count = 1
    return track


def write_sound(container: Any, track: Any, sound: Tensor, rate: int) -> None:
    """Encodes a sound, cut off at full scale, into its track. Raises ValueError: another shape, no samples, NaN, or a
    rate that is not above 0."""
    import av

    if sound.ndim != 2 or len(sound) not in _LAYOUTS or sound.shape[1] == 0 or rate <= 0:
        raise ValueError(
            f"a sound must have the shape [channels, samples] with 1 or 2 channels and a rate above 0, got "
            f"{list(sound.shape)} at {rate}: put channels first"
        )
    sound = sound.detach().float().cpu()
    if not bool(torch.isfinite(sound).all()):
        raise ValueError("a sound holds NaN or infinity: the policy or the decoder has diverged")
    values = (sound.clamp(-1, 1) * 32767).round().to(torch.int16).numpy()
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(values), format="s16p", layout=_LAYOUTS[len(values)])
    frame.sample_rate = rate
    frame.pts = 0
    form = "s16" if track.codec_context.name == _EXACT else "fltp"
    resampler = av.AudioResampler(format=form, layout=_LAYOUTS[len(values)], rate=track.rate, frame_size=1024)
    for part in (*resampler.resample(frame), *resampler.resample(None)):
        container.mux(track.encode(part))
    container.mux(track.encode(None))


def has_sound(clip: Path) -> bool:
    """Whether a clip can be read and has a track of sound."""
    import av

    try:
        with av.open(str(clip)) as container:
            return bool(container.streams.audio)
    except (av.FFmpegError, OSError, ValueError):
        return False


def read_sound(clip: Path) -> tuple[Float[Tensor, "channels samples"], int] | None:
    """The first sound track with all its channels, and its samples per second; None if there is none. Raises
    ValueError: the file cannot be read."""
    import av

    parts = []
    try:
        with av.open(str(clip)) as container:
            if not container.streams.audio:
                return None
            track = container.streams.audio[0]
            planes = av.AudioResampler(format="fltp", layout=track.layout, rate=track.rate)
            for frame in container.decode(track):
                parts += planes.resample(frame)
            rate, found = track.rate, [part.to_ndarray() for part in parts]
    except (av.FFmpegError, OSError, ValueError) as error:
        raise ValueError(f"the sound of {clip} cannot be read ({error}): draw it again or replace it.") from error
    return (torch.from_numpy(np.concatenate(found, axis=1)), rate) if found else None
