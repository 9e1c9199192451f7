"""LTX-2 against stock diffusers: tokens of video and sound in one state, two schedulers' steps as one, a vocoder."""

from __future__ import annotations

import json
import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
import video_family as video
import yaml
from family_sampling import check_published, check_targets, fresh_stock, load, start_noise
from flow_family import bare, edited, published
from rounding import assert_same_sum
from tiny_ltx2 import CHANNELS, OPTIONS, RATE, LTX2Pipeline, save_tiny_ltx2
from torch import Tensor
from train_command import train

from flowrl.cli import main
from flowrl.generation.folders import read_folder
from flowrl.generation.generate import draw_folder
from flowrl.generation.image_folder import check_needs, score_items
from flowrl.generation.models import Source
from flowrl.media.lossless import LOSSLESS, save_lossless
from flowrl.media.sound_files import has_sound, read_sound
from flowrl.pipelines.families.ltx2 import FAMILY
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.prompts.loading import Prompt
from flowrl.rewards.sound.loudness import Loudness

TOKENS, SOUND = 2 * 2 * 2, 28  # of 9 frames of 64 x 64 at 8 a second; 25 tokens of sound a second, rounded
SAMPLES = (4 * SOUND - 3) * 80  # a token of sound is 4 mel frames, the first one; of them the vocoder makes 80 samples


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_ltx2(tmp_path_factory.mktemp("tiny") / "ltx2")


tiny = partial(load, FAMILY, OPTIONS)
shared = cache(lambda folder, dtype: video.with_lora(tiny(folder, dtype)))


def stock_call(pipe: Any, pipeline: FamilyPipeline, scale: float, output: str, sound: float | None = None) -> Any:
    """What stock draws from the same noise with its plain guidance: ours of latents, else clips and sounds."""
    frames, _, height, width = pipeline.image_shape
    first, second = start_noise(pipeline).split([TOKENS, SOUND], dim=1)
    vae = pipe.audio_vae
    found = pipe(
        prompt=video.PROMPTS, negative_prompt=[""] * 2, latents=first, height=height, width=width, num_frames=frames,
        audio_latents=second * vae.latents_std + vae.latents_mean,  # stock normalises what it is given of sound
        guidance_scale=scale, audio_guidance_scale=sound or scale, frame_rate=pipeline.fps,
        num_inference_steps=video.STEPS, max_sequence_length=OPTIONS["max_sequence_length"], output_type=output,
        stg_scale=0.0, audio_stg_scale=0.0, modality_scale=1.0, audio_modality_scale=1.0, guidance_rescale=0.0,
        audio_guidance_rescale=0.0,
    )  # fmt: skip
    if output != "latent":
        return found.frames, found.audio
    clips = pipe._normalize_latents(found.frames, pipe.vae.latents_mean, pipe.vae.latents_std)
    sounds = found.audio.transpose(1, 2).flatten(2)
    return torch.cat([clips.flatten(2).transpose(1, 2), (sounds - vae.latents_mean) / vae.latents_std], dim=1)


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "sound"), [(1.0, None), (3.0, None), (3.0, 7.0)])
def test_ode_sampling_equals_the_stock_pipeline(folder: Path, scale: float, sound: float | None) -> None:
    pipeline, pipe = tiny(folder, sound_guidance_scale=sound), fresh_stock(LTX2Pipeline, folder)
    schedule = pipeline.schedule(video.STEPS, "diffusers")
    assert float(schedule.sigma[-2]) == pytest.approx(0.1, abs=1e-6)  # shift_terminal
    final = video.sample_ode(pipeline, schedule, scale)
    stock = stock_call(pipe, pipeline, scale, "latent", sound)
    assert_same_sum(final, stock)
    moved = (final - start_noise(pipeline)).abs()
    assert min(float(moved[:, :TOKENS].mean()), float(moved[:, TOKENS:].mean())) > 0.1  # the network did something
    clips, sounds = stock_call(pipe, pipeline, scale, "pt", sound)
    assert_same_sum(pipeline.decode(final), clips)
    assert_same_sum(pipeline.decode_sound(final), sounds)
    assert (clips.shape, sounds.shape) == ((2, 9, 3, 64, 64), (2, 2, SAMPLES))
    assert float(sounds.std()) > 1e-3
    assert pipeline.sound_rate == RATE
    assert SAMPLES / RATE == pytest.approx(9 / 8, abs=0.05)  # as long as the clip


@pytest.mark.slow
def test_a_state_has_a_part_of_each_kind(folder: Path) -> None:
    pipeline = tiny(folder)
    x = start_noise(pipeline)
    found = [x[region] for region in pipeline.parts.values()]
    assert list(pipeline.parts) == ["video", "sound"]
    assert [part.shape[1] for part in found] == [TOKENS, SOUND]
    assert torch.equal(torch.cat(found, dim=1), x)


