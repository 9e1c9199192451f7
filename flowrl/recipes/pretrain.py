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

import json
import math
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowrl.benchmarks.geneval import TASKS, verdict
from flowrl.evaluate import generate
from flowrl.pipelines.sd3 import load, quiet_libraries
from flowrl.pipelines.tiny import CONTEXT, GUIDANCE_SCALE, NUM_STEPS, build_tiny_sd3
from flowrl.progress import progress
from flowrl.prompts import Prompt, eval_items
from flowrl.randomness import counter_seed, sample_normals
from flowrl.statistics import ScoreRow, stratified_score, task_scores
from flowrl.strict_yaml import build_settings
from flowrl.world.detector import color_of, detect_shapes
from flowrl.world.prompts import Record, combinations, eval_records
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


def pretrain_config(overrides: Sequence[str]) -> PretrainConfig:
    """Settings from `key=value` texts; unknown keys and wrong types are refused as in a training run."""
    return build_settings(PretrainConfig, overrides, command="pretrain")


def learning_rate(step: int, steps: int, peak: float, warmup: int = 100) -> float:
    """Linear warm-up, then a cosine down to a fiftieth of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def scene_batch(indices: range, seed: int, stage: str) -> tuple[Tensor, list[Record]]:
    """Draws scenes by number: pictures float32 `[n, 3, 64, 64]` in [-1, 1] and the records that hold in them."""
    by_task = {task: [r for group in groups for r in group] for task, groups in combinations().items()}
    tasks = list(TASK_SHARES)
    shares = np.asarray([TASK_SHARES[t] for t in tasks], dtype=np.float64)
    pictures, records = [], []
    for index in indices:
        rng = np.random.default_rng(counter_seed(seed, "scene", stage, index))
        choices = by_task[tasks[int(rng.choice(len(tasks), p=shares / shares.sum()))]]
        record = choices[int(rng.integers(len(choices)))]
        pictures.append(draw_scene(random_scene(record, rng)))
        records.append(record)
    stack = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float()
    return stack / 127.5 - 1.0, records


def save_atomically(state: dict[str, Any], path: Path) -> None:
    """Writes a torch file beside its place and moves it there, so that a stop leaves the old one whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.writing")
    torch.save(state, temporary)
    os.replace(temporary, path)


