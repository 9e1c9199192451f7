"""Makes the embedded model from scratch: `flowrl pretrain [key=value ...]`.

Three stages, each resumable, every batch a function of (seed, stage, step):

1. an `AutoencoderKL` learns to reconstruct drawn scenes (absolute error + a small KL term);
2. a fixed set of scenes is drawn and encoded once;
3. the SD3 transformer and its three text encoders learn the flow-matching velocity on these latents,
   `|| v(x_sigma, sigma, prompt) - (noise - clean) ||^2` with `sigma = shift(u)`, `u` uniform (Esser et al., arXiv
   2403.03206, section 3), and a tenth of the prompts empty so that classifier-free guidance works.

Deliberately left out: perceptual and adversarial terms of the autoencoder, and noise levels drawn logit-normally.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.benchmarks.geneval.metadata import TASKS
from flowrl.pipelines.families.sd3 import FAMILY
from flowrl.pretrain.making import encode_once, held_out_values, prepare, scaled_latents, write_asset, write_readme
from flowrl.pretrain.network_training import (
    Making,
    Noised,
    reconstructed,
    train_autoencoder,
    train_denoiser,
    velocity_error,
)
from flowrl.pretrain.tiny_sd3 import CONTEXT, GUIDANCE_SCALE, NUM_STEPS, build_tiny_sd3
from flowrl.prompts.loading import Prompt, eval_items
from flowrl.randomness import counter_seed
from flowrl.rewards import build_reward
from flowrl.statistics.means import ScoreRow, stratified_score, task_scores
from flowrl.world.scene_prompts import Record, combinations, eval_records
from flowrl.world.scenes import draw_scene, random_scene

TASK_SHARES = {"single_object": 1, "two_object": 2, "counting": 3, "colors": 1, "position": 3, "color_attr": 3}
"""How often each task is drawn in pre-training."""

_MEASURED = 512  # scenes that latents are measured on


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainConfig(Making):
    """Settings of the embedded model's pre-training."""

    out: str = "runs/pretrain"
    vae_steps: int = 1150
    """Updates of the autoencoder."""
    vae_batch_size: int = 32
    """Scenes per autoencoder update."""
    vae_lr: float = 2e-3
    """Peak learning rate of the autoencoder."""
    kl_weight: float = 5e-4
    """Weight of the autoencoder's mean KL term."""
    num_scenes: int = 24_576
    """Scenes encoded once for stage 3."""
    steps: int = 5200
    lr: float = 1.2e-3
    ema_decay: float = 0.998
    """Decay of the averaged weights that are shipped."""
    shift: float = 3.0
    """Shift of the training noise levels."""


def scene_batch(indices: range, seed: int, stage: str) -> tuple[Tensor, list[Record]]:
    """Draws scenes by number: images float32 `[n, 3, 64, 64]` in [-1, 1] and the records that hold in them."""
    by_task = {task: [r for group in groups for r in group] for task, groups in combinations().items()}
    tasks = list(TASK_SHARES)
    shares = np.asarray([TASK_SHARES[t] for t in tasks], dtype=np.float64)
    images, records = [], []
    for index in indices:
        rng = np.random.default_rng(counter_seed(seed, "scene", stage, index))
        choices = by_task[tasks[int(rng.choice(len(tasks), p=shares / shares.sum()))]]
        record = choices[int(rng.integers(len(choices)))]
        images.append(draw_scene(random_scene(record, rng)))
        records.append(record)
    stack = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float()
    return stack / 127.5 - 1.0, records


def reconstruction_loss(pipe: Any, config: PretrainConfig, step: int) -> Tensor:
    """Absolute error of reconstructed scenes plus the weighted KL of their posteriors (in low precision)."""
    first = step * config.vae_batch_size
    images, _ = scene_batch(range(first, first + config.vae_batch_size), config.seed, "vae")
    decoded, kl = reconstructed(pipe.vae, images, config.seed, step)
    return (decoded - images).abs().mean() + config.kl_weight * kl


