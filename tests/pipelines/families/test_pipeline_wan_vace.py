"""Wan VACE against stock diffusers: control videos, masks and reference images, one network and two experts."""

from __future__ import annotations

import json
import shutil
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers import WanVACEPipeline
from family_sampling import load, same, start_noise
from flow_family import OnSchedule
from PIL import Image
from rounding import assert_same_sum
from tiny_wan import CHANNELS, OPTIONS, Kind, save_tiny_wan
from torch import Tensor, nn
from train_command import train
from video_family import PROMPTS, STEPS, Sources, check_ratio_is_one, image, sample_ode, with_lora

from flowrl.media.images import to_pixels
from flowrl.media.lossless import read_clip
from flowrl.media.videos import save_mp4
from flowrl.pipelines.families.wan_vace import FAMILY
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.pipelines.weights.lora import check_targets
from flowrl.prompts.loading import read_prompts
from flowrl.training.prompting import encode_prompts

KINDS: list[Kind] = ["vace", "vace-a14b"]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vace")
    return {kind: save_tiny_wan(root / kind, kind) for kind in KINDS}


tiny = partial(load, FAMILY, OPTIONS)
shared = cache(lambda folder, dtype, references: with_lora(tiny(folder, dtype, num_references=references)))


def clip(frames: int = 5, height: int = 32, width: int = 48) -> Tensor:
    """A clip of 8-bit values that changes from frame to frame."""
    return torch.stack([image(1, height, width).roll(5 * number, dims=2) for number in range(frames)])


def mask(frames: int = 5) -> Tensor:
    """White in a band whose edges are no latent's; grey, and white all over, in later frames."""
    found = torch.zeros(frames, 3, 32, 48)
    found[:, :, 5:19, 3:30] = 1.0
    found[2] = 204 / 255
    found[4] = 1.0
    return found


GIVEN: dict[str, list[Tensor]] = {
    "text alone": [], "video": [clip()], "video and mask": [clip(), mask()], "reference": [image(2, 40, 30)],
    "all": [clip(), mask(), image(2, 40, 30), image(3, 16, 64)],
}  # fmt: skip


def references_of(given: list[Tensor]) -> int:
    return sum(tensor.ndim == 3 for tensor in given)


def both(given: list[Tensor]) -> Sources:
    return [given] * len(PROMPTS)


def stock_call(
    pipe: Any, pipeline: FamilyPipeline, given: list[Tensor], scale: float, output: str, **more: Any
) -> Tensor:
    """The stock pipeline, which draws one clip at a time."""
    pipe.scheduler = OnSchedule(pipeline.schedule(STEPS, "diffusers"))
    pipe.set_progress_bar_config(disable=True)
    clips = [[Image.fromarray(to_pixels(frame)) for frame in one] for one in given if one.ndim == 4]
    images = [Image.fromarray(to_pixels(one)) for one in given if one.ndim == 3]
    frames, _rgb, height, width = pipeline.image_shape
    more |= dict(zip(("video", "mask"), clips, strict=False)) | ({"reference_images": images} if images else {})
    drawn = [
        pipe(
            prompt=prompt, negative_prompt="", latents=noise[None], guidance_scale=scale, height=height, width=width,
            num_frames=frames, num_inference_steps=STEPS, max_sequence_length=OPTIONS["max_sequence_length"],
            output_type=output, **more,
        ).frames
        for prompt, noise in zip(PROMPTS, start_noise(pipeline), strict=True)
    ]  # fmt: skip
    return torch.cat(drawn)


# ---- the same clips as stock diffusers -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words"), [*(("vace", words) for words in GIVEN), ("vace-a14b", "all")], ids=lambda part: part
)
def test_ode_sampling_equals_the_stock_pipeline(folders: dict[str, Path], kind: str, words: str) -> None:
    given = GIVEN[words]
    pipeline = tiny(folders[kind], num_references=references_of(given))
    pipe, schedule = WanVACEPipeline.from_pretrained(folders[kind]), pipeline.schedule(STEPS, "diffusers")
    assert pipeline.latent_shape == (CHANNELS, 2 + references_of(given), 4, 6)
    final = sample_ode(pipeline, schedule, 4.0, both(given))
    stock = stock_call(pipe, pipeline, given, 4.0, "latent")
    assert_same_sum(final, stock)
    assert (stock - start_noise(pipeline)).abs().mean() > 0.1  # the network did something
    clips = stock_call(pipe, pipeline, given, 4.0, "pt")
    torch.testing.assert_close(pipeline.decode(stock), clips, atol=2e-4, rtol=0)  # stock divides by an inverse
    assert clips.shape == (2, *pipeline.image_shape)