@pytest.mark.slow
def test_each_kind_reads_the_other_and_the_frame_rate(folder: Path) -> None:
    pipeline = tiny(folder)
    cond, noise = pipeline.encode(video.PROMPTS), start_noise(pipeline)
    time = torch.full((2,), 500.0)
    with torch.no_grad():
        before = pipeline.network(noise, time, cond)
        for own, other in ((slice(None, TOKENS), slice(TOKENS, None)), (slice(TOKENS, None), slice(None, TOKENS))):
            changed = noise.clone()
            changed[:, own] *= 0.5
            after = pipeline.network(changed, time, cond)
            assert (after - before)[:, other].abs().max() > 1e-5
        slower = tiny(folder, fps=25.0)
        assert slower.latent_shape == (TOKENS + 9, CHANNELS)
        cut = noise[:, : TOKENS + 9]
        assert (slower.network(cut, time, cond) - tiny(folder, fps=26.0).network(cut, time, cond)).abs().max() > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "dtype"), [(1.0, torch.float32), (3.0, torch.bfloat16)], ids=str)
def test_replayed_log_probs_equal_the_rollouts(folder: Path, scale: float, dtype: torch.dtype) -> None:
    pipeline, policy = shared(folder, dtype)
    video.check_ratio_is_one(pipeline, policy, scale)


@pytest.mark.slow
def test_stock_loads_the_saved_lora(folder: Path, tmp_path: Path) -> None:
    pipe = fresh_stock(LTX2Pipeline, folder)
    video.check_stock_loads_the_saved_lora(*shared(folder, torch.float32), tmp_path, pipe, stock_call, 3.0)


@pytest.mark.slow
def test_prompts_are_embedded_by_themselves_and_the_connectors_go_with_the_encoder(folder: Path) -> None:
    pipeline = tiny(folder)
    found = video.check_prompts_are_embedded_by_themselves(pipeline, tiny(folder))
    assert bool((found["mask"] == 1).all())  # registers stand where padding stood
    assert (found["embeds"] - found["sound_embeds"]).abs().max() > 1e-3
    assert pipeline.pipe.connectors is None


@pytest.mark.slow
def test_clips_and_sounds_are_decoded_in_slices(folder: Path) -> None:
    pipeline, sliced = tiny(folder, vae_slice=3), tiny(folder, vae_slice=1)
    assert (pipeline.grid_shape, pipeline.latent_shape) == ((CHANNELS, 2, 2, 2), (TOKENS + SOUND, CHANNELS))
    latents = start_noise(pipeline, 3)
    assert_same_sum(sliced.decode(latents), pipeline.decode(latents))
    sounds: Tensor = pipeline.decode_sound(latents)
    assert_same_sum(sliced.decode_sound(latents), sounds)
    assert (sounds.dtype, float(sounds.abs().max()) <= 1) == (torch.float32, True)
    leaf = latents.requires_grad_()
    sliced.decode(leaf, gradient=True).square().sum().backward()
    assert leaf.grad is not None
    assert bool((leaf.grad[:, :TOKENS].abs().amax(2) > 0).all())
    other = pipeline.resized(32, 96)
    assert (other.latent_shape, other.image_shape) == ((2 * 1 * 3 + SOUND, CHANNELS), (9, 3, 32, 96))


def test_libraries_that_stock_cannot_be_imported_with_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrl.pipelines.families.ltx2.version_of", lambda package: "5.9.0")
    with pytest.raises(ValueError, match=r"stock LTX-2 needs transformers 5\.10\.1 or newer, and 5\.9\.0 is installed"):
        FAMILY.check_options({})


def test_what_the_family_cannot_do_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"num_frames \(5\) must be 1 plus a multiple of 8"):
        tiny(folder, num_frames=5)
    with pytest.raises(ValueError, match=r"max_sequence_length \(20\) must be a multiple of 8 for "):
        tiny(folder, max_sequence_length=20)
    with pytest.raises(ValueError, match=r"sound_guidance_scale must be a finite number or null, got inf"):
        tiny(folder, sound_guidance_scale=float("inf"))
    with pytest.raises(ValueError, match=r"clips cannot be turned into latents of .*, which hold their sound too"):
        tiny(folder).encode_images(torch.zeros(1, 9, 3, 64, 64))
    copied = bare(folder, tmp_path)
    check_targets(FAMILY, copied, "attn1.to_w")
    edited(copied / "transformer" / "config.json", audio_in_channels=4)
    with pytest.raises(ValueError, match=r"8 channels of video and 4 of sound: this family takes"):
        FAMILY.check(str(copied), None)


