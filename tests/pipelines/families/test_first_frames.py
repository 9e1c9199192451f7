"""Families that draw from a first frame, against stock's image-to-video classes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tiny_hunyuan_video15
import tiny_ltx2
import tiny_sana_video
import torch
import video_family as video
from family_sampling import adapted, fresh_stock, idle_tensors, load, replayed, start_noise
from PIL import Image
from rounding import assert_same_sum
from tiny_generic_later import save_tiny_generic
from torch import Tensor

from flowrl.media.images import to_pixels
from flowrl.pipelines import family
from flowrl.pipelines.shared import common
from flowrl.pipelines.shared.family_pipeline import Family, FamilyPipeline
from flowrl.trajectory import Conditioning

STOCK = {
    "ltx2": "LTX2ImageToVideoPipeline",
    "sana_video": "SanaImageToVideoPipeline",
    "hunyuan_video15": "HunyuanVideo15ImageToVideoPipeline",
}
HELD = ("ltx2", "sana_video")
SOURCES = [[video.image(0, 40, 24)], [video.image(1, 40, 24)]]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    room = tmp_path_factory.mktemp("first_frames")

    def saved(name: str) -> Path:
        if name == "ltx2":
            return tiny_ltx2.save_tiny_ltx2(room / name)
        if name == "sana_video":
            return tiny_sana_video.save_tiny_sana_video(room / name)
        return save_tiny_generic(STOCK[name], room / name)

    return cache(saved)


def tiny(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> FamilyPipeline:
    usual = {"ltx2": tiny_ltx2.OPTIONS, "sana_video": tiny_sana_video.OPTIONS}.get(name, tiny_hunyuan_video15.OPTIONS)
    own: Any = family(name)
    assert isinstance(own, Family)
    options = {"image_to_video": True} if name in HELD else {}
    return load(own, usual, folder, dtype, **options)


def stock_of(name: str, pipeline: FamilyPipeline, folder: Path, row: int, lora: Path | None = None) -> Tensor:
    """Finished latents of one prompt by stock's own call; ours without guidance."""
    pipe = fresh_stock(getattr(diffusers, STOCK[name]), folder)
    frames, _, height, width = pipeline.image_shape
    noise = start_noise(pipeline)[row : row + 1]
    image = Image.fromarray(to_pixels(SOURCES[row][0]))
    given: dict[str, Any] = {
        "prompt": video.PROMPTS[row : row + 1],
        "image": image,
        "num_inference_steps": video.STEPS,
        "output_type": "latent",
        "latents": noise,
    }
    if lora is not None:
        loads = {"weight_name": "pytorch_lora_weights.safetensors"}
        pipe.transformer.load_lora_adapter(lora, **loads) if name == "hunyuan_video15" else pipe.load_lora_weights(lora)
    if name == "hunyuan_video15":  # which draws the shape of its image, at its own size
        pipe.tokenizer_max_length, pipe.guider = 16, diffusers.ClassifierFreeGuidance(guidance_scale=1.0)
        pipe.target_size = 32
        wide = Image.fromarray(to_pixels(common.covering(SOURCES[row][0], height, width)))
        pipe.video_processor.calculate_default_height_width = lambda **_: (height, width)
        return pipe(**given | {"image": wide, "num_frames": frames}).frames
    size = {"height": height, "width": width, "guidance_scale": 1.0}
    if name == "sana_video":
        pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, solver_order=1)
        length = tiny_sana_video.OPTIONS["max_sequence_length"]
        given |= {"frames": frames, "use_resolution_binning": False, "max_sequence_length": length}
        return pipe(**given, **size).frames
    count, vae = pipeline.grid_shape[1] * pipeline.grid_shape[2] * pipeline.grid_shape[3], pipe.audio_vae
    first = first_of_ltx2(pipe, image, height, width)
    tokens = torch.cat([first, noise[:, first.shape[1] : count]], dim=1)
    whole = tokens.transpose(1, 2).unflatten(2, pipeline.grid_shape[1:])
    latents = pipe._denormalize_latents(whole, pipe.vae.latents_mean, pipe.vae.latents_std)  # which stock takes back
    found = pipe(
        **given | {"latents": latents},
        **size,
        num_frames=frames,
        frame_rate=pipeline.fps,
        stg_scale=0.0,
        audio_latents=noise[:, count:] * vae.latents_std + vae.latents_mean,
        audio_guidance_scale=1.0,
        audio_stg_scale=0.0,
        modality_scale=1.0,
        audio_modality_scale=1.0,
        guidance_rescale=0.0,
        audio_guidance_rescale=0.0,
        max_sequence_length=tiny_ltx2.OPTIONS["max_sequence_length"],
    )
    clips = pipe._normalize_latents(found.frames, pipe.vae.latents_mean, pipe.vae.latents_std)
    sounds = (found.audio.transpose(1, 2).flatten(2) - vae.latents_mean) / vae.latents_std
    return torch.cat([clips.flatten(2).transpose(1, 2), sounds], dim=1)


