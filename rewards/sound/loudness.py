"""Rewards on the sound of videos: how loud it is, whether it goes with what moves, and CLAP of sound and prompt.

CLAP: Wu et al. 2023, arXiv 2211.06687, in the classes of transformers. A sound is averaged over its channels, resampled
to the checkpoint's rate, and cut off after as many seconds as it reads; a shorter one is repeated, as published.

Letters: B videos of F frames, C channels of N samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from flowrl.config.sections import positive
from flowrl.rewards.base import FunctionReward, Model, Reward, RewardInputs, RewardOutput, tensor_output
from flowrl.rewards.base.frames import videos_of
from flowrl.rewards.networks.pretrained import OneModel, check_model, fingerprint, load_network, load_processor
from flowrl.runtime.shapes import Float

_FLOOR = 1e-6  # amplitude below which nothing is heard: -120 dB
_WINDOW = 0.05  # seconds of a window that is loud or silent, and of a spectrum
_SILENT = -60.0  # dB


@dataclass(frozen=True, kw_only=True, slots=True)
class Loudness:
    """How near a sound's level is to a target, in [0, 1].

        max(0, 1 - |level - target| / width),    level = 20 log10(rms) dB of full scale

    with the root of the mean square over channels and samples, no weighting of frequencies (so no LUFS). Parts:
    `level`, `silence`, the share of windows of 50 ms below -60 dB, and `flatness`, the geometric by the arithmetic mean
    of a window's power spectrum, averaged over the windows that are not silent: near 0 of tones, 0.56 of white noise.
    """

    target: float = -20.0
    """Level in dB of full scale, below 0."""
    width: float = 20.0
    """Distance from the target, in decibels, at which the value reaches 0."""
    models: ClassVar[tuple[Model, ...]] = ()
    judges: ClassVar[tuple[str, ...]] = ("sounds",)

    def __post_init__(self) -> None:
        positive(self, "width")
        if not -120 <= self.target <= 0:
            raise ValueError(f"target is a level in dB of full scale from -120 to 0, such as -20, got {self.target}.")

    def build(self, device: torch.device) -> Reward:
        """Makes the reward; it computes on the device of the sounds."""

        def loudness(inputs: RewardInputs) -> RewardOutput:
            sounds, rate = sounds_of(inputs, owner="reward 'loudness'")
            found = level(sounds)
            near = (1 - (found - self.target).abs() / self.width).clamp(min=0)
            length, textures = min(max(8, round(_WINDOW * rate)), sounds.shape[2]), []
            for sound in sounds:
                windows = sound.double().unfold(1, length, length).transpose(0, 1)  # [windows, c, length]
                silent = level(windows) < _SILENT
                power = torch.fft.rfft(windows[~silent], dim=-1).abs().square().mean(1)[:, 1:]
                power = power.clamp(min=torch.finfo(power.dtype).tiny)
                mean = (power.log().mean(1).exp() / power.mean(1)).mean()  # NaN of no windows
                textures.append(torch.stack([silent.double().mean(), mean]).float())
            silence, flatness = torch.stack(textures).unbind(1)
            values = torch.where(torch.isfinite(sounds).flatten(1).all(1), near, math.nan).float()
            return tensor_output(values, {"level": found.float(), "silence": silence, "flatness": flatness})

        version = f"loudness:target-{self.target:g}:width-{self.width:g}"
        return FunctionReward(name="loudness", score=loudness, needs=frozenset({"sounds"}), version=version)


@dataclass(frozen=True, kw_only=True, slots=True)
class SoundSync:
    """Whether it sounds while it moves: a correlation in [-1, 1].

    Pearson's, over the steps from a frame to the next, of two series: the mean change of a pixel, and the root mean
    square of the sound between these frames. With `lag` the best one of sounds that come up to so many frames later or
    earlier. If either series is constant (nothing moves, or silence) it is 0. It knows nothing of what is seen and
    heard: applause over applauding hands and music that swells with a pan both please it.
    """

    lag: int = 0
    """Frames that a sound may come too late or too early."""
    models: ClassVar[tuple[Model, ...]] = ()
    judges: ClassVar[tuple[str, ...]] = ("sounds",)

    def __post_init__(self) -> None:
        if not 0 <= self.lag <= 1000:
            raise ValueError(f"lag is a number of frames from 0 to 1000, got {self.lag}.")

    def build(self, device: torch.device) -> Reward:
        """Makes the reward; it computes on the device of the videos."""

        def sync(inputs: RewardInputs) -> RewardOutput:
            owner = "reward 'sound_sync'"
            videos, (sounds, rate) = videos_of(inputs, owner=owner, at_least=4), sounds_of(inputs, owner=owner)
            if inputs.fps is None or self.lag > videos.shape[1] - 4:
                raise ValueError(
                    f"{owner} with lag {self.lag} needs videos of at least {self.lag + 4} frames: make longer ones."
                )
            steps = videos.shape[1] - 1
            edges = [*pairwise(round(step * rate / inputs.fps) for step in range(steps + 1))]
            found = []
            for video, sound in zip(videos, sounds, strict=True):  # one at a time: float64 takes twice its memory
                moved = video.diff(dim=0).abs().flatten(1).double().mean(1)
                # The root mean square of the sound between every frame and the next; 0 after its end.
                power = sound.double().square().mean(0)
                parts = [power[first:last] for first, last in edges]
                heard = torch.stack([part.mean().sqrt() if len(part) else power.new_zeros(()) for part in parts])
                shifts = [
                    correlation(moved[max(0, -by) : steps - max(0, by)], heard[max(0, by) : steps - max(0, -by)])
                    for by in range(-self.lag, self.lag + 1)
                ]
                best = torch.stack(shifts).max()
                found.append(torch.where(torch.isfinite(moved).all() & torch.isfinite(heard).all(), best, math.nan))
            return tensor_output(torch.stack(found).float())

        version = f"sound_sync:lag-{self.lag}"
        return FunctionReward(name="sound_sync", score=sync, needs=frozenset({"videos", "sounds"}), version=version)


def level(sound: Float[Tensor, " *b c n"]) -> Float[Tensor, " *b"]:
    """Level in dB of full scale over channels and samples; -120 at least. A sine of amplitude 1 has -3.01."""
    return 20 * sound.double().square().mean((-2, -1)).sqrt().clamp(min=_FLOOR).log10()


def correlation(first: Float[Tensor, " n"], second: Float[Tensor, " n"]) -> Float[Tensor, ""]:
    """Pearson's correlation; 0 if a series does not vary, or has fewer than 3 numbers."""
    if len(first) < 3:
        return first.new_zeros(())
    a, b = first - first.mean(), second - second.mean()
    size = a.norm() * b.norm()
    small = 1e-9 * (first.norm() * second.norm()).clamp(min=torch.finfo(size.dtype).tiny)
    return torch.where(size > small, (a * b).sum() / size.clamp(min=torch.finfo(size.dtype).tiny), 0.0)


