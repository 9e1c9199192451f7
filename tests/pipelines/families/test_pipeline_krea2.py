"""The Krea 2 pipeline against stock diffusers, and the replay of its rollouts."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import family_sampling
import flow_family as flow
import pytest
import torch
from diffusers import Krea2Pipeline
from family_sampling import start_noise
from rounding import assert_same_sum
from tiny_krea2 import save_tiny_krea2
from torch import Tensor

from flowrl.pipelines.families.krea2 import FAMILY
from flowrl.pipelines.shared.cards import Size
from flowrl.pipelines.shared.common import pack
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline

LENGTH, SIZE = 48, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_krea2(tmp_path_factory.mktemp("tiny") / "krea")


load = partial(family_sampling.load, FAMILY, {"height": SIZE, "width": SIZE, "max_sequence_length": LENGTH})
shared = cache(load)
stock = partial(family_sampling.stock, Krea2Pipeline)


def stock_call(pipe: Krea2Pipeline, pipeline: FamilyPipeline, scale: float, output: str) -> Tensor:
    """The stock pipeline on the same prompts and start noise, padded in the middle and both at once."""
    pipe.scheduler = flow.OnSchedule(pipeline.schedule(flow.STEPS, "diffusers"))
    return pipe(
        prompt=list(flow.PROMPTS), negative_prompt=[flow.NEGATIVE] * 2, guidance_scale=scale,
        latents=pack(start_noise(pipeline)), num_inference_steps=flow.STEPS, output_type=output,
        height=pipeline.image_shape[1], width=pipeline.image_shape[2], max_sequence_length=LENGTH,
    ).images  # fmt: skip


def sampled(pipeline: FamilyPipeline, scale: float) -> Tensor:
    negative = pipeline.encode([flow.NEGATIVE]) if pipeline.passes(scale) == 2 else None
    return flow.sample_ode(pipeline, pipeline.encode(flow.PROMPTS), negative, scale)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0])
def test_ode_sampling_equals_the_stock_pipeline(folder: Path, scale: float) -> None:
    pipeline = shared(folder)
    assert pipeline.passes(scale) == (1 if scale == 0 else 2)
    final, expected = sampled(pipeline, scale), stock_call(stock(folder), pipeline, scale, "latent")
    assert_same_sum(pack(final), expected)
    images = stock_call(stock(folder), pipeline, scale, "pt")
    assert_same_sum(pipeline.decode(final), images)
    assert (final - start_noise(pipeline, 2)).abs().mean() > 0.1  # the network did something


@pytest.mark.slow
def test_images_that_are_not_square_keep_height_and_width(folder: Path) -> None:
    pipeline = shared(folder).resized(24, 16)
    assert pipeline.latent_shape == (4, 12, 8)
    expected = stock_call(stock(folder), pipeline, 4.0, "latent")
    assert_same_sum(pack(sampled(pipeline, 4.0)), expected)


def test_a_sample_does_not_depend_on_the_prompts_beside_it(folder: Path) -> None:
    pipeline, x = shared(folder), start_noise(shared(folder), 1).expand(2, -1, -1, -1)
    cond = pipeline.encode(flow.PROMPTS)
    assert len(set(cond.tensors["length_on_host"].tolist())) == 2
    with torch.no_grad():
        together = pipeline.network(x, torch.tensor([700.0, 700.0]), cond)
        alone = pipeline.network(x[:1], torch.tensor([700.0]), cond[0])
    assert_same_sum(together[:1], alone)
    assert (together[1] - together[0]).abs().mean() > 1e-3


def test_encoding_is_stocks_without_its_padding(folder: Path) -> None:
    cond = shared(folder).encode(flow.PROMPTS)
    for i, prompt in enumerate(flow.PROMPTS):
        embeds, mask = stock(folder).encode_prompt(prompt, max_sequence_length=LENGTH)
        n = int(mask.sum())
        assert not bool(mask[0, :n].all())  # stock's suffix stands behind the padding
        assert cond.tensors["embeds"].shape[1:] == embeds.shape[1:]
        assert torch.equal(cond.tensors["embeds"][i, :n], embeds[0, mask[0]])
        assert not cond.tensors["embeds"][i, n:].any()
        assert cond.tensors["mask"][i].tolist() == [True] * n + [False] * (LENGTH - n)


@pytest.mark.slow
def test_known_prompts_stay_after_the_encoder_is_freed(folder: Path) -> None:
    flow.check_known_prompts_stay(load(folder))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "checkpointed"), [(torch.float32, False), (torch.bfloat16, True)], ids=str)
def test_replay_is_exact_and_every_lora_tensor_has_gradient(
    folder: Path, dtype: torch.dtype, checkpointed: bool
) -> None:
    pipeline = load(folder, dtype, gradient_checkpointing=checkpointed)
    policy = flow.adapted(pipeline)
    assert not flow.check_replay(pipeline, policy, pipeline.encode(flow.PROMPTS), pipeline.encode([flow.NEGATIVE]), 4.0)


@pytest.mark.slow
def test_a_saved_lora_gives_the_same_images_in_stock(folder: Path, tmp_path: Path) -> None:
    pipeline = load(folder)
    policy = family_sampling.adapted(pipeline, rank=flow.RANK, alpha=flow.ALPHA, scale=0.05)
    ours = sampled(pipeline, 1.0)
    assert (ours - sampled(shared(folder), 1.0)).abs().mean() > 1e-3
    assert pipeline.save_lora(tmp_path, policy.tensors(), policy.config).is_file()
    pipe = family_sampling.fresh_stock(Krea2Pipeline, folder, tmp_path)
    assert_same_sum(pack(ours), stock_call(pipe, pipeline, 1.0, "latent"))


@pytest.mark.slow
def test_images_go_into_latents_and_back(folder: Path) -> None:
    mean, std = (torch.tensor(v)[:, None, None] for v in ([0.1, -0.2, 0.3, -0.4], [0.5, 1.5, 2.0, 0.8]))

    def normalised(vae: Any, images: Tensor) -> Tensor:
        return (vae.encode(images.unsqueeze(2)).latent_dist.mode()[:, :, 0] - mean) / std

    flow.check_autoencoder(shared(folder), load(folder, vae_slice=2), normalised)


@pytest.mark.slow
def test_a_distilled_checkpoint_has_one_shift_and_no_guidance(folder: Path, tmp_path: Path) -> None:
    flow.check_schedule_is_stocks(shared(folder), 0.5 + 0.65 * (16 - 256) / (6400 - 256))
    pipeline = load(save_tiny_krea2(tmp_path, distilled=True))
    for size in (16, 32):
        flow.check_schedule_is_stocks(pipeline.resized(size, size), 1.15)
    cond = pipeline.encode(["a sea"])
    pipe = family_sampling.fresh_stock(Krea2Pipeline, tmp_path)
    latents = pipe(
        "a sea", height=SIZE, width=SIZE, latents=pack(start_noise(pipeline, 1)), num_inference_steps=flow.STEPS,
        guidance_scale=0.0, max_sequence_length=LENGTH, output_type="latent",
    ).images  # fmt: skip
    ours = flow.sample_ode(pipeline, cond, None, 0.0)
    assert_same_sum(pack(ours), latents)
    with pytest.raises(ValueError, match=r"scale 0 in this family, got scale 4: set sampler\.guidance_scale=0"):
        pipeline.guided(pipeline.network, cond, cond, 4.0)


# ---- what is known and what is refused -------------------------------------------------------------------------------


@pytest.mark.slow
def test_known_checkpoints_have_the_published_size_and_are_called_without_numbers() -> None:
    for model in flow.published(FAMILY):
        family_sampling.check_published(FAMILY, model, 12_820_073_036)
        family_sampling.check_call(FAMILY, model, Size(height=512, width=384), 60, (1, 32 * 24, 64))


def test_wrong_folders_targets_and_options_are_refused(folder: Path, tmp_path: Path) -> None:
    family_sampling.check_targets(FAMILY, folder, "attn.to_qkv")
    flow.check_another_class_is_refused(FAMILY, tmp_path)
    with pytest.raises(ValueError, match=r"pipeline\.width \(18\) must be a multiple of 4"):
        load(folder, width=18)
    flow.edited(flow.bare(folder, tmp_path) / "model_index.json", patch_size=1)
    with pytest.raises(ValueError, match="packs patches of 1, and only 2 x 2 is loaded"):
        FAMILY.check(str(tmp_path / "bare"), None)
    pipeline = shared(folder)
    with pytest.raises(ValueError, match="krea2 takes no source image"):
        pipeline.encode(["a"], [[torch.zeros(3, 4, 4)]])
    for scale, negative in ((4.0, None), (-1.0, pipeline.encode([""]))):
        with pytest.raises(ValueError, match="0 for none"):
            pipeline.guided(pipeline.network, pipeline.encode(["a"]), negative, scale)