def first_of_ltx2(pipe: Any, image: Image.Image, height: int, width: int) -> Tensor:
    """The tokens that stock makes of an image where it makes latents itself."""
    made: list[Tensor] = []
    stock = pipe.prepare_latents

    def seen(*args: Any, **named: Any) -> Any:
        found = stock(*args, **named)
        made.append(found[0][:, found[1][0].bool()])
        raise InterruptedError

    pipe.prepare_latents = seen
    with pytest.raises(InterruptedError):
        pipe(prompt=[""], image=image, height=height, width=width, num_frames=9, max_sequence_length=24)
    pipe.prepare_latents = stock
    return made[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # stock DPM-Solver's own
@pytest.mark.parametrize("name", STOCK)
def test_a_first_frame_is_drawn_from_as_stock_does_trained_and_its_lora_loads_in_stock(
    name: str, folders: Any, tmp_path: Path
) -> None:
    pipeline = tiny(name, folders(name))
    schedule = pipeline.schedule(video.STEPS, "diffusers")
    assert pipeline.num_sources == (1, 1)
    assert type(pipeline.pipe).__name__ == STOCK[name]
    final = video.sample_ode(pipeline, schedule, 1.0, SOURCES)
    for row in range(2):  # two prompts and images in one call of ours
        assert_same_sum(final[row : row + 1], stock_of(name, pipeline, folders(name), row))
    assert (video.sample_ode(pipeline, schedule, 1.0, SOURCES[::-1]) - final).abs().max() > 1e-4
    policy = adapted(pipeline)
    log_prob = replayed(pipeline, video.guided(pipeline, 3.0, SOURCES), 2, video.STEPS)
    assert len(idle_tensors(policy, (log_prob * torch.tensor([1.0, -2.0])).sum())) <= 4
    tuned = video.sample_ode(pipeline, schedule, 1.0, SOURCES)
    assert (tuned - final).abs().max() > 1e-3
    pipeline.save_lora(tmp_path, policy.tensors(), policy.config)
    stock = stock_of(name, pipeline, folders(name), 1, tmp_path)
    torch.testing.assert_close(stock, tuned[1:], atol=1e-4, rtol=1e-4)
    clips = pipeline.decode(tuned, gradient=True)
    assert clips.shape == (2, *pipeline.image_shape)


@pytest.mark.parametrize("name", HELD)
def test_a_state_ends_at_its_first_frame(name: str, folders: Any) -> None:
    """Whatever the state is, and at every level; the network sees the image's latents alone there."""
    pipeline = tiny(name, folders(name))
    cond = pipeline.encode(video.PROMPTS, SOURCES)
    velocity = pipeline.guided(pipeline.network, cond, None, 1.0)
    first, dim = cond.tensors["first_frame"], 1 if name == "ltx2" else 2
    assert (first[0] - first[1]).abs().mean() > 1e-3
    x = start_noise(pipeline)
    other = x.clone()
    other.narrow(dim, 0, first.shape[dim]).add_(1.0)
    sigma = torch.tensor(0.7)
    with torch.no_grad():
        found, again = velocity(x, sigma, 1000 * sigma), velocity(other, sigma, 1000 * sigma)
    count = first.shape[dim]
    for state, answer in ((x, found), (other, again)):
        torch.testing.assert_close((state - sigma * answer).narrow(dim, 0, count), first, atol=1e-5, rtol=0.0)
    rest = x.shape[dim] - count
    assert torch.equal(found.narrow(dim, count, rest), again.narrow(dim, count, rest))


def test_held_and_shown_leave_what_has_no_first_frame() -> None:
    cond, x = Conditioning({"embeds": torch.zeros(1, 2)}), torch.ones(1, 3)
    assert common.held(x, 2 * x, torch.tensor(0.5), cond) is x
    assert common.shown(x, cond) is x
    first = Conditioning({"first_frame": torch.full((1, 1), 5.0)})
    assert common.shown(x, first).tolist() == [[5.0, 1.0, 1.0]]
    assert common.held(x, 2 * x, torch.tensor(0.5), first).tolist() == [[-6.0, 1.0, 1.0]]
    times = torch.tensor([3.0])
    assert common.token_times(times, cond, (2, 1, 2)) is times
    assert common.token_times(times, first, (2, 1, 2)).tolist() == [[0.0, 0.0, 3.0, 3.0]]


@pytest.mark.slow
def test_published_image_to_video_is_counted_with_its_image() -> None:
    """HunyuanVideo 1.5 at full dimensions, on meta: as many channels, and SigLIP's tokens beside the text's."""
    own: Any = family("hunyuan_video15")
    name = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v"
    call = own.meta_call(name, own.planned_size(name, {}), 1000)
    assert call["image_embeds"].shape == (1, 729, 1152)
    assert call["hidden_states"].shape == (1, 65, 31, 30, 53)
