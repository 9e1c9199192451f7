"""Makes the embedded model from scratch: `flowrl pretrain [key=value ...]`.

Four stages, each resumable, every batch a function of (seed, stage, step):

1. an `AutoencoderKL` learns to reconstruct drawn scenes (absolute error + a small KL term), or is taken from a model;
2. fixed sets of scenes are drawn and encoded once;
3. the SD3 transformer and its three text encoders learn the flow-matching velocity on these latents,
   `|| v(x_sigma, sigma, prompt) - (noise - clean) ||^2` with `sigma = shift(u)`, `u` uniform (Esser et al., arXiv
   2403.03206, section 3), and a tenth of the prompts empty so that classifier-free guidance works; a head on the third
   block's image tokens learns what each shows (`label_head.py`). Afterwards the model can draw what it is asked;
4. it learns on from captions of which a share is wrong in one thing (`flowrl.world.captions`), as captions of photos
   from the web are. Afterwards it does so only sometimes: what reinforcement learning is to bring out.

Deliberately left out: perceptual and adversarial terms of the autoencoder, and noise levels drawn logit-normally.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.pipelines.families.sd3 import FAMILY
from flowrl.pretraining.label_head import LabelHead, label_map
from flowrl.pretraining.making import autoencoder_of, describe, learn, prepare, scaled_latents, write_asset
from flowrl.pretraining.network_training import (
    Noised,
    OwnAutoencoder,
    WrongCaptions,
    reconstruct,
    train_autoencoder,
    velocity_error,
)
from flowrl.pretraining.tiny_sd3 import CONTEXT, GUIDANCE_SCALE, NUM_STEPS, build_tiny_sd3
from flowrl.rewards import build_reward
from flowrl.runtime.randomness import counter_seed
from flowrl.world.captions import WRONG, neighbour
from flowrl.world.scene_prompts import OPENINGS, Record, combinations, word_record
from flowrl.world.scenes import draw_scene, random_scene

PARTS = ("transformer", "text_encoder", "text_encoder_2", "text_encoder_3")
"""What learns."""

TASK_SHARES = {"single_object": 1, "two_object": 2, "counting": 3, "colors": 1, "position": 3, "color_attr": 4}
"""How often each task is drawn in pre-training."""

_MEASURED = 512  # scenes that latents are measured on


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainConfig(OwnAutoencoder):
    """Settings of the embedded model's pre-training."""

    out: str = "runs/pretrain"
    vae_steps: int = 1150
    vae_batch_size: int = 32
    kl_weight: float = 5e-4
    steps: int = 5000
    lr: float = 5e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenes:
    """Drawn scenes."""

    images: Tensor
    """Float32 `[n, 3, 64, 64]` in [-1, 1]."""
    labels: Tensor
    """Uint8 `[n, 8, 8]`, what each patch shows."""
    records: list[Record]
    """The records under which they stand; all that are not wrong hold."""


def scene_batch(indices: range, seed: int, stage: str, wrong: float = 0.0) -> Scenes:
    """Draws scenes by number, a share of them `wrong`: they show a neighbour of what their record says."""
    by_task = {task: [r for group in groups for r in group] for task, groups in combinations().items()}
    tasks = list(TASK_SHARES)
    shares = np.asarray([TASK_SHARES[t] for t in tasks], dtype=np.float64)
    images, labels, records = [], [], []
    for index in indices:
        rng = np.random.default_rng(counter_seed(seed, "scene", stage, index))
        choices = by_task[tasks[int(rng.choice(len(tasks), p=shares / shares.sum()))]]
        record = choices[int(rng.integers(len(choices)))]
        shapes = random_scene(neighbour(record, rng) if rng.random() < wrong else record, rng)
        images.append(draw_scene(shapes))
        labels.append(label_map(shapes))
        records.append(word_record(record, OPENINGS[int(rng.integers(len(OPENINGS)))]))
    stack = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float()
    return Scenes(images=stack / 127.5 - 1.0, labels=torch.from_numpy(np.stack(labels)), records=records)


def reconstruction_loss(pipe: Any, config: PretrainConfig, step: int) -> Tensor:
    """Absolute error of reconstructed scenes plus the weighted KL of their posteriors (in low precision)."""
    first = step * config.vae_batch_size
    images = scene_batch(range(first, first + config.vae_batch_size), config.seed, "vae").images
    decoded, kl = reconstruct(pipe.vae, images, config.seed, step)
    return (decoded - images).abs().mean() + config.kl_weight * kl


@torch.no_grad()
def set_latent_statistics(vae: Any, seed: int) -> None:
    """Writes `shift_factor` and `scaling_factor`, of some scenes' latents, into the autoencoder's configuration."""
    images = scene_batch(range(_MEASURED), seed, "latent statistics").images
    latents = torch.cat([vae.encode(chunk).latent_dist.mean for chunk in images.split(64)])
    vae.register_to_config(
        shift_factor=round(float(latents.mean()), 4), scaling_factor=round(1.0 / float(latents.std()), 4)
    )


def encoded_scenes(
    vae: Any, config: WrongCaptions, course: str, numbers: range, wrong: float
) -> tuple[dict[str, Tensor], list[str]]:
    """For `making.learn`: latents [8, 8, 8] in float16, scaled, and labels of drawn scenes, and their prompts."""
    scenes = scene_batch(numbers, config.seed, course, wrong)
    parts = {"latents": scaled_latents(vae, scenes.images).half(), "labels": scenes.labels}
    return parts, [str(record["prompt"]) for record in scenes.records]


def flow_matching_loss(pipe: Any, clean: Tensor, prompts: list[str], config: PretrainConfig, step: int) -> Tensor:
    """Mean squared error of the transformer's velocity."""

    def predict(batch: Noised) -> Tensor:
        embeds, _, pooled, _ = pipe.encode_prompt(
            batch.prompts, batch.prompts, batch.prompts, do_classifier_free_guidance=False, max_sequence_length=CONTEXT
        )
        return pipe.transformer(
            batch.x,
            timestep=1000 * batch.sigma,
            encoder_hidden_states=embeds,
            pooled_projections=pooled,
            return_dict=False,
        )[0]

    return velocity_error(clean, prompts, config, step, predict)


def build(config: PretrainConfig, out: Path) -> Any:
    """The pipeline with its autoencoder trained, or taken from another model."""
    pipe = build_tiny_sd3(config.seed)
    if config.vae:
        pipe.vae = autoencoder_of(config.vae)
        return pipe
    train_autoencoder(pipe.vae, lambda step: reconstruction_loss(pipe, config, step), config, out)
    set_latent_statistics(pipe.vae, config.seed)
    return pipe


def main(config: PretrainConfig) -> Path:
    """Runs all stages and returns the folder of the finished pipeline."""
    out = prepare(config.out)
    pipe = build(config, out)
    head = LabelHead(pipe.transformer.transformer_blocks[2], pipe.transformer.inner_dim, lambda blocks: blocks[1])
    seconds = learn(pipe, PARTS, flow_matching_loss, head, "scenes", encoded_scenes, config, out)
    return describe(
        out, write_asset(pipe, out / "tiny-sd3", half=False), config, seconds, num_steps=NUM_STEPS,
        guidance_scale=GUIDANCE_SCALE, load=partial(FAMILY.load, dtype=torch.float32, max_sequence_length=CONTEXT),
        prompts="asset:prompts/world_heldout.jsonl", reward=build_reward("geneval", options={"credit": "official"}),
        wrongs=WRONG,
    )  # fmt: skip
