"""Makes the embedded editing model: `flowrl pretrain kontext [key=value ...]`.

The autoencoder is the embedded SD3 model's. Transformer and text encoders learn the velocity towards the edited image
with the source image's latents as further tokens, `|| v(x_sigma, sigma, instruction, source) - (noise - edited) ||^2`
(FLUX.1 Kontext, arXiv 2506.15742, eq. 1). The guidance that the network is told is drawn from [1, 4] and means nothing.

In three pairs of ten the edit was left undone. Pairs that are collected and filtered by machines have such failures; a
model that learned from them edits only most of the time, which reinforcement learning can mend.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxKontextPipeline
from torch import Tensor, nn

from flowrl.config.train import resolve_path
from flowrl.pipelines.common import pack, quiet_libraries
from flowrl.pipelines.flux import token_ids
from flowrl.pipelines.kontext import FAMILY
from flowrl.pretrain.making import Course, batch_of, describe, noised, save_atomically, train_network, write_asset
from flowrl.pretrain.tiny_families import build_tiny_kontext
from flowrl.pretrain.tiny_sd3 import CONTEXT
from flowrl.progress import progress
from flowrl.randomness import counter_seed
from flowrl.rewards import build_reward
from flowrl.world.edits import WORDS, draw_edit, random_edit

NUM_STEPS, GUIDANCE_SCALE = 8, 2.5
"""Default sampling settings of this model."""

HELD_OUT_IMAGES = 128
"""Edits that its score is measured on."""

_README = """# tiny-kontext