@pytest.mark.slow
def test_the_strength_of_the_control_is_stocks(folders: dict[str, Path]) -> None:
    given, pipeline = GIVEN["video"], tiny(folders["vace"], conditioning_scale=0.3)
    pipe, schedule = WanVACEPipeline.from_pretrained(folders["vace"]), pipeline.schedule(STEPS, "diffusers")
    final = sample_ode(pipeline, schedule, 1.0, both(given))
    stock = stock_call(pipe, pipeline, given, 1.0, "latent", conditioning_scale=0.3)
    assert_same_sum(final, stock)
    assert (final - sample_ode(tiny(folders["vace"]), schedule, 1.0, both(given))).abs().max() > 1e-3


@pytest.mark.slow
def test_each_source_changes_what_is_drawn(folders: dict[str, Path]) -> None:
    pipeline = tiny(folders["vace"], num_references=1)
    x, time, reference = start_noise(pipeline), torch.full((2,), 500.0), image(2, 40, 30)
    answers = [
        pipeline.network(x, time, pipeline.encode(PROMPTS, both(given)))
        for given in (
            [reference], [clip(), reference], [clip(), mask(), reference], [clip(), mask(), image(0, 40, 30)],
            [1 - clip(), mask(), reference],
        )
    ]  # fmt: skip
    for at, one in enumerate(answers):
        assert all((one - other).abs().max() > 1e-4 for other in answers[at + 1 :])


# ---- sources ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_masks_pixels_are_folded_into_channels(folders: dict[str, Path]) -> None:
    """One white pixel of the first frame, at row 1 and column 2 of latents, is one channel of one place."""
    pipeline, drawn = tiny(folders["vace"], num_references=1), torch.zeros(5, 3, 32, 48)
    drawn[0, :, 8 + 5, 16 + 3] = 1.0
    folded = [
        pipeline.encode(PROMPTS[:1], [[clip(), one, image(2, 40, 30)]]).tensors["control"][0, 2 * CHANNELS :]
        for one in (drawn, drawn.flip(0))
    ]
    # Of 5 frames, numbers 1 and 3 are the nearest of the two latent frames' middles.
    assert [int(one.count_nonzero()) for one in folded] == [0, 0]
    drawn[1] = drawn[0]
    control = pipeline.encode(PROMPTS[:1], [[clip(), drawn, image(2, 40, 30)]]).tensors["control"][0, 2 * CHANNELS :]
    assert control.nonzero().tolist() == [[5 * 8 + 3, 1, 1, 2]]


@pytest.mark.slow
def test_clips_are_cut_to_the_frames_and_the_size_that_are_drawn(folders: dict[str, Path]) -> None:
    pipeline, long = tiny(folders["vace"]), torch.cat([clip(), clip()])
    assert same(pipeline.encode(PROMPTS[:1], [[long]]), pipeline.encode(PROMPTS[:1], [[clip()]]))
    wide = clip(5, 32, 64)
    assert same(pipeline.encode(PROMPTS[:1], [[wide]]), pipeline.encode(PROMPTS[:1], [[wide[..., 8:56]]]))
    with pytest.raises(ValueError, match=r"has 4 frames, and 5 are drawn: .* pipeline\.num_frames to at most 4"):
        pipeline.encode(PROMPTS[:1], [[clip(4)]])


