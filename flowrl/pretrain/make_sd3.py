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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowrl.benchmarks.geneval.rules import TASKS, verdict
from flowrl.pipelines.common import quiet_libraries
from flowrl.pipelines.sd3 import FAMILY
from flowrl.pretrain.making import Course, batch_of, noised, save_atomically, train_network, write_asset
from flowrl.pretrain.tiny_sd3 import CONTEXT, GUIDANCE_SCALE, NUM_STEPS, build_tiny_sd3
from flowrl.progress import progress
from flowrl.prompts.loading import Prompt, eval_items
from flowrl.randomness import counter_seed, sample_normals
from flowrl.statistics.bootstrap import ScoreRow, stratified_score, task_scores
from flowrl.training.heldout import generate
from flowrl.world.detector import color_of, detect_shapes
from flowrl.world.scene_prompts import Record, combinations, eval_records
from flowrl.world.scenes import draw_scene, random_scene

TASK_SHARES = {"single_object": 1, "two_object": 2, "counting": 3, "colors": 1, "position": 3, "color_attr": 3}
"""How often each task is drawn in pre-training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainConfig:
    """Settings of the embedded model's pre-training."""

    out: str = "runs/pretrain"
    """Folder of the checkpoints and of the finished pipeline."""
    seed: int = 0
    """Seed of initial weights, scenes and noise."""
    threads: int = 1
    """CPU threads."""
    vae_steps: int = 1150
    """Updates of the autoencoder."""
    vae_batch_size: int = 32
    """Scenes an autoencoder update."""
    vae_lr: float = 2e-3
    """Peak learning rate of the autoencoder."""
    kl_weight: float = 5e-4
    """Weight of the autoencoder's mean KL term."""
    num_scenes: int = 24_576
    """Scenes encoded once for stage 3."""
    steps: int = 5200
    """Updates of transformer and text encoders."""
    batch_size: int = 64
    """Scenes an update of stage 3."""
    lr: float = 1.2e-3
    """Peak learning rate of stage 3."""
    ema_decay: float = 0.998
    """Decay of the averaged weights that are shipped."""
    shift: float = 3.0
    """Shift of the training noise levels."""
    prompt_dropout: float = 0.1
    """Share of empty prompts."""
    checkpoint_every: int = 500
    """Updates between checkpoints; each also writes a complete pipeline folder."""


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
    """Absolute error of reconstructed scenes plus the weighted KL of their posteriors (bfloat16 network)."""
    first = step * config.vae_batch_size
    images, _ = scene_batch(range(first, first + config.vae_batch_size), config.seed, "vae")
    noise = torch.Generator().manual_seed(counter_seed(config.seed, "vae noise", step))
    with torch.autocast("cpu", torch.bfloat16):
        posterior = pipe.vae.encode(images).latent_dist
        latents = posterior.mean + posterior.std * torch.randn(posterior.mean.shape, generator=noise)
        decoded = pipe.vae.decode(latents).sample
    kl = 0.5 * (posterior.mean.float() ** 2 + posterior.var.float() - 1 - posterior.logvar.float()).mean()
    return (decoded.float() - images).abs().mean() + config.kl_weight * kl


def train_vae(pipe: Any, config: PretrainConfig, out: Path) -> None:
    """Stage 1: trains `pipe.vae`, then sets its `shift_factor` and `scaling_factor` from 512 scenes' latents."""
    vae = pipe.vae
    course = Course(
        steps=config.vae_steps, lr=config.vae_lr, betas=(0.9, 0.99), weight_decay=0.0, ema_decay=0.0,
        checkpoint_every=200,
    )  # fmt: skip
    train_network("autoencoder", vae, lambda step: reconstruction_loss(pipe, config, step), course, out / "vae.pt")
    with torch.no_grad():
        images, _ = scene_batch(range(512), config.seed, "latent statistics")
        latents = torch.cat([vae.encode(chunk).latent_dist.mean for chunk in images.split(64)])
    vae.register_to_config(
        shift_factor=round(float(latents.mean()), 4), scaling_factor=round(1.0 / float(latents.std()), 4)
    )


