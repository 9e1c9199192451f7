"""The sound of a clip as its AAC track. A sound is [channels, samples] float in [-1, 1]."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int16
from torch import Tensor

_LAYOUTS = {1: "mono", 2: "stereo"}
_AAC_RATE = 48_000  # every player takes it, and PyAV resamples on the way


def _sixteen_bits(sound: Float[Tensor, "channels samples"], rate: int) -> Int16[np.ndarray, "channels samples"]:
    """`round(32767 x)` of a sound, cut off at full scale.

    Raises:
        ValueError: another shape, no samples, NaN, or a rate that is not above 0.
    """
    if sound.ndim != 2 or len(sound) not in _LAYOUTS or sound.shape[1] == 0 or rate <= 0:
        raise ValueError(
            f"a sound must have the shape [channels, samples] with 1 or 2 channels and a rate above 0, got "
            f"{list(sound.shape)} at {rate}: put channels first"
        )
    sound = sound.detach().float().cpu()
    if not bool(torch.isfinite(sound).all()):
        raise ValueError("a sound holds NaN or infinity: the policy or the decoder has diverged")
    found: np.ndarray = (sound.clamp(-1, 1) * 32767).round().to(torch.int16).numpy()
    return found


def add_sound(container: Any, rate: int, channels: int) -> Any:
    """An AAC track for so many channels in an open container of PyAV, before anything is written."""
    track = container.add_stream("aac", rate=max(rate, _AAC_RATE))
    track.layout = _LAYOUTS.get(channels, "mono")
    track.codec_context.thread_count = 1
    return track


def write_sound(container: Any, track: Any, sound: Tensor, rate: int) -> None:
    """Encodes a sound into its track."""
    import av

    values = _sixteen_bits(sound, rate)
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(values), format="s16p", layout=_LAYOUTS[len(values)])
    frame.sample_rate = rate
    frame.pts = 0
    resampler = av.AudioResampler(format="fltp", layout=_LAYOUTS[len(values)], rate=track.rate, frame_size=1024)
    for part in (*resampler.resample(frame), *resampler.resample(None)):
        container.mux(track.encode(part))
    container.mux(track.encode(None))


def has_sound(clip: Path) -> bool:
    """Whether a clip can be read and has a track of sound."""
    import av

    try:
        with av.open(str(clip)) as container:
            return bool(container.streams.audio)
    except (OSError, ValueError):  # PyAV's errors are of these kinds
        return False