@pytest.mark.slow
def test_training_on_what_is_heard(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One iteration from the command to the report, which shows frames and has clips that are heard."""
    (tmp_path / "prompts.txt").write_text("a red fox\na blue cat\n")
    config: dict[str, Any] = {
        "num_iterations": 1, "prompts_per_step": 2, "group_size": 2, "eval_every": 1, "progress": False,
        "out": str(tmp_path / "run"), "threads": 1,
        "pipeline": {"model": str(folder), "dtype": "float32", "device": "cpu", **OPTIONS,
                     "options": {"sound_guidance_scale": 3.0}},
        "policy": {"lora_rank": 2},
        "sampler": {"kernel": "flow_sde", "noise_level": 0.3, "num_steps": 3, "guidance_scale": 2.0,
                    "sde_window_range": [0, 2]},
        "prompts": {"train": str(tmp_path / "prompts.txt"), "eval": str(tmp_path / "prompts.txt")},
        "rewards": [{"name": "loudness"}, {"name": "sound_sync", "weight": 0.5}],
        "eval": {"num_images": 2}, "logging": {"tensorboard": False},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    assert train(str(tmp_path / "run.yaml"), []) == 0
    capsys.readouterr()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = next(row for row in rows if "ratio_first_deviation" in row)
    assert (trained["ratio_first_deviation"], trained["invalid_ratio"]) == (0, 0)
    assert trained["grad_norm"] > 0
    assert -120 < trained["reward/loudness/level"] < 0
    assert any("eval/reward/sound_sync" in row for row in rows)
    clip = tmp_path / "run" / "samples" / "iteration_000001" / "0000.mp4"
    with av.open(str(clip)) as container:
        (film, track) = (container.streams.video[0], container.streams.audio[0])
        assert (film.frames, track.layout.name) == (9, "stereo")
        heard = np.concatenate([frame.to_ndarray() for frame in container.decode(track)], axis=1)
    assert heard.shape[1] / track.rate == pytest.approx(SAMPLES / RATE, abs=0.1)
    assert heard.std() > 1e-4
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Clips with sound wait to be started." in page
    assert page.count('<video src="data:video/mp4') == 4  # before and after
    assert "muted autoplay" not in page
    assert "frames after training: a red fox" in page


@pytest.mark.slow
def test_drawn_clips_are_heard_and_scored_by_what_is_heard(folder: Path, tmp_path: Path) -> None:
    words = ["--height", "64", "--width", "64", "--steps", "2", "--guidance", "1"]
    given = ["sample", str(folder), "--prompt", "a red fox", "--seeds", "0", *words, "--out", str(tmp_path / "drawn")]
    assert main(given) == 0
    assert has_sound(tmp_path / "drawn" / "000_seed0.mp4")
    source = Source(
        model=str(folder), lora=None, num_steps=2, guidance_scale=1.0, grid="diffusers", max_sequence_length=24,
        dtype="float32", family="ltx2", options={"height": 64, "width": 64, "num_frames": 9, "fps": 8.0},
    )  # fmt: skip
    prompts, clips = [Prompt(text=text, metadata={"prompt": text}) for text in video.PROMPTS], tmp_path / "clips"
    draw_folder(source, prompts, clips, label="ltx2", samples=1, seed=3, batch_size=2, device="cpu", show=False,
                suffix=LOSSLESS)  # fmt: skip
    items = read_folder(clips, (LOSSLESS,))
    sounds = [read_sound(item.path) for item in items]
    assert [None if sound is None else (sound[0].shape, sound[1]) for sound in sounds] == 2 * [((2, SAMPLES), RATE)]
    reward = Loudness().build(torch.device("cpu"))
    scores = score_items(reward, items, key="loudness", batch_size=2)
    assert scores.errors == [None, None]
    rms = [sound[0].double().square().mean().sqrt().item() for sound in sounds if sound is not None]
    assert scores.parts["level"] == pytest.approx([20 * math.log10(value) for value in rms], abs=0.01)
    save_lossless(torch.zeros(9, 3, 64, 64), items[1].path, 8.0)
    with pytest.raises(ValueError, match=r"'loudness' judges sounds, and 00001/samples/00000\.mkv has none"):
        check_needs(reward, items, key="loudness", prompts_given=True)


@pytest.mark.slow
def test_published_size() -> None:
    """18.9 billion parameters ("19B"), and LoRA targets that bind there; a second of sound is 25 tokens."""
    (name,) = published(FAMILY)
    check_published(FAMILY, name, 18.9e9, rel=0.005)
    size = FAMILY.planned_size(name, {})
    assert size is not None
    call = FAMILY.meta_call(name, size, 1024)
    assert (call["hidden_states"].shape, call["audio_hidden_states"].shape) == ((1, 16 * 16 * 24, 128), (1, 126, 128))
