"""Makes the embedded Stable Diffusion 1 model: `flowrl pretrain sd15 [key=value ...]`.

The autoencoder is the embedded SD3 model's. The network and its text encoder learn to predict the noise,
`|| eps(x_t, t, prompt) - noise ||^2` with `x_t = sqrt(A_t) clean + sqrt(1 - A_t) noise` and t uniform (Ho et al., DDPM,
arXiv 2006.11239, eq. 14), a tenth of the prompts empty so that classifier-free guidance works.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline
from torch import Tensor, nn

from flowrl.pipelines.families.sd import FAMILY
from flowrl.pretraining.label_head import LabelHead
from flowrl.pretraining.make_sd3 import encoded_scenes
from flowrl.pretraining.making import autoencoder_of, describe, learn, prepare, write_asset
from flowrl.pretraining.network_training import WrongCaptions, in_low_precision, some_empty
from flowrl.pretraining.tiny_families import build_tiny_sd15
from flowrl.pretraining.tiny_sd3 import CONTEXT
from flowrl.rewards import build_reward
from flowrl.runtime.randomness import counter_seed
from flowrl.world.captions import WRONG

NUM_STEPS, GUIDANCE_SCALE = 20, 2.0
"""Default sampling settings of this model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sd15Config(WrongCaptions):
    """Settings of this pre-training."""

    out: str = "runs/pretrain-sd15"
    steps: int = 5000
    lr: float = 3e-3


def noise_loss(
    pipe: StableDiffusionPipeline, clean: Tensor, prompts: list[str], config: Sd15Config, step: int
) -> Tensor:
    """Mean squared error of the predicted noise at one random time per image (in low precision, float32 loss). Times
    are drawn with a density that grows with them: late ones, of much noise, decide where things are and how many, and
    the error there is too small to be heard among the others otherwise."""
    generator = torch.Generator().manual_seed(counter_seed(config.seed, "noise", step))
    noise = torch.randn(clean.shape, generator=generator)
    count = pipe.scheduler.config.num_train_timesteps
    time = (count * torch.rand(len(clean), generator=generator).sqrt()).long().clamp(max=count - 1)
    shown = some_empty(prompts, config.prompt_dropout, generator)
    level = pipe.scheduler.alphas_cumprod[time][:, None, None, None]
    x = level.sqrt() * clean + (1 - level).sqrt() * noise
    tokens = pipe.tokenizer(shown, padding="max_length", max_length=CONTEXT, return_tensors="pt").input_ids
    with in_low_precision():
        embeds = pipe.text_encoder(tokens)[0]
        predicted = pipe.unet(x, time, embeds, return_dict=False)[0]
    return nn.functional.mse_loss(predicted.float(), noise)


def main(config: Sd15Config) -> Path:
    """Runs the training and returns the folder of the finished pipeline."""
    out = prepare(config.out)
    pipe = build_tiny_sd15(autoencoder_of("asset:tiny-sd3"), config.seed)
    layer = pipe.unet.up_blocks[0]
    head = LabelHead(layer, pipe.unet.config.block_out_channels[-1], lambda found: found.flatten(2).transpose(1, 2))
    seconds = learn(pipe, ("unet", "text_encoder"), noise_loss, head, "scenes", encoded_scenes, config, out)
    return describe(
        out, write_asset(pipe, out / "tiny-sd15"), config, seconds, num_steps=NUM_STEPS,
        guidance_scale=GUIDANCE_SCALE, load=partial(FAMILY.load, dtype=torch.float32, max_sequence_length=CONTEXT),
        prompts="asset:prompts/world_heldout.jsonl", reward=build_reward("geneval", options={"credit": "official"}),
        wrongs=WRONG,
    )  # fmt: skip