@pytest.mark.slow
def test_rows_of_a_prompt_file_name_video_mask_and_references(folders: dict[str, Path], tmp_path: Path) -> None:
    for name, frames in (("run", clip(5, 128, 192)), ("where", mask().repeat_interleave(4, 2).repeat_interleave(4, 3))):
        save_mp4(frames, tmp_path / f"{name}.mp4", 8.0)
    Image.fromarray(to_pixels(image(2, 40, 30))).save(tmp_path / "fox.png")
    row = {"prompt": PROMPTS[0], "source_video": "run.mp4", "mask_video": "where.mp4", "sources": ["fox.png"]}
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    (prompt,) = read_prompts(tmp_path / "p.jsonl")
    assert prompt.clips == (str(tmp_path / "run.mp4"), str(tmp_path / "where.mp4"))
    assert json.loads(prompt.noise_name) == [PROMPTS[0], "fox.png", "run.mp4", "where.mp4"]
    pipeline = tiny(folders["vace"], num_references=1)
    given = [read_clip(tmp_path / "run.mp4"), read_clip(tmp_path / "where.mp4"), image(2, 40, 30)]
    found, wanted = encode_prompts(pipeline, [prompt]), pipeline.encode(PROMPTS[:1], [given])
    assert torch.equal(found.tensors["control"], wanted.tensors["control"])


def test_sources_that_do_not_fit_are_refused(folders: dict[str, Path]) -> None:
    pipeline, one = tiny(folders["vace"], num_references=1), image(2, 40, 30)
    for given, message in (
        ([clip()], r"has 0 reference images and 1 clips, and wan_vace as loaded .*num_references=1"),
        ([clip(), clip(), clip()], r"has 0 reference images and 3 clips"),
        ([clip(), mask()[..., :32], one], r"mask of 32 x 32 pixels .* does not fit a control video of 32 x 48"),
        ([one, one], r"has 2 reference images and 0 clips, .* set num_references to the number of images"),
        ([], r"has 0 source images, and wan_vace takes 1 to 3"),
    ):
        with pytest.raises(ValueError, match=message):
            pipeline.encode(PROMPTS[:1], [given])
    with pytest.raises(ValueError, match=r"no latents of 1 reference images"):
        pipeline.encode_images(clip()[None])
    plain = tiny(folders["vace"])
    assert plain.encode_images(clip()[None]).shape[1:] == plain.latent_shape


@pytest.mark.slow
def test_another_size_encodes_sources_again_also_after_the_text_encoders_are_freed(folders: dict[str, Path]) -> None:
    pipeline, given = tiny(folders["vace"], num_references=2), both(GIVEN["all"])
    before = pipeline.encode(PROMPTS, given)
    pipeline.free_text_encoders()
    other = pipeline.resized(16, 32)
    assert (other.latent_shape, other.image_shape) == ((CHANNELS, 4, 2, 4), (5, 3, 16, 32))
    assert other.encode(PROMPTS, given).tensors["control"].shape == (2, 2 * CHANNELS + 64, 4, 2, 4)
    assert same(pipeline.encode(PROMPTS, given), before)


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), list(zip(KINDS, [torch.float32, torch.bfloat16], strict=True)), ids=str)
def test_replayed_log_probs_equal_the_rollouts(folders: dict[str, Path], kind: str, dtype: torch.dtype) -> None:
    pipeline, policy = shared(folders[kind], dtype, 2)
    names = {
        name.removeprefix("transformer.").removeprefix("transformer_2.").split(".")[0] for name in policy.parameters
    }
    assert names == {"blocks", "vace_blocks"}
    check_ratio_is_one(pipeline, policy, 4.0, both(GIVEN["all"]))


@pytest.mark.slow
def test_stock_loads_the_saved_lora(folders: dict[str, Path], tmp_path: Path) -> None:
    pipeline, policy = shared(folders["vace"], torch.float32, 2)
    schedule, given = pipeline.schedule(STEPS, "diffusers"), GIVEN["all"]
    final = sample_ode(pipeline, schedule, 4.0, both(given))
    assert pipeline.save_lora(tmp_path, policy.tensors(), policy.config).is_file()
    pipe = WanVACEPipeline.from_pretrained(folders["vace"])
    without = stock_call(pipe, pipeline, given, 4.0, "latent")
    pipe.load_lora_weights(tmp_path)
    torch.testing.assert_close(stock_call(pipe, pipeline, given, 4.0, "latent"), final, atol=2e-5, rtol=1e-5)
    assert (without - final).abs().max() > 1e-2