A complete `FluxKontextPipeline` folder that edits 64 x 64 images of coloured shapes ("make the circle blue", "remove
the square", "turn the circle into a triangle"), made by `flowrl pretrain kontext` from procedurally drawn pairs; the
autoencoder is tiny-sd3's. No other data went into it. In {undone:.0%} of the pairs the edit was left undone, so
that the model edits only most of the time. Weights are stored in float16.

```python
import torch
from diffusers import FluxKontextPipeline

pipe = FluxKontextPipeline.from_pretrained(FOLDER, dtype=torch.float32)
pipe(image=IMAGE, prompt="make the circle blue", height=64, width=64, max_area=64 * 64, _auto_resize=False,
     num_inference_steps=8, max_sequence_length=16).images[0]
```

Edits of held-out images in which what was asked changed and nothing else did ({count} edits, 8 steps):
**{score.mean:.3f}**, 95 % interval {score.low:.3f} to {score.high:.3f}. The guidance scale has no effect.

Training: transformer and text encoders {steps} updates of {batch_size} edits in bfloat16, {minutes:.0f} minutes on
{threads} CPU thread(s) of a machine with other work; the weights are an exponential average.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class KontextConfig:
    """Settings of this pre-training."""

    out: str = "runs/pretrain-kontext"
    """Folder of the checkpoints and of the finished pipeline."""
    seed: int = 0
    """Seed of initial weights, scenes and noise."""
    threads: int = 1
    """CPU threads."""
    num_edits: int = 12_288
    """Pairs of images encoded once."""
    undone: float = 0.3
    """Share of the pairs whose edit was left undone, as pairs collected at scale have them: something to unlearn."""
    steps: int = 3000
    """Updates of transformer and text encoders."""
    batch_size: int = 64
    """Edits an update."""
    lr: float = 1e-3
    """Peak learning rate."""
    shift: float = 1.6
    """Shift of the training noise levels; sampling uses exp(mu) of 16 tokens, 1.56."""
    prompt_dropout: float = 0.05
    """Share of empty instructions."""
    checkpoint_every: int = 500
    """Updates between checkpoints; each also writes a complete pipeline folder."""


def encode_edits(pipe: FluxKontextPipeline, config: KontextConfig, path: Path) -> tuple[Tensor, Tensor, list[str]]:
    """Latents `[num_edits, 8, 8, 8]` in float16 of sources and of edited images, and the instructions."""
    if path.exists():
        saved = torch.load(path, weights_only=True)
        return saved["sources"], saved["edited"], saved["prompts"]
    vae = pipe.vae
    sources, edited, prompts, size = [], [], [], 128
    with progress("encoding edits", -(-config.num_edits // size)) as advance, torch.no_grad():
        for first in range(0, config.num_edits, size):
            numbers = range(first, min(first + size, config.num_edits))
            records = [random_edit(np.random.default_rng(counter_seed(config.seed, "edit", n))) for n in numbers]
            pairs = np.stack([np.stack(draw_edit(record)) for record in records])
            images = torch.from_numpy(pairs).permute(1, 0, 4, 2, 3).flatten(0, 1).float() / 127.5 - 1.0
            with torch.autocast("cpu", torch.bfloat16):
                mean = vae.encode(images).latent_dist.mean.float()
            before, after = ((mean - vae.config.shift_factor) * vae.config.scaling_factor).half().chunk(2)
            left = [
                np.random.default_rng(counter_seed(config.seed, "undone", n)).random() < config.undone for n in numbers
            ]
            sources.append(before)
            edited.append(torch.where(torch.tensor(left)[:, None, None, None], before, after))
            prompts += [str(record["prompt"]) for record in records]
            advance("")
    before, after = torch.cat(sources), torch.cat(edited)
    save_atomically({"sources": before, "edited": after, "prompts": prompts}, path)
    return before, after, prompts


def velocity_loss(
    pipe: FluxKontextPipeline, clean: Tensor, source: Tensor, prompts: list[str], config: KontextConfig, step: int
) -> Tensor:
    """Mean squared error of the velocity at one random noise level an image (bfloat16 network, float32 loss)."""
    batch = noised(
        clean, prompts, seed=config.seed, step=step, shift=config.shift, prompt_dropout=config.prompt_dropout
    )
    guidance = 1 + 3 * torch.rand(len(clean), generator=batch.generator)
    tokens, shape = pack(batch.x), clean.shape[1:]
    with torch.autocast("cpu", torch.bfloat16), torch.random.fork_rng(devices=[]):
        torch.manual_seed(counter_seed(config.seed, "dropout", step))  # the T5 encoder's
        embeds, pooled, text_ids = pipe.encode_prompt(batch.prompts, batch.prompts, max_sequence_length=CONTEXT)
        velocity = pipe.transformer(
            hidden_states=torch.cat([tokens, pack(source)], dim=1), timestep=batch.sigma, guidance=guidance,
            pooled_projections=pooled, encoder_hidden_states=embeds, txt_ids=text_ids,
            img_ids=torch.cat([token_ids(shape), token_ids(shape, 1)]), return_dict=False,
        )[0][:, : tokens.shape[1]]  # fmt: skip
    return nn.functional.mse_loss(velocity.float(), pack(batch.velocity))


def main(config: KontextConfig) -> Path:
    """Runs the training and returns the folder of the finished pipeline."""
    torch.set_num_threads(config.threads)
    quiet_libraries()
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    vae = AutoencoderKL.from_pretrained(resolve_path("asset:tiny-sd3") / "vae").requires_grad_(False)
    pipe = build_tiny_kontext(vae, WORDS, config.seed)
    sources, edited, prompts = encode_edits(pipe, config, out / "latents.pt")

    def loss_of(step: int) -> Tensor:
        chosen = batch_of(len(edited), config.batch_size, config.seed, step)
        clean, source = edited[chosen].float(), sources[chosen].float()
        return velocity_loss(pipe, clean, source, [prompts[i] for i in chosen], config, step)

    parts = nn.ModuleDict({name: getattr(pipe, name) for name in ("transformer", "text_encoder", "text_encoder_2")})
    course = Course(steps=config.steps, lr=config.lr, checkpoint_every=config.checkpoint_every)
    seconds = train_network(
        "denoiser", parts.train(), loss_of, course, out / "denoiser.pt",
        lambda n: pipe.save_pretrained(out / f"pipeline-{n:05d}"),
    )  # fmt: skip
    folder = write_asset(pipe, out / "tiny-kontext", "")
    return describe(
        folder, _README, config, seconds,
        pipeline=FAMILY.load(str(folder), dtype=torch.float32, max_sequence_length=CONTEXT, height=64, width=64),
        prompts="asset:prompts/edits_heldout.jsonl", count=HELD_OUT_IMAGES,
        reward=build_reward("edit_verdict", options={"credit": "strict"}), num_steps=NUM_STEPS,
        guidance_scale=GUIDANCE_SCALE,
    )  # fmt: skip