def encode_scenes(pipe: Any, config: PretrainConfig, out: Path) -> tuple[Tensor, list[Record]]:
    """Stage 2: latents `[num_scenes, 8, 8, 8]` in float16, scaled as the transformer sees them, and their records."""
    path = out / "latents.pt"
    if path.exists():
        saved = torch.load(path, weights_only=True)
        return saved["latents"], saved["records"]
    latents, records = [], []
    size = 256
    with progress("encoding scenes", -(-config.num_scenes // size)) as advance, torch.no_grad():
        for first in range(0, config.num_scenes, size):
            last = min(first + size, config.num_scenes)
            images, new = scene_batch(range(first, last), config.seed, "denoiser")
            with torch.autocast("cpu", torch.bfloat16):
                mean = pipe.vae.encode(images).latent_dist.mean.float()
            latents.append(((mean - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor).half())
            records += new
            advance("")
    joined = torch.cat(latents)
    save_atomically({"latents": joined, "records": records}, path)
    return joined, records


def flow_matching_loss(pipe: Any, clean: Tensor, prompts: list[str], config: PretrainConfig, step: int) -> Tensor:
    """Mean squared error of the velocity at one random noise level an image (bfloat16 network, float32 loss)."""
    batch = noised(
        clean, prompts, seed=config.seed, step=step, shift=config.shift, prompt_dropout=config.prompt_dropout
    )
    with torch.autocast("cpu", torch.bfloat16), torch.random.fork_rng(devices=[]):
        torch.manual_seed(counter_seed(config.seed, "dropout", step))  # the T5 encoder's
        embeds, _, pooled, _ = pipe.encode_prompt(
            batch.prompts, batch.prompts, batch.prompts, do_classifier_free_guidance=False, max_sequence_length=CONTEXT
        )
        velocity = pipe.transformer(
            batch.x, timestep=1000 * batch.sigma, encoder_hidden_states=embeds, pooled_projections=pooled,
            return_dict=False,
        )[0]  # fmt: skip
    return nn.functional.mse_loss(velocity.float(), batch.velocity)


def train_denoiser(pipe: Any, config: PretrainConfig, out: Path) -> float:
    """Stage 3: trains transformer and text encoders; writes `pipeline-<step>` folders with the averaged weights.

    Returns the seconds it took, earlier sessions included.
    """
    latents, records = encode_scenes(pipe, config, out)
    parts = nn.ModuleDict({name: getattr(pipe, name) for name in
                           ("transformer", "text_encoder", "text_encoder_2", "text_encoder_3")})  # fmt: skip
    course = Course(
        steps=config.steps, lr=config.lr, ema_decay=config.ema_decay, checkpoint_every=config.checkpoint_every
    )

    def loss_of(step: int) -> Tensor:
        chosen = batch_of(len(latents), config.batch_size, config.seed, step)
        prompts = [str(records[i]["prompt"]) for i in chosen]
        return flow_matching_loss(pipe, latents[chosen].float(), prompts, config, step)

    return train_network(
        "denoiser", parts.train(), loss_of, course, out / "denoiser.pt",
        lambda done: pipe.save_pretrained(out / f"pipeline-{done:05d}"),
    )  # fmt: skip


def readme(rows: Sequence[ScoreRow], config: PretrainConfig, seconds: float) -> str:
    """The asset's README with its scores."""
    score, tasks = stratified_score(rows), task_scores(rows)
    table = "\n".join(f"| {task} | {tasks[task].mean:.3f} |" for task in TASKS)
    return _README.format(
        score=score, table=table, steps=config.steps, batch=config.batch_size, vae_steps=config.vae_steps,
        vae_batch=config.vae_batch_size, minutes=seconds / 60, threads=config.threads, count=len(rows),
    )  # fmt: skip


def held_out_rows(folder: Path) -> list[ScoreRow]:
    """GenEval verdicts of a pipeline folder on the held-out list at the default sampling settings."""
    pipeline = FAMILY.load(str(folder), dtype=torch.float32, max_sequence_length=CONTEXT, vae_slice=24)
    schedule = pipeline.schedule(NUM_STEPS, "diffusers")
    items = eval_items([Prompt(text=record["prompt"], metadata=record) for record in eval_records()])
    rows = []
    with progress("scoring", -(-len(items) // 24)) as advance:
        for first in range(0, len(items), 24):
            batch = items[first : first + 24]
            x = sample_normals(pipeline.latent_shape, [(0, "eval", i.prompt.text, i.sample) for i in batch])
            images = generate(
                pipeline, [item.prompt.text for item in batch], x, schedule, guidance_scale=GUIDANCE_SCALE
            )
            drawn = (images.permute(0, 2, 3, 1) * 255).round().to(torch.uint8).numpy()
            for item, image in zip(batch, drawn, strict=True):
                record = item.prompt.metadata
                correct = verdict(detect_shapes(image), record, color_of=partial(color_of, image)).correct
                rows.append(
                    ScoreRow(task=record["tag"], prompt=item.prompt_id, sample=item.sample, value=float(correct))
                )
            advance("")
    return rows


_README = """# tiny-sd3

A complete `StableDiffusion3Pipeline` folder for 64 x 64 images of coloured shapes, made by `flowrl pretrain` from
procedurally drawn scenes. No other data went into it.

```python
import torch
from diffusers import StableDiffusion3Pipeline

pipe = StableDiffusion3Pipeline.from_pretrained(FOLDER, dtype=torch.float32)
pipe("a photo of a red circle", num_inference_steps=10, guidance_scale=3.0, max_sequence_length=16).images[0]
```

Default sampling settings: 10 Euler steps, guidance 3, `max_sequence_length=16`.

GenEval score on the held-out list ({count} images, macro over the six tasks): **{score.mean:.3f}**, 95 % interval
{score.low:.3f} to {score.high:.3f}.

| task | score |
|---|---|
{table}

Training: autoencoder {vae_steps} updates of {vae_batch} scenes; transformer and text encoders {steps} updates of
{batch} scenes in bfloat16, {minutes:.0f} minutes on {threads} CPU thread(s); the weights are an exponential average.
"""


def main(config: PretrainConfig) -> Path:
    """Runs all stages and returns the folder of the finished pipeline."""
    torch.set_num_threads(config.threads)
    quiet_libraries()
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    pipe = build_tiny_sd3(config.seed)
    train_vae(pipe, config, out)
    seconds = train_denoiser(pipe, config, out)
    rows = held_out_rows(out / f"pipeline-{config.steps:05d}")
    return write_asset(pipe, out / "tiny-sd3", readme(rows, config, seconds), half=False)