@pytest.mark.slow
def test_a_run_on_clips(folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From rows that name clips to a LoRA; families that take none refuse the rows before anything loads."""
    save_mp4(clip(5, 128, 192), tmp_path / "run.mp4", 8.0)
    Image.fromarray(to_pixels(image(2, 40, 30))).save(tmp_path / "fox.png")
    rows = [{"prompt": text, "source_video": "run.mp4", "sources": ["fox.png"]} for text in PROMPTS]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "rewards.py").write_text(
        "def darkness(images, prompts, metadata):\n    return -images.mean((1, 2, 3))\n", encoding="utf-8"
    )
    size = {name: value for name, value in OPTIONS.items() if name != "device"}
    config: dict[str, Any] = {
        "num_iterations": 1, "prompts_per_step": 2, "group_size": 2, "eval_every": 0, "progress": False,
        "out": str(tmp_path / "run"), "threads": 1, "policy": {"lora_rank": 2},
        "pipeline": {"model": str(folders["vace"]), "dtype": "float32", "device": "cpu", **size,
                     "options": {"num_references": 1}},
        "sampler": {"kernel": "flow_sde", "noise_level": 0.3, "num_steps": 3, "guidance_scale": 2.0,
                    "sde_window_range": [0, 2]},
        "prompts": {"train": str(tmp_path / "p.jsonl")},
        "rewards": [{"file": str(tmp_path / "rewards.py"), "function": "darkness"}],
        "logging": {"tensorboard": False},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    assert train(str(tmp_path / "run.yaml"), []) == 0
    capsys.readouterr()
    assert (tmp_path / "run" / "lora" / "pytorch_lora_weights.safetensors").is_file()
    plain = save_tiny_wan(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"names a source_video, which family wan does not take: .* family wan_vace"):
        train(str(tmp_path / "run.yaml"), [f"pipeline.model={plain}", "pipeline.options={}", f"out={tmp_path / 'no'}"])


# ---- refusals and real sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_frames": 6}, r"num_frames \(6\) must be 1 plus a multiple of 4"),
        ({"guidance_scale_2": 3.0}, r"guidance_scale_2 \(3\.0\) is for two experts"),
        ({"num_references": -1}, r"num_references must be at least 0, got -1"),
    ],
)
def test_options_the_checkpoint_does_not_have_are_refused(
    folders: dict[str, Path], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(folders["vace"], **options)


def test_folders_are_refused_before_weights_load(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["vace"], tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    FAMILY.check(str(folder), FAMILY.lora_targets)
    path = folder / "transformer" / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "vace_in_channels": 96}), encoding="utf-8")
    with pytest.raises(
        ValueError, match="has in_channels 4, vace_in_channels 96, and needed is in_channels 4, vace_in_channels 72"
    ):
        FAMILY.check(str(folder), None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "width", "wide", "layers", "beside"),
    [
        ("Wan-AI/Wan2.1-VACE-1.3B-diffusers", 1536, 8960, 30, 15),
        ("Wan-AI/Wan2.1-VACE-14B-diffusers", 5120, 13824, 40, 8),
    ],
)
def test_the_real_network_and_its_lora(name: str, width: int, wide: int, layers: int, beside: int) -> None:
    """Wan's network, and a block with a projection behind it for each control block, of which one has one before it."""
    network = FAMILY.meta_denoiser(name)
    assert isinstance(network, nn.Module)
    check_targets(network, FAMILY.lora_targets)
    square = width * width + width
    block = 8 * square + 2 * width * wide + wide + width + 4 * width + 2 * width + 6 * width
    control = beside * (block + square) + square + 96 * 4 * width + width
    found = {
        part: sum(p.numel() for n, p in network.named_parameters() if n.startswith(part)) for part in ("vace_", "")
    }
    assert found["vace_"] == control
    plain = 1_418_996_800 if width == 1536 else 14_288_491_584
    assert found[""] - found["vace_"] == plain
    bound = [part for part_name, part in network.named_modules() if part_name.endswith(FAMILY.lora_targets)]
    assert len(bound) == 8 * (layers + beside)