@torch.no_grad()
def set_latent_statistics(vae: Any, seed: int) -> None:
    """Writes `shift_factor` and `scaling_factor`, of some scenes' latents, into the autoencoder's configuration."""
    images, _ = scene_batch(range(_MEASURED), seed, "latent statistics")
    latents = torch.cat([vae.encode(chunk).latent_dist.mean for chunk in images.split(64)])
    vae.register_to_config(
        shift_factor=round(float(latents.mean()), 4), scaling_factor=round(1.0 / float(latents.std()), 4)
    )


def encode_scenes(vae: Any, path: Path, count: int, seed: int, stage: str) -> tuple[Tensor, list[str]]:
    """Latents `[count, 8, 8, 8]` in float16, scaled as the network sees them, and prompts of drawn scenes."""

    def encode(numbers: range) -> tuple[dict[str, Tensor], list[str]]:
        images, records = scene_batch(numbers, seed, stage)
        return {"latents": scaled_latents(vae, images)}, [str(record["prompt"]) for record in records]

    latents, prompts = encode_once("scenes", path, count, 256, encode)
    return latents["latents"], prompts


def flow_matching_loss(pipe: Any, clean: Tensor, prompts: list[str], config: PretrainConfig, step: int) -> Tensor:
    """Mean squared error of the transformer's velocity."""

    def predict(batch: Noised) -> Tensor:
        embeds, _, pooled, _ = pipe.encode_prompt(
            batch.prompts, batch.prompts, batch.prompts, do_classifier_free_guidance=False, max_sequence_length=CONTEXT
        )
        velocity: Tensor = pipe.transformer(
            batch.x, timestep=1000 * batch.sigma, encoder_hidden_states=embeds, pooled_projections=pooled,
            return_dict=False,
        )[0]  # fmt: skip
        return velocity

    return velocity_error(clean, prompts, config, step, predict)


def held_out_rows(folder: Path) -> list[ScoreRow]:
    """GenEval verdicts of a pipeline folder on the held-out list at the default sampling settings."""
    items = eval_items([Prompt(text=record["prompt"], metadata=record) for record in eval_records()])
    values = held_out_values(
        FAMILY.load(str(folder), dtype=torch.float32, max_sequence_length=CONTEXT, vae_slice=24),
        [item.prompt for item in items], [item.sample for item in items],
        build_reward("geneval", options={"credit": "official"}), num_steps=NUM_STEPS, guidance_scale=GUIDANCE_SCALE,
    )  # fmt: skip
    return [
        ScoreRow(task=item.prompt.metadata["tag"], prompt=item.prompt_id, sample=item.sample, value=value)
        for item, value in zip(items, values, strict=True)
    ]


def main(config: PretrainConfig) -> Path:
    """Runs all stages and returns the folder of the finished pipeline."""
    out = prepare(config.out, config.threads)
    pipe = build_tiny_sd3(config.seed)
    train_autoencoder(pipe.vae, lambda step: reconstruction_loss(pipe, config, step), config, out)
    set_latent_statistics(pipe.vae, config.seed)
    latents, prompts = encode_scenes(pipe.vae, out / "latents.pt", config.num_scenes, config.seed, "denoiser")
    parts = ("transformer", "text_encoder", "text_encoder_2", "text_encoder_3")
    seconds = train_denoiser(
        pipe, parts, flow_matching_loss, [latents], prompts, config, out, ema_decay=config.ema_decay
    )
    folder = write_asset(pipe, out / "tiny-sd3", half=False)
    rows = held_out_rows(folder)
    tasks = task_scores(rows)
    table = "\n".join(f"| {task} | {tasks[task].mean:.3f} |" for task in TASKS)
    facts = {"score": stratified_score(rows), "table": table, "count": len(rows)}
    return write_readme(folder, config, seconds, facts)
