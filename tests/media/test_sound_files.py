"""Clips with sound: what is heard of the file is what was written."""

from __future__ import annotations

import math
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from flowrl.media.lossless import read_clip, save_lossless
from flowrl.media.sound_files import has_sound, read_sound
from flowrl.media.videos import save_mp4

RATE = 8000


def tone(seconds: float) -> torch.Tensor:
    time = torch.arange(round(seconds * RATE)) / RATE
    return 0.5 * (2 * math.pi * 440.0 * time).sin()


def test_a_clip_has_its_sound(tmp_path: Path) -> None:
    clip = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    sound = torch.stack([tone(1.0), torch.zeros(RATE)])
    path = save_mp4(clip, tmp_path / "clip.mp4", 8.0, (sound, RATE))
    assert has_sound(path)
    with av.open(str(path)) as container:
        track = container.streams.audio[0]
        assert (track.codec_context.name, track.rate, track.layout.name) == ("aac", 48000, "stereo")
        heard = np.concatenate([frame.to_ndarray() for frame in container.decode(track)], axis=1)
    with av.open(str(path)) as container:
        assert sum(1 for _ in container.decode(container.streams.video[0])) == 8
    assert heard.shape[1] / 48000 == pytest.approx(1, abs=0.05)
    middle = heard[:, 12000:36000]
    rms = np.sqrt((middle**2).mean(1))
    assert rms[0] == pytest.approx(0.5 / math.sqrt(2), rel=0.05)  # AAC is lossy
    assert rms[1] < 0.02
    assert abs(np.fft.rfft(middle[0])).argmax() * 48000 / middle.shape[1] == pytest.approx(440, abs=2)
    again = save_mp4(clip, tmp_path / "again.mp4", 8.0, (sound, RATE))
    assert again.read_bytes() == path.read_bytes()


def test_a_clip_that_is_scored_keeps_its_sound_to_a_level_of_sixteen_bits(tmp_path: Path) -> None:
    draws = torch.Generator().manual_seed(0)
    clip, sound = torch.rand(8, 3, 32, 32, generator=draws), 2 * torch.rand(2, 8190, generator=draws) - 1
    path = save_lossless(clip, tmp_path / "clip.mkv", 8.0, (sound, RATE))
    heard = read_sound(path)
    assert heard is not None
    assert (heard[0].shape, heard[1]) == (sound.shape, RATE)
    assert (heard[0] - sound).abs().max() < 1.5 / 32767
    assert torch.equal(read_clip(path), read_clip(save_lossless(clip, tmp_path / "silent.mkv", 8.0)))
    assert read_sound(tmp_path / "silent.mkv") is None
    again = save_lossless(clip, tmp_path / "again.mkv", 8.0, (sound, RATE))
    assert again.read_bytes() == path.read_bytes()
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValueError, match=r"the sound of .*clip\.mkv cannot be read"):
        read_sound(path)
    assert not has_sound(path)


def test_a_clip_without_sound_is_as_it_was(tmp_path: Path) -> None:
    clip = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert not has_sound(save_mp4(clip, tmp_path / "clip.mp4", 8.0))
    assert not has_sound(tmp_path / "none.mp4")


@pytest.mark.parametrize(
    "sound", [torch.zeros(3, 80), torch.zeros(80), torch.zeros(2, 0), torch.full((1, 80), math.nan)]
)
def test_no_sound_is_refused(sound: torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a sound (must have the shape \[channels, samples\]|holds NaN)"):
        save_mp4(torch.zeros(2, 3, 32, 32), tmp_path / "clip.mp4", 8.0, (sound, RATE))
    assert not (tmp_path / "clip.mp4").exists()
