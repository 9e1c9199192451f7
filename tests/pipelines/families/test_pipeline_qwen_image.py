"""The Qwen-Image pipeline against stock diffusers, and the replay of its rollouts."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import family_sampling
import flow_family as flow
import pytest
import torch
from diffusers import QwenImagePipeline
from family_sampling import start_noise
from rounding import assert_same_sum
from tiny_qwen_image import SIZE, save_tiny_qwen_image
from torch import Tensor

from flowrl.pipelines.families.qwen_image import FAMILY
from flowrl.pipelines.shared.common import pack, unpack
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.samplers.schedules import dynamic_sigmas

LENGTH = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen_image(tmp_path_factory.mktemp("tiny") / "qwen")


load = partial(family_sampling.load, FAMILY, {"height": SIZE, "width": SIZE, "max_sequence_length": LENGTH})
shared = cache(load)
stock = partial(family_sampling.stock, QwenImagePipeline)


def stock_call(
    pipe: QwenImagePipeline, pipeline: FamilyPipeline, prompts: list[str], scale: float, output: str
) -> Tensor:
    """The stock pipeline on the same embeddings and start noise, one prompt after the other, each without padding."""
    start, found = start_noise(pipeline, len(prompts)), []
    pipe.scheduler = flow.OnSchedule(pipeline.schedule(flow.STEPS, "diffusers"))
    negative, _ = pipe.encode_prompt(flow.NEGATIVE)
    for i, prompt in enumerate(prompts):
        embeds, mask = pipe.encode_prompt(prompt, max_sequence_length=LENGTH)
        assert mask is None
        found.append(
            pipe(
                prompt_embeds=embeds, negative_prompt_embeds=negative if scale > 1 else None, true_cfg_scale=scale,
                latents=pack(start[i : i + 1]), num_inference_steps=flow.STEPS, output_type=output,
                height=pipeline.image_shape[1], width=pipeline.image_shape[2], max_sequence_length=LENGTH,
            ).images
        )  # fmt: skip
    return torch.cat(found)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_ode_sampling_equals_the_stock_pipeline_called_without_padding(folder: Path, scale: float) -> None:
    pipeline = shared(folder)
    negative = pipeline.encode([flow.NEGATIVE]) if pipeline.passes(scale) == 2 else None
    final = flow.sample_ode(pipeline, pipeline.encode(flow.PROMPTS), negative, scale)
    expected = stock_call(stock(folder), pipeline, flow.PROMPTS, scale, "latent")
    assert_same_sum(pack(final), expected)
    images = stock_call(stock(folder), pipeline, flow.PROMPTS, scale, "pt")
    assert_same_sum(pipeline.decode(final), images)
    assert (final - start_noise(pipeline, 2)).abs().mean() > 0.1  # the network did something


@pytest.mark.slow
def test_a_padded_batch_of_the_stock_pipeline_is_equal_too_at_a_size_that_is_not_square(folder: Path) -> None:
    pipeline = shared(folder).resized(24, 16)
    assert pipeline.latent_shape == (4, 12, 8)
    assert shared(folder).latent_shape == (4, 8, 8)
    cond, pipe = pipeline.encode(flow.PROMPTS), stock(folder)
    pipe.scheduler = flow.OnSchedule(pipeline.schedule(flow.STEPS, "diffusers"))
    latents = pipe(
        prompt_embeds=cond.tensors["embeds"], prompt_embeds_mask=cond.tensors["mask"], height=24, width=16,
        latents=pack(start_noise(pipeline, 2)), num_inference_steps=flow.STEPS, output_type="latent",
    ).images  # fmt: skip
    final = flow.sample_ode(pipeline, cond, None, 1.0)
    assert_same_sum(pack(final), latents)


def test_prompts_and_scales_change_the_image(folder: Path) -> None:
    pipeline, x = shared(folder), start_noise(shared(folder), 1).expand(2, -1, -1, -1)
    timestep, cond = torch.full((2,), 700.0), pipeline.encode(flow.PROMPTS)
    with torch.no_grad():
        one, other = pipeline.network(x, timestep, cond)
        guided = pipeline.guided(pipeline.network, cond, pipeline.encode([flow.NEGATIVE]), 4.0)
        outputs = guided(x, torch.tensor(0.7), torch.tensor(700.0))
    assert (one - other).abs().mean() > 1e-3
    assert (outputs[0] - one).abs().mean() > 1e-3
    # Every token of the guided output has the norm of the positive one's.
    tokens, positive = pack(outputs), pack(torch.stack([one, other]))
    assert_same_sum(tokens.norm(dim=-1), positive.norm(dim=-1))


def test_columns_that_are_padding_for_all_are_dropped_and_a_full_mask_is_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, seen = shared(folder), []
    forward = pipeline.denoiser.forward

    def noted(**given: Any) -> Any:
        seen.append((given["encoder_hidden_states"].shape[1], given["encoder_hidden_states_mask"]))
        return forward(**given)

    monkeypatch.setattr(pipeline.denoiser, "forward", noted)
    cond, x = pipeline.encode(flow.PROMPTS), start_noise(pipeline, 2)
    lengths = cond.tensors["mask"].sum(1).tolist()
    assert cond.tensors["embeds"].shape[1] == LENGTH > max(lengths) > min(lengths)
    with torch.no_grad():
        together = pipeline.network(x, torch.tensor([700.0, 300.0]), cond)
        alone = pipeline.network(x[:1], torch.tensor([700.0]), cond[0])
    assert [length for length, _ in seen] == [max(lengths), lengths[0]]
    assert seen[0][1] is not None
    assert seen[1][1] is None
    assert_same_sum(together[:1], alone)


@pytest.mark.slow
def test_encoding_equals_stock_and_is_cut_where_stock_cuts(folder: Path) -> None:
    cond = shared(folder).encode(flow.PROMPTS)
    for i, prompt in enumerate(flow.PROMPTS):
        embeds, _ = stock(folder).encode_prompt(prompt, max_sequence_length=LENGTH)
        n = embeds.shape[1]
        assert torch.equal(cond.tensors["embeds"][i, :n], embeds[0])
        assert not cond.tensors["embeds"][i, n:].any()
        assert cond.tensors["mask"][i].tolist() == [True] * n + [False] * (LENGTH - n)
    short, _ = stock(folder).encode_prompt(flow.PROMPTS[1], max_sequence_length=6)
    cut = load(folder, max_sequence_length=6).encode(flow.PROMPTS)
    assert torch.equal(cut.tensors["embeds"][1], short[0])
    assert cut.tensors["mask"].all()


@pytest.mark.slow
def test_known_prompts_stay_after_the_encoder_is_freed(folder: Path) -> None:
    flow.check_known_prompts_stay(load(folder))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "checkpointed"), [(torch.float32, False), (torch.bfloat16, True)], ids=str)
def test_replay_is_exact_and_every_lora_tensor_that_can_learn_has_gradient(
    folder: Path, dtype: torch.dtype, checkpointed: bool
) -> None:
    pipeline = load(folder, dtype, gradient_checkpointing=checkpointed)
    policy = flow.adapted(pipeline)
    idle = flow.check_replay(pipeline, policy, pipeline.encode(flow.PROMPTS), pipeline.encode([flow.NEGATIVE]), 4.0)
    # The prompt's half of the last block ends in nothing.
    blind = ("add_q_proj", "to_add_out", "txt_mlp")
    assert idle == {n for n in policy.parameters if "transformer_blocks.1" in n and any(part in n for part in blind)}
    assert 0 < len(idle) < len(policy.parameters) / 4


@pytest.mark.slow
def test_a_saved_lora_gives_the_same_images_in_stock(folder: Path, tmp_path: Path) -> None:
    pipeline = load(folder)
    plain = flow.sample_ode(pipeline, pipeline.encode(flow.PROMPTS), pipeline.encode([flow.NEGATIVE]), 4.0)
    policy = flow.adapted(pipeline)
    ours = flow.sample_ode(pipeline, pipeline.encode(flow.PROMPTS), pipeline.encode([flow.NEGATIVE]), 4.0)
    assert (ours - plain).abs().mean() > 1e-3
    assert flow.ALPHA != 2 * policy.config["r"]  # the scale travels too
    assert pipeline.save_lora(tmp_path, policy.tensors(), policy.config).is_file()
    pipe = family_sampling.fresh_stock(QwenImagePipeline, folder, tmp_path)
    assert_same_sum(pack(ours), stock_call(pipe, pipeline, flow.PROMPTS, 4.0, "latent"))


@pytest.mark.slow
def test_images_survive_the_autoencoders_normalisation_and_carry_gradient(folder: Path) -> None:
    mean, std = (torch.tensor(v)[:, None, None] for v in ([0.1, -0.2, 0.3, -0.4], [0.5, 1.5, 2.0, 0.8]))

    def normalised(vae: Any, images: Tensor) -> Tensor:
        return (vae.encode(images.unsqueeze(2)).latent_dist.mode()[:, :, 0] - mean) / std

    flow.check_autoencoder(shared(folder), load(folder, vae_slice=2), normalised)


def test_the_schedule_is_stocks_with_another_shift_where_asked_for(folder: Path) -> None:
    pipeline = load(folder, height=512, width=512)
    assert pipeline.latent_shape == (4, 256, 256)
    flow.check_schedule_is_stocks(pipeline.resized(16, 16), 0.5 + 0.4 * (16 - 256) / (8192 - 256))
    schedule = pipeline.resized(64, 64).schedule(10, "diffusers")  # 32 x 32 latents, 256 tokens: mu is 0.5
    torch.testing.assert_close(schedule.sigma, dynamic_sigmas(10, 0.5, terminal=0.02), atol=1e-6, rtol=0)
    assert torch.equal(schedule.sigma, pipeline.resized(64, 64).schedule(10, "linspace").sigma)
    torch.testing.assert_close(schedule.timestep, 1000 * schedule.sigma[:-1], atol=1e-4, rtol=0)
    # Published: 1024 tokens, mu 0.538710.
    table = [1, .928970, .851485, .766624, .673281, .570117, .455497, .327400, .183301, .02, 0]  # fmt: skip
    wanted = pipeline.resized(128, 128).schedule(10, "diffusers").sigma
    torch.testing.assert_close(wanted, torch.tensor(table), atol=1e-6, rtol=0)
    shifted = pipeline.schedule(3, "diffusers", shift=2.0).sigma
    u = torch.tensor([1, 4 / 5, 1 / 2])  # 2 u / (1 + u) of 1, 2/3, 1/3
    torch.testing.assert_close(shifted[:-1], 1 - (1 - u) * 0.98 / 0.5, atol=1e-6, rtol=0)


def test_packing_is_undone() -> None:
    x = torch.arange(2 * 3 * 4 * 6.0).view(2, 3, 4, 6)
    tokens = pack(x)
    assert tokens.shape == (2, 6, 12)
    assert tokens[0, 4].tolist() == [x[0, c, 2 + i, 2 + j] for c in range(3) for i in range(2) for j in range(2)]
    assert torch.equal(unpack(tokens, (3, 4, 6)), x)


# ---- what is known and what is refused -------------------------------------------------------------------------------


@pytest.mark.slow
def test_known_checkpoints_have_the_published_size_and_the_targets_bind() -> None:
    for model in flow.published(FAMILY):
        family_sampling.check_published(FAMILY, model, 20_430_401_088)


def test_wrong_folders_targets_and_options_are_refused(folder: Path, tmp_path: Path) -> None:
    family_sampling.check_targets(FAMILY, folder, "attn.to_qkv")
    flow.check_another_class_is_refused(FAMILY, tmp_path)
    with pytest.raises(ValueError, match=r"pipeline\.width \(18\) must be a multiple of 4"):
        load(folder, width=18)
    with pytest.raises(ValueError, match=r"max_sequence_length \(1025\) must lie in 1 \.\. 1024"):
        load(folder, max_sequence_length=1025)
    pipeline = shared(folder)
    with pytest.raises(ValueError, match="qwen_image takes no source image"):
        pipeline.encode(["a"], [[torch.zeros(3, 4, 4)]])
    with pytest.raises(ValueError, match="reads a negative prompt"):
        pipeline.guided(pipeline.network, pipeline.encode(["a"]), None, 4.0)
    with pytest.raises(ValueError, match="shift must be positive"):
        pipeline.schedule(4, "diffusers", shift=0.0)
    with pytest.raises(ValueError, match=r"shape \[b, 3, 16, 16\]"):
        pipeline.encode_images(torch.zeros(1, 3, 8, 8))
