"""Published checkpoints on random weights: their real dimensions, and answers of order 1."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import diffusers
import pytest
import torch
from torch import nn

from flowrl.pipelines import family, random_weights
from flowrl.pipelines.families.sd3 import FAMILY
from flowrl.pipelines.places import known_checkpoints
from flowrl.pipelines.random_weights import random_pipeline, shorten, vae_config
from flowrl.pipelines.shared.cards import Card
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.training.prompting import encode_prompts, guided

pytestmark = pytest.mark.slow

MEDIUM = "stabilityai/stable-diffusion-3.5-medium"


@pytest.fixture(scope="module")
def shortened() -> FamilyPipeline:
    """SD3.5 Medium of two blocks, one of each kind, instead of 24, at 64 pixels a side, which have 4 x 4 positions: the
    published table has 384 x 384, and making it takes ten times as long as all weights."""

    def few_positions(card: Card, layers: int) -> Card:
        short = shorten(card, layers)
        return replace(short, network=SimpleNamespace(**vars(short.network) | {"pos_embed_max_size": 16}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_weights, "shorten", few_positions)
        return random_pipeline(
            FAMILY, MEDIUM, dtype=torch.float32, device=torch.device("cpu"), layers=1,
            options={"height": 64, "width": 64},
        )  # fmt: skip


def test_dimensions_are_the_published_ones(shortened: FamilyPipeline) -> None:
    whole = FAMILY.meta_denoiser(MEDIUM)
    assert whole is not None
    sizes = {name: tuple(weight.shape) for name, weight in whole.named_parameters()}
    for name, weight in shortened.denoiser.named_parameters():
        if not name.startswith("transformer_blocks.1."):  # one of those without a second attention
            assert tuple(weight.shape) == sizes[name], name
    assert {weight.dtype for weight in shortened.denoiser.parameters()} == {torch.float32}
    assert (
        sum(weight.numel() for weight in shortened.pipe.vae.parameters())
        == known_checkpoints.checkpoints()[MEDIUM].parts["vae"]
    )
    assert next(shortened.pipe.vae.parameters()).dtype == torch.float32


def test_weights_are_of_size_one_over_root_of_fan_in(shortened: FamilyPipeline) -> None:
    block = shortened.pipe.transformer.transformer_blocks[0]
    for layer in (block.attn.to_q, block.norm1.linear, block.ff.net[2]):
        found = float(layer.weight.float().std())
        assert found == pytest.approx(layer.in_features**-0.5, rel=0.02)  # 0.1 % standard error of 10^6 weights
    assert bool((block.attn.norm_q.weight == 1).all())


def test_the_guided_answer_is_of_order_one(shortened: FamilyPipeline) -> None:
    cond = encode_prompts(shortened, ["a red circle"])
    assert cond.tensors["embeds"].shape == (1, 77 + 128, 4096)
    assert not torch.equal(cond.tensors["embeds"], cond.tensors["negative/embeds"])
    schedule = shortened.schedule(4, "diffusers")
    latents = torch.randn(1, *shortened.latent_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        velocity = guided(shortened, shortened.network, cond, 4.5)
        answer = velocity(latents, schedule.sigma[1], schedule.timestep[1])
    assert bool(answer.isfinite().all())
    assert 0.1 < float(answer.std()) < 30


@pytest.mark.parametrize("model", [
    "black-forest-labs/FLUX.1-dev", "Qwen/Qwen-Image", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "Lightricks/LTX-Video",
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers", "Efficient-Large-Model/Sana_600M_512px_diffusers", "Tongyi-MAI/Z-Image",
    "stabilityai/stable-diffusion-xl-base-1.0", "black-forest-labs/FLUX.2-dev", "hunyuanvideo-community/HunyuanVideo",
    "THUDM/CogVideoX-2b", "Efficient-Large-Model/SANA-Video_2B_480p_diffusers",
])  # fmt: skip
def test_autoencoders_have_the_published_number_of_weights(model: str) -> None:
    known = known_checkpoints.checkpoints()[model]
    own = family(known.family)
    card = own.card(model)  # type: ignore[attr-defined]
    kind = getattr(diffusers, known_checkpoints.tables()["families"][known.family]["autoencoder"])
    with torch.device("meta"):
        vae: nn.Module = kind.from_config(vae_config(own, card))  # type: ignore[arg-type]
    assert sum(weight.numel() for weight in vae.parameters()) == known.parts["vae"]


def test_refused_where_no_block_can_be_left_out_or_nothing_is_known() -> None:
    given = {"dtype": torch.float32, "device": torch.device("cpu")}
    with pytest.raises(ValueError, match="no stack of equal blocks"):
        random_pipeline(family("sd"), "CompVis/stable-diffusion-v1-4", layers=1, options={}, **given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nothing is known of me/mine"):
        random_pipeline(FAMILY, "me/mine", options={}, **given)  # type: ignore[arg-type]
