"""Wan 2.2 Animate against stock diffusers: a character, its pose and face, and what stays of another video."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanAnimatePipeline
from family_sampling import check_published, fresh_stock, load, same, start_noise, stock
from flow_family import OnSchedule
from PIL import Image
from rounding import assert_same_sum
from tiny_wan import CHANNELS, OPTIONS, save_tiny_wan
from torch import Tensor
from video_family import PROMPTS, STEPS, Sources, check_ratio_is_one, image, sample_ode, with_lora

from flowrl.media.images import to_pixels
from flowrl.media.lossless import read_clip
from flowrl.media.videos import save_mp4
from flowrl.pipelines import family_for
from flowrl.pipelines.families.wan_animate import FAMILY
from flowrl.pipelines.shared.cards import Size
from flowrl.pipelines.shared.common import restore
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.prompts.loading import read_prompts
from flowrl.training.prompting import encode_prompts


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_wan(tmp_path_factory.mktemp("animate") / "model", "animate")


tiny = partial(load, FAMILY, OPTIONS)
shared = cache(lambda folder: tiny(folder))


def clip(seed: int, height: int = 32, width: int = 48) -> Tensor:
    """Five frames of 8-bit values that change."""
    return torch.stack([image(seed, height, width).roll(5 * number, dims=2) for number in range(5)])


def mask() -> Tensor:
    found = torch.zeros(5, 3, 32, 48)
    found[:, :, 5:19, 3:30] = 1.0
    return found


ANIMATE = [clip(1), clip(2, 16, 16), image(2, 40, 30)]
REPLACE = [clip(1), clip(2, 16, 16), clip(0), mask(), image(2, 40, 30)]


def both(given: list[Tensor]) -> Sources:
    return [given] * len(PROMPTS)


def stock_call(pipe: Any, pipeline: FamilyPipeline, given: list[Tensor], scale: float, output: str) -> Tensor:
    """The stock pipeline, which draws one clip at a time: a segment as long as the pose video."""
    pipe.scheduler = OnSchedule(pipeline.schedule(STEPS, "diffusers"))
    frames, _rgb, height, width = pipeline.image_shape
    clips = [[Image.fromarray(to_pixels(frame)) for frame in one] for one in given if one.ndim == 4]
    names = ("pose_video", "face_video", "background_video", "mask_video")
    drawn = [
        pipe(
            Image.fromarray(to_pixels(given[-1])),
            **dict(zip(names, clips, strict=False)),
            prompt=prompt,
            negative_prompt="",
            latents=noise[None],
            guidance_scale=scale,
            height=height,
            width=width,
            segment_frame_length=frames,
            num_inference_steps=STEPS,
            mode="replace" if len(clips) > 2 else "animate",
            max_sequence_length=512,
            output_type=output,  # of which the attention to the image counts off
        ).frames
        for prompt, noise in zip(PROMPTS, start_noise(pipeline), strict=True)
    ]
    return torch.cat(drawn)


@pytest.mark.parametrize(
    ("given", "scale"),
    [pytest.param(ANIMATE, 1.0, marks=pytest.mark.slow), (ANIMATE, 4.0), (REPLACE, 1.0)],
    ids=["animate", "guided", "replace"],
)
def test_clips_are_those_of_the_stock_pipeline(folder: Path, given: list[Tensor], scale: float) -> None:
    pipeline, pipe = shared(folder), stock(WanAnimatePipeline, folder)
    assert (pipeline.latent_shape, pipeline.image_shape) == ((CHANNELS, 3, 4, 6), (5, 3, 32, 48))
    final = sample_ode(pipeline, pipeline.schedule(STEPS, "diffusers"), scale, both(given))
    assert_same_sum(restore(pipeline, final), stock_call(pipe, pipeline, given, scale, "latent"))
    assert (final - start_noise(pipeline)).abs().mean() > 0.1  # the network did something
    clips = stock_call(pipe, pipeline, given, scale, "pt")
    torch.testing.assert_close(pipeline.decode(final), clips, atol=2e-4, rtol=0)  # stock divides by an inverse


@pytest.mark.slow
def test_each_source_changes_what_is_drawn(folder: Path) -> None:
    pipeline, time = shared(folder), torch.full((2,), 500.0)
    x, pose, face, character = start_noise(pipeline), *ANIMATE
    answers = [
        pipeline.network(x, time, pipeline.encode(PROMPTS, both(given)))
        for given in (
            ANIMATE,
            [1 - pose, face, character],
            [pose, 1 - face, character],
            [pose, face, image(0, 40, 30)],
            REPLACE,
            [pose, face, 1 - clip(0), mask(), character],
            [pose, face, clip(0), 1 - mask(), character],
        )
    ]
    for at, one in enumerate(answers):
        assert all((one - other).abs().max() > 1e-4 for other in answers[at + 1 :])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:While injecting the PEFT adapters")  # stock adds zeros of its own
def test_replayed_log_probs_equal_the_rollouts_and_stock_loads_the_lora(folder: Path, tmp_path: Path) -> None:
    pipeline, policy = with_lora(tiny(folder))
    check_ratio_is_one(pipeline, policy, 4.0, both(ANIMATE))
    final = sample_ode(pipeline, pipeline.schedule(STEPS, "diffusers"), 1.0, both(ANIMATE))
    assert pipeline.save_lora(tmp_path, policy.tensors(), policy.config).is_file()
    pipe = fresh_stock(WanAnimatePipeline, folder, tmp_path)
    assert_same_sum(stock_call(pipe, pipeline, ANIMATE, 1.0, "latent"), restore(pipeline, final))
    assert (
        final - sample_ode(shared(folder), pipeline.schedule(STEPS, "diffusers"), 1.0, both(ANIMATE))
    ).abs().max() > 1e-2


@pytest.mark.slow
def test_rows_of_a_prompt_file_name_the_clips(folder: Path, tmp_path: Path) -> None:
    given = {"pose_video": clip(1), "face_video": clip(2, 16, 16), "source_video": clip(0), "mask_video": mask()}
    for name, frames in given.items():
        save_mp4(frames.repeat_interleave(4, 2).repeat_interleave(4, 3), tmp_path / f"{name}.mp4", 8.0)
    Image.fromarray(to_pixels(image(2, 40, 30))).save(tmp_path / "fox.png")
    row = {"prompt": PROMPTS[0], **{name: f"{name}.mp4" for name in reversed(given)}, "source": "fox.png"}
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    (prompt,) = read_prompts(tmp_path / "p.jsonl")
    assert prompt.clips == tuple(str(tmp_path / f"{name}.mp4") for name in given)
    read = [*(read_clip(file) for file in prompt.clips), image(2, 40, 30)]
    found = encode_prompts(shared(folder), [prompt])
    wanted = shared(folder).encode(PROMPTS[:1], [read])
    assert same(wanted, type(found)({name: found.tensors[name] for name in wanted.tensors}))


def test_rows_without_the_clips_that_are_needed_are_refused(tmp_path: Path) -> None:
    from flowrl.generation.prompt_checks import source_faults, sources_taken
    from flowrl.prompts.prompt_files import Prompt

    model = "Wan-AI/Wan2.2-Animate-14B-Diffusers"
    known = family_for("wan_animate", model)
    assert sources_taken(known, model, {}) == (1, 1)
    clips = {"pose_video": "pose.mp4", "face_video": "face.mp4"}
    row = Prompt(text="a fox", metadata={}, sources=("fox.png",), videos=clips)
    assert source_faults([row], known, (1, 1)) == []
    lacking = Prompt(text="a fox", metadata={}, sources=("fox.png",))
    assert "has no pose_video and no face_video, and family wan_animate" in source_faults([lacking], known, (1, 1))[0]
    other = source_faults([row], family_for("wan_vace", "Wan-AI/Wan2.1-VACE-14B-diffusers"), None)
    assert "names a pose_video, which family wan_vace does not take" in other[0]
    assert "take a model of family wan_animate" in other[0]
    edited = Prompt(text="a fox", metadata={}, videos={"source_video": "clip.mp4"})
    image = source_faults([edited], family_for("wan", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"), None)
    assert "take a model of family wan_vace or lucy_edit" in image[0]
    (tmp_path / "a.mp4").touch()
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a", "pose_video": "a.mp4"}), encoding="utf-8")
    with pytest.raises(ValueError, match="from a pose_video and a face_video: give both"):
        read_prompts(tmp_path / "p.jsonl")


def test_sources_and_methods_that_do_not_fit_are_refused(folder: Path) -> None:
    pipeline = shared(folder)
    for given, words in (
        ([clip(1), image(2, 40, 30)], "got 1 images and 1 clips"),
        ([clip(1), clip(2, 16, 16)], "got 0 images and 2 clips"),
        ([clip(1)[:4], clip(2, 16, 16), image(2, 40, 30)], "has 4 frames, and 5 are drawn"),
        ([*REPLACE[:3], mask()[..., :32], REPLACE[4]], r"mask of 32 x 32 pixels .* does not fit a source video"),
    ):
        with pytest.raises(ValueError, match=words):
            pipeline.encode(PROMPTS[:1], [given])
    with pytest.raises(ValueError, match="no latents of the character's frame"):
        pipeline.encode_images(clip(1)[None])


@pytest.mark.slow
def test_the_published_network_is_called_without_numbers() -> None:
    model = "Wan-AI/Wan2.2-Animate-14B-Diffusers"
    check_published(FAMILY, model, 17_274_816_884)
    network = FAMILY.meta_denoiser(model, {"num_layers": 5})
    assert network is not None
    assert FAMILY.block_kinds(model) == {}
    call = FAMILY.meta_call(model, Size(height=480, width=832, num_frames=77), 512)
    with torch.no_grad():
        assert network(**call)[0].shape == (1, 16, 21, 60, 104)