def sounds_of(inputs: RewardInputs, *, owner: str) -> tuple[Float[Tensor, " b c n"], int]:
    """The sounds to score, and their samples per second."""
    if inputs.sounds is None or inputs.sound_rate is None:
        raise ValueError(
            f"{owner} scores sounds, and there are none: take a pipeline whose videos have sound, such as ltx2, or "
            "clips that have; sounds are not decoded with gradient or sent to servers."
        )
    return inputs.sounds, inputs.sound_rate


DEFAULT_MODEL = "laion/clap-htsat-unfused"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClapScore(OneModel):
    """CLAP's cosine of sound and prompt, in float32."""

    judges: ClassVar[tuple[str, ...]] = ("sounds",)

    model: str = DEFAULT_MODEL
    """A CLAP of transformers with tokenizer and feature extractor, a local folder or an id on the hub."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""

    def __post_init__(self) -> None:
        check_model(self.model, what="CLAP")

    def build(self, device: torch.device) -> Reward:
        """Loads the model."""
        from transformers import ClapModel, ClapProcessor

        given: dict[str, Any] = {"revision": self.revision, "owner": "reward 'clap_score'", "what": "CLAP"}
        network = load_network(ClapModel, self.model, device=device, **given)
        processor = load_processor(ClapProcessor, self.model, **given)
        ends = [half.linear2.weight for half in (network.audio_projection, network.text_projection)]

        @torch.no_grad()
        def score(inputs: RewardInputs) -> RewardOutput:
            sounds, rate = sounds_of(inputs, owner="reward 'clap_score'")
            finite = torch.isfinite(sounds).flatten(1).all(1)
            waves = prepare(torch.where(finite[:, None, None], sounds, 0.0), rate, processor.feature_extractor)
            extractor = processor.feature_extractor
            features = extractor(waves, sampling_rate=extractor.sampling_rate, return_tensors="pt").to(device)
            longest = network.config.text_config.max_position_embeddings - 2  # RoBERTa counts positions from 2
            text = processor.tokenizer(
                inputs.prompts, padding=True, truncation=True, max_length=longest, return_tensors="pt"
            )
            with torch.autocast(device.type, enabled=False):
                heard = network.get_audio_features(**features).pooler_output.float()
                said = network.get_text_features(**text.to(device)).pooler_output.float()
                cosine = torch.nn.functional.cosine_similarity(heard, said).to(inputs.images.device)
            return tensor_output(torch.where(finite.to(cosine.device), cosine, math.nan))

        version = f"clap_score:{self.model}:{fingerprint(ends)}:float32"
        return FunctionReward(name="clap_score", score=score, needs=frozenset({"prompts", "sounds"}), version=version)


def prepare(sounds: Tensor, rate: int, extractor: Any) -> list[np.ndarray]:
    """Sounds `[b, channels, samples]` in one channel at the extractor's rate, cut where it would pick at random."""
    from scipy.signal import resample_poly  # half a second, and most options are only checked

    mono = sounds.detach().float().mean(1).cpu().numpy()
    common = math.gcd(rate, extractor.sampling_rate)
    resampled = resample_poly(mono, extractor.sampling_rate // common, rate // common, axis=1)
    return [np.asarray(wave, dtype=np.float32) for wave in resampled[:, : extractor.nb_max_samples]]
