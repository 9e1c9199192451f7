"""Random FLUX.2 pipelines of a few hundred thousand parameters, real in every class: dev, klein and klein base."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
import transformers
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
)

LENGTH = 40  # tokens of a prompt with its chat template
WIDTH = 16

_KLEIN_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<reply>{% endif %}{% if enable_thinking is defined and not enable_thinking %}<no>"
    "{% endif %}"
)
_DEV_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'][:1] }}>{% if message['role'] == 'user' %}"
    "{{ message['content'][0]['text'] }}{% endif %}{% endfor %}"
)


def _tokenizer(template: str) -> Any:
    """One token per letter: Qwen2's byte-level tokenizer without merges."""
    special = ["<|endoftext|>", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    letters = dict.fromkeys([*special, *string.ascii_letters, *string.digits, *string.punctuation, "Ġ"])
    tokenizer = transformers.Qwen2Tokenizer(vocab={letter: i for i, letter in enumerate(letters)}, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": special[1:]})
    tokenizer.chat_template = template
    return tokenizer


def _language_model(kind: Any, tokenizer: Any, num_layers: int) -> dict[str, Any]:
    config = kind(
        vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=num_layers,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    return config  # type: ignore[no-any-return]


def _parts(*, guidance_embeds: bool) -> dict[str, Any]:
    """Network, autoencoder with statistics that do something, and scheduler, of 64 x 64 images."""
    vae = AutoencoderKLFlux2(
        latent_channels=4, sample_size=64, layers_per_block=1, norm_num_groups=4, block_out_channels=(4, 4, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        mid_block_add_attention=False,
    )  # fmt: skip
    vae.bn.running_mean.copy_(torch.linspace(-0.5, 0.5, 16))
    vae.bn.running_var.copy_(torch.linspace(0.5, 2.0, 16))
    return {
        "vae": vae,
        "transformer": Flux2Transformer2DModel(
            in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=3 * WIDTH, timestep_guidance_channels=32, axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=guidance_embeds,
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
    }  # fmt: skip


def save_tiny_flux2(folder: Path, *, distilled: bool = False) -> Path:
    """A klein pipeline: base, which is guided in two passes, or distilled, which is not guided."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokenizer = _tokenizer(_KLEIN_TEMPLATE)
        text_encoder = transformers.Qwen3ForCausalLM(_language_model(transformers.Qwen3Config, tokenizer, 27))
        pipe = Flux2KleinPipeline(
            tokenizer=tokenizer, text_encoder=text_encoder, is_distilled=distilled, **_parts(guidance_embeds=False)
        )
    pipe.save_pretrained(folder)
    return folder


def save_tiny_flux2_dev(folder: Path) -> Path:
    """A FLUX.2-dev pipeline, whose network takes the guidance scale."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokenizer = _tokenizer(_DEV_TEMPLATE)
        processor = transformers.PixtralProcessor(
            image_processor=transformers.PixtralImageProcessor(), tokenizer=tokenizer, chat_template=_DEV_TEMPLATE
        )
        vision = transformers.PixtralVisionConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=16, patch_size=8
        )
        text_encoder = transformers.Mistral3ForConditionalGeneration(
            transformers.Mistral3Config(
                vision_config=vision, text_config=_language_model(transformers.MistralConfig, tokenizer, 30)
            )
        )
        pipe = Flux2Pipeline(tokenizer=processor, text_encoder=text_encoder, **_parts(guidance_embeds=True))
    pipe.save_pretrained(folder)
    return folder