def train_vae(pipe: Any, config: PretrainConfig, out: Path) -> None:
    """Stage 1: trains `pipe.vae`, then sets its `shift_factor` and `scaling_factor` from 512 scenes' latents."""
    vae, path = pipe.vae, out / "vae.pt"
    optimizer = torch.optim.AdamW(vae.parameters(), lr=config.vae_lr, betas=(0.9, 0.99), weight_decay=0.0)
    start = 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        vae.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = int(saved["step"])
    with progress("autoencoder", config.vae_steps, start) as advance:
        for step in range(start, config.vae_steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, config.vae_steps, config.vae_lr)
            first = step * config.vae_batch_size
            pictures, _ = scene_batch(range(first, first + config.vae_batch_size), config.seed, "vae")
            noise = torch.Generator().manual_seed(counter_seed(config.seed, "vae noise", step))
            with torch.autocast("cpu", torch.bfloat16):
                posterior = vae.encode(pictures).latent_dist
                latents = posterior.mean + posterior.std * torch.randn(posterior.mean.shape, generator=noise)
                decoded = vae.decode(latents).sample
            error = (decoded.float() - pictures).abs().mean()
            kl = 0.5 * (posterior.mean.float() ** 2 + posterior.var.float() - 1 - posterior.logvar.float()).mean()
            optimizer.zero_grad(set_to_none=True)
            (error + config.kl_weight * kl).backward()
            nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
            optimizer.step()
            advance(f"error {error.item():.4f}  kl {kl.item():.2f}")
            if (step + 1) % 200 == 0 or step + 1 == config.vae_steps:
                state = {"model": vae.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                save_atomically(state, path)
    with torch.no_grad():
        pictures, _ = scene_batch(range(512), config.seed, "latent statistics")
        latents = torch.cat([vae.encode(chunk).latent_dist.mean for chunk in pictures.split(64)])
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
            pictures, new = scene_batch(range(first, last), config.seed, "denoiser")
            with torch.autocast("cpu", torch.bfloat16):
                mean = pipe.vae.encode(pictures).latent_dist.mean.float()
            latents.append(((mean - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor).half())
            records += new
            advance("")
    joined = torch.cat(latents)
    save_atomically({"latents": joined, "records": records}, path)
    return joined, records


def flow_matching_loss(pipe: Any, clean: Tensor, prompts: list[str], config: PretrainConfig, step: int) -> Tensor:
    """Mean squared error of the velocity at one random noise level a picture (bfloat16 network, float32 loss)."""
    generator = torch.Generator().manual_seed(counter_seed(config.seed, "flow matching", step))
    noise = torch.randn(clean.shape, generator=generator)
    uniform = torch.rand(len(clean), generator=generator)
    sigma = config.shift * uniform / (1 + (config.shift - 1) * uniform)
    kept = torch.rand(len(clean), generator=generator) >= config.prompt_dropout
    shown = [p if k else "" for p, k in zip(prompts, kept.tolist(), strict=True)]
    x = (1 - sigma)[:, None, None, None] * clean + sigma[:, None, None, None] * noise
    with torch.autocast("cpu", torch.bfloat16), torch.random.fork_rng(devices=[]):
        torch.manual_seed(counter_seed(config.seed, "dropout", step))  # the T5 encoder's
        embeds, _, pooled, _ = pipe.encode_prompt(
            shown, shown, shown, do_classifier_free_guidance=False, max_sequence_length=CONTEXT
        )
        velocity = pipe.transformer(
            x, timestep=1000 * sigma, encoder_hidden_states=embeds, pooled_projections=pooled, return_dict=False
        )[0]
    return nn.functional.mse_loss(velocity.float(), noise - clean)


def train_denoiser(pipe: Any, config: PretrainConfig, out: Path) -> float:
    """Stage 3: trains transformer and text encoders; writes `pipeline-<step>` folders with the averaged weights.

    Returns the seconds it took, earlier sessions included.
    """
    latents, records = encode_scenes(pipe, config, out)
    parts = nn.ModuleDict({name: getattr(pipe, name) for name in
                           ("transformer", "text_encoder", "text_encoder_2", "text_encoder_3")})  # fmt: skip
    parts.train()
    parameters = [p for p in parts.parameters() if p.requires_grad]
    average = {name: value.detach().clone() for name, value in parts.state_dict().items()}
    optimizer = torch.optim.AdamW(parameters, lr=config.lr, betas=(0.9, 0.98), weight_decay=0.01)
    path, start, spent = out / "denoiser.pt", 0, 0.0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        parts.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        average, start, spent = saved["average"], int(saved["step"]), float(saved["seconds"])
    recent, begun = 0.0, time.monotonic()
    with progress("denoiser", config.steps, start) as advance:
        for step in range(start, config.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, config.steps, config.lr)
            rng = np.random.default_rng(counter_seed(config.seed, "batch", step))
            chosen = rng.integers(len(latents), size=config.batch_size)
            prompts = [str(records[i]["prompt"]) for i in chosen]
            loss = flow_matching_loss(pipe, latents[torch.from_numpy(chosen)].float(), prompts, config, step)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            decay = min(config.ema_decay, (1 + step) / (10 + step))
            with torch.no_grad():
                for name, value in parts.state_dict().items():
                    if value.is_floating_point():
                        average[name].lerp_(value, 1 - decay)
            recent = loss.item() if step == start else 0.98 * recent + 0.02 * loss.item()
            advance(f"loss {recent:.4f}")
            if (step + 1) % config.checkpoint_every == 0 or step + 1 == config.steps:
                state = {"model": parts.state_dict(), "optimizer": optimizer.state_dict(), "average": average,
                         "step": step + 1, "seconds": spent + time.monotonic() - begun}  # fmt: skip
                save_atomically(state, path)
                save_averaged(pipe, parts, average, out / f"pipeline-{step + 1:05d}")
    return spent + time.monotonic() - begun


def save_averaged(pipe: Any, parts: nn.ModuleDict, average: dict[str, Tensor], folder: Path) -> None:
    """Writes a stock pipeline folder whose trained parts hold the averaged weights; the live weights stay."""
    live = {name: value.detach().clone() for name, value in parts.state_dict().items()}
    parts.load_state_dict(average)
    pipe.save_pretrained(folder)
    parts.load_state_dict(live)


def write_asset(pipeline: Path, asset: Path, config: PretrainConfig, seconds: float) -> Path:
    """Copies a pipeline folder to its final place, with the tokenizer's plain files and a README with its scores."""
    shutil.copytree(pipeline, asset, dirs_exist_ok=True)
    for name in ("tokenizer", "tokenizer_2"):
        model = json.loads((asset / name / "tokenizer.json").read_text(encoding="utf-8"))["model"]
        merges = [" ".join(pair) for pair in model["merges"]]
        vocabulary = json.dumps(model["vocab"], ensure_ascii=False, indent=0) + "\n"
        (asset / name / "vocab.json").write_text(vocabulary, encoding="utf-8")
        (asset / name / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")
    rows = held_out_rows(asset)
    score, tasks = stratified_score(rows), task_scores(rows)
    table = "\n".join(f"| {task} | {tasks[task].mean:.3f} |" for task in TASKS)
    (asset / "README.md").write_text(
        _README.format(
            score=score, table=table, steps=config.steps, batch=config.batch_size, vae_steps=config.vae_steps,
            vae_batch=config.vae_batch_size, minutes=seconds / 60, threads=config.threads, count=len(rows),
        ),
        encoding="utf-8",
    )  # fmt: skip
    return asset


def held_out_rows(folder: Path) -> list[ScoreRow]:
    """GenEval verdicts of a pipeline folder on the held-out list at the default sampling settings."""
    pipeline = load(str(folder), dtype=torch.float32, max_sequence_length=CONTEXT, vae_slice=24)
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
            pictures = (images.permute(0, 2, 3, 1) * 255).round().to(torch.uint8).numpy()
            for item, picture in zip(batch, pictures, strict=True):
                record = item.prompt.metadata
                correct = verdict(detect_shapes(picture), record, color_of=partial(color_of, picture)).correct
                rows.append(
                    ScoreRow(task=record["tag"], prompt=item.prompt_id, sample=item.sample, value=float(correct))
                )
            advance("")
    return rows


_README = """# tiny-sd3

A complete `StableDiffusion3Pipeline` folder for 64 x 64 pictures of coloured shapes, made by `flowrl pretrain` from
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
    return write_asset(out / f"pipeline-{config.steps:05d}", out / "tiny-sd3", config, seconds)
