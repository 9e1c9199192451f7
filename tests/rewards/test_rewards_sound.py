"""Rewards on sounds: levels and correlations in closed form, CLAP on a tiny random model."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import ClapConfig, ClapFeatureExtractor, ClapModel, ClapProcessor, RobertaTokenizer

from flowrl.rewards import RewardInputs, build_reward, reward_options
from flowrl.rewards.base.user_file import copy_inputs
from flowrl.runtime.randomness import counter_normal

RATE, FPS, FRAMES = 8000, 8.0, 9


def inputs_of(sounds: Tensor | None, videos: Tensor | None = None) -> RewardInputs:
    batch = len(sounds) if sounds is not None else 2
    clips = torch.zeros(batch, FRAMES, 3, 8, 8) if videos is None else videos
    return RewardInputs(
        prompts=["a dog barks", "rain on a roof", "silence"][:batch], images=clips[:, 0], metadata=[{}] * batch,
        group_ids=torch.zeros(batch, dtype=torch.int64), sample_ids=torch.arange(batch), videos=clips, fps=FPS,
        sounds=sounds, sound_rate=None if sounds is None else RATE,
    )  # fmt: skip


def tone(amplitude: float, seconds: float = 1.125, frequency: float = 400.0) -> Tensor:
    time = torch.arange(round(seconds * RATE), dtype=torch.float64) / RATE
    return (amplitude * (2 * math.pi * frequency * time).sin()).float().expand(2, -1)


def test_loudness_is_the_level_beside_a_target() -> None:
    noise = 0.1 * counter_normal((2, 9000), "noise")
    found = build_reward("loudness")(inputs_of(torch.stack([tone(1.0), tone(0.01), noise])))
    level = [20 * math.log10(1 / math.sqrt(2)), 20 * math.log10(0.01 / math.sqrt(2)), -20.0]
    torch.testing.assert_close(found.parts["level"], torch.tensor(level), atol=0.1, rtol=0)  # of 18000 numbers
    expected = torch.tensor([1 - abs(x + 20) / 20 for x in level]).clamp(min=0)
    torch.testing.assert_close(found.values, expected, atol=0.006, rtol=0)
    flat = found.parts["flatness"]
    assert float(flat[0]) < 1e-3
    assert float(flat[2]) == pytest.approx(0.75, abs=0.03)  # exp(digamma(2)) / 2 = 0.763 of two channels' mean power
    assert found.parts["silence"].tolist() == [0, 0, 0]


def test_silence_is_far_from_every_target_and_nan_is_no_number() -> None:
    half = tone(0.5).clone()
    half[:, 4500:] = 0
    broken = tone(0.5).clone()
    broken[0, 5] = math.nan
    found = build_reward("loudness")(inputs_of(torch.stack([torch.zeros(2, 9000), half, broken])))
    assert found.valid.tolist() == [True, True, False]
    assert float(found.values[0]) == 0
    assert float(found.parts["level"][0]) == pytest.approx(-120)
    assert float(found.parts["silence"][1]) == pytest.approx(0.5, abs=0.05)
    assert bool(found.parts["flatness"][0].isnan())  # no window that could be flat


def moving(change: list[float]) -> Tensor:
    """A clip whose pixels change by so much from frame to frame."""
    value = torch.tensor([0.0, *change]).cumsum(0)
    return value[:, None, None, None].expand(-1, 3, 8, 8)


def heard(levels: list[float]) -> Tensor:
    """A sound of so large a constant square between frames."""
    return torch.tensor(levels).repeat_interleave(round(RATE / FPS)).expand(2, -1)


def test_sync_is_the_correlation_of_motion_and_envelope() -> None:
    change = [0.0, 0.1, 0.0, 0.05, 0.2, 0.0, 0.0, 0.1]
    against = [0.2 - x for x in change]
    other = [0.3, 0.1, 0.2, 0.9, 0.4, 0.5, 0.0, 0.2]
    clips = torch.stack([moving(change)] * 3)
    found = build_reward("sound_sync")(inputs_of(torch.stack([heard(x) for x in (change, against, other)]), clips))
    expected = [1.0, -1.0, float(np.corrcoef(change, other)[0, 1])]
    torch.testing.assert_close(found.values, torch.tensor(expected), atol=1e-5, rtol=0)
    late = torch.stack([heard([0.0, *change[:-1]])] * 3)
    exact, shifted = (build_reward("sound_sync", options={"lag": lag})(inputs_of(late, clips)) for lag in (0, 1))
    assert float(exact.values[0]) < 0.5
    assert float(shifted.values[0]) == pytest.approx(1, abs=1e-5)
    still = build_reward("sound_sync")(inputs_of(torch.stack([heard(change), torch.zeros(2, 8000)]), clips[:2] * 0))
    assert still.values.tolist() == [0, 0]


def test_sounds_go_with_their_samples() -> None:
    given = inputs_of(torch.stack([tone(1.0), tone(0.1)]))
    assert given.sounds is not None
    assert torch.equal(given[[1]].sounds, given.sounds[1:])  # type: ignore[arg-type]
    mine = copy_inputs(given).sounds
    assert mine is not None
    assert mine.data_ptr() != given.sounds.data_ptr()
    with pytest.raises(ValueError, match="every field needs one entry for each of the 2 images"):
        replace(given, sounds=given.sounds[:1])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("loudness", {"target": 3.0}, r"target is a level in dB of full scale from -120 to 0"),
        ("loudness", {"width": 0.0}, r"width must be above 0, got 0"),
        ("sound_sync", {"lag": -1}, r"lag is a number of frames from 0 to 1000, got -1"),
        ("clap_score", {"model": "./none"}, r"there is no folder './none'.* CLAP model"),
    ],
)
def test_bad_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reward_options(name, options)


def test_a_silent_family_is_told_so() -> None:
    for name in ("loudness", "sound_sync"):
        with pytest.raises(ValueError, match=rf"reward '{name}' scores sounds, and there are none: take a pipeline"):
            build_reward(name)(inputs_of(None))


# ---- CLAP ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clap(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLAP of a few thousand weights with its processor."""
    folder = tmp_path_factory.mktemp("tiny") / "clap"
    letters = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *"abcdefghijklmnopqrstuvwxyz", "Ġ"]
    tokenizer = RobertaTokenizer(vocab={piece: i for i, piece in enumerate(letters)}, merges=[])
    text = {
        "vocab_size": len(letters), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 16, "max_position_embeddings": 66, "projection_dim": 8,
    }  # fmt: skip
    audio = {
        "spec_size": 64, "num_mel_bins": 16, "patch_size": 4, "patch_stride": [4, 4], "patch_embeds_hidden_size": 16,
        "hidden_size": 16, "depths": [1], "num_attention_heads": [2], "window_size": 4, "projection_dim": 8,
        "num_classes": 4, "mlp_ratio": 1.0, "enable_fusion": False,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ClapModel(ClapConfig(text_config=text, audio_config=audio, projection_dim=8))
    extractor = ClapFeatureExtractor(
        feature_size=16, sampling_rate=16000, hop_length=160, max_length_s=2, fft_window_size=512, frequency_max=7000,
        truncation="rand_trunc",
    )  # fmt: skip
    model.save_pretrained(folder)
    ClapProcessor(extractor, tokenizer).save_pretrained(folder)
    return folder


def test_clap_is_the_logit_of_stock_by_its_scale(clap: Path) -> None:
    reward = build_reward("clap_score", options={"model": str(clap)})
    assert reward.needs == {"prompts", "sounds"}
    seconds = 1.0
    sounds = torch.stack([tone(0.3, seconds), tone(0.3, seconds, 1500.0), 0.2 * counter_normal((2, RATE), "rain")])
    given = inputs_of(sounds)
    found = reward(given)
    model, processor = ClapModel.from_pretrained(clap), ClapProcessor.from_pretrained(clap)
    mono = sounds.mean(1).numpy()
    from scipy.signal import resample_poly

    doubled = [resample_poly(wave, 2, 1).astype(np.float32) for wave in mono]
    features = processor.feature_extractor(doubled, sampling_rate=16000, return_tensors="pt")
    text = processor.tokenizer(given.prompts, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**features, **text).logits_per_audio
    torch.testing.assert_close(found.values, (logits / model.logit_scale_a.exp()).diagonal(), atol=1e-5, rtol=0)
    assert found.values.std() > 1e-4
    alone = torch.cat([reward(given[[i]]).values for i in range(3)])
    torch.testing.assert_close(alone, found.values, atol=1e-5, rtol=0)


def test_clap_hears_the_start_of_a_long_sound_and_no_nan(clap: Path) -> None:
    reward = build_reward("clap_score", options={"model": str(clap)})
    long = torch.stack([tone(0.3, 5.0), tone(0.3, 5.0)])
    long[1, :, 3 * RATE :] = math.nan
    found = reward(inputs_of(long))
    assert found.valid.tolist() == [True, False]
    assert torch.equal(reward(inputs_of(long)).values[:1], found.values[:1])  # nothing is drawn
