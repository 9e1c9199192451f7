"""What the makers of the embedded models share: a resumable training loop with averaged weights, and assets.

Every batch is a function of (seed, stage, step), so that a stopped pre-training goes on as if it had not stopped.
"""

from __future__ import annotations

import importlib
import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowrl.config.options import unknown_name
from flowrl.config.strict_yaml import build_settings
from flowrl.config.train import resolve_path
from flowrl.files import replacing
from flowrl.pipelines import Pipeline
from flowrl.progress import progress
from flowrl.prompts.loading import Prompt, read_prompts
from flowrl.randomness import counter_seed, sample_normals
from flowrl.rewards import Reward
from flowrl.statistics.bootstrap import Interval, bootstrap_mean
from flowrl.training.heldout import generate
from flowrl.training.prompting import reward_inputs

MODELS: dict[str, tuple[str, str]] = {
    "kontext": ("flowrl.pretrain.make_kontext", "KontextConfig"),
    "prompts": ("flowrl.pretrain.make_prompts", "PromptsConfig"),
    "scorer": ("flowrl.pretrain.make_scorer", "ScorerConfig"),
    "sd15": ("flowrl.pretrain.make_sd15", "Sd15Config"),
    "sd3": ("flowrl.pretrain.make_sd3", "PretrainConfig"),
    "wan": ("flowrl.pretrain.make_wan", "WanConfig"),
}
"""What `flowrl pretrain` makes: name -> module with `main(config) -> Path`, and its settings."""


def pretrain(arguments: Sequence[str]) -> Path:
    """Makes the model that the first argument names, sd3 without one, by the `key=value` texts after it.

    Raises:
        ValueError: there is no such model; an unknown key or a wrong type, refused as in a training run.
    """
    named = bool(arguments) and "=" not in arguments[0]
    name, overrides = (arguments[0], arguments[1:]) if named else ("sd3", arguments)
    if name not in MODELS:
        raise ValueError(f"pretrain: {unknown_name('model', name, MODELS)}")
    module_name, settings = MODELS[name]
    module = importlib.import_module(module_name)
    config = build_settings(getattr(module, settings), overrides, command=f"pretrain {name}")
    made: Path = module.main(config)
    return made


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """Length and pace of one training.

    Attributes:
        steps: updates.
        lr: peak learning rate, after a linear warm-up and before a cosine down to a fiftieth.
        lr_steps: updates that the learning rate's course is laid out for; 0 takes `steps`.
        checkpoint_every: updates between checkpoints.
        betas: of AdamW.
        weight_decay: of AdamW.
        ema_decay: decay of the averaged weights; 0 keeps none.
    """

    steps: int
    lr: float
    checkpoint_every: int = 200
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    ema_decay: float = 0.998
    lr_steps: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Noised:
    """A batch for flow matching.

    Attributes:
        x: `(1 - sigma) clean + sigma noise`, as clean.
        sigma: [b], noise levels.
        velocity: `noise - clean`, what is learned.
        prompts: [b], some of them empty.
        generator: what further random numbers of the update come from.
    """

    x: Tensor
    sigma: Tensor
    velocity: Tensor
    prompts: list[str]
    generator: torch.Generator


def noised(
    clean: Tensor, prompts: Sequence[str], *, seed: int, step: int, shift: float, prompt_dropout: float
) -> Noised:
    """Latents at one random level each, `sigma = shift u / (1 + (shift - 1) u)` with u uniform.

    Source: Esser et al., arXiv 2403.03206, eq. 23.
    """
    generator = torch.Generator().manual_seed(counter_seed(seed, "flow matching", step))
    noise = torch.randn(clean.shape, generator=generator)
    uniform = torch.rand(len(clean), generator=generator)
    sigma = shift * uniform / (1 + (shift - 1) * uniform)
    level = sigma.view(-1, *[1] * (clean.ndim - 1))
    return Noised(
        x=(1 - level) * clean + level * noise, sigma=sigma, velocity=noise - clean,
        prompts=some_empty(prompts, prompt_dropout, generator), generator=generator,
    )  # fmt: skip


def some_empty(prompts: Sequence[str], share: float, generator: torch.Generator) -> list[str]:
    """Prompts of which a random share is left out, as classifier-free guidance needs it."""
    kept = torch.rand(len(prompts), generator=generator) >= share
    return [text if keep else "" for text, keep in zip(prompts, kept.tolist(), strict=True)]


def batch_of(total: int, size: int, seed: int, step: int) -> list[int]:
    """Which examples an update learns from."""
    drawn: list[int] = np.random.default_rng(counter_seed(seed, "batch", step)).integers(total, size=size).tolist()
    return drawn


def learning_rate(step: int, steps: int, peak: float, warmup: int = 100) -> float:
    """Linear warm-up, then a cosine down to a fiftieth of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def save_atomically(state: Any, path: Path) -> None:
    """Writes a torch file; a stop leaves the old one whole."""
    with replacing(path) as stream:
        torch.save(state, stream)


def train_network(
    name: str,
    network: nn.Module,
    loss_of: Callable[[int], Tensor],
    course: Course,
    path: Path,
    save: Callable[[int], None] | None = None,
) -> float:
    """Minimises a loss, from the checkpoint at `path` if there is one.

    Args:
        name: for the progress bar.
        network: what is trained; holds the averaged weights afterwards, where there is an average.
        loss_of: the loss of an update by its number.
        course: length and pace.
        path: checkpoint file.
        save: called with the number of updates at every checkpoint, while the network holds the averaged weights.

    Returns:
        The seconds that training took, earlier sessions included.
    """
    parameters = [p for p in network.parameters() if p.requires_grad]
    average = {key: value.detach().clone() for key, value in network.state_dict().items()} if course.ema_decay else {}
    optimizer = torch.optim.AdamW(parameters, lr=course.lr, betas=course.betas, weight_decay=course.weight_decay)
    start, spent = 0, 0.0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        network.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        average, start, spent = saved["average"], int(saved["step"]), float(saved["seconds"])
    recent, begun = 0.0, time.monotonic()
    with progress(name, course.steps, start) as advance:
        for step in range(start, course.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, course.lr_steps or course.steps, course.lr)
            loss = loss_of(step)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            _average(network, average, min(course.ema_decay, (1 + step) / (10 + step)))
            recent = loss.item() if step == start else 0.98 * recent + 0.02 * loss.item()
            advance(f"loss {recent:.4f}")
            done = step + 1
            if done % course.checkpoint_every == 0 or done == course.steps:
                state = {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "average": average,
                         "step": done, "seconds": spent + time.monotonic() - begun}  # fmt: skip
                save_atomically(state, path)
                if save is not None:
                    live = {key: value.detach().clone() for key, value in network.state_dict().items()}
                    network.load_state_dict(average or live)
                    save(done)
                    network.load_state_dict(live)
    if average:
        network.load_state_dict(average)
    return spent + time.monotonic() - begun


@torch.no_grad()
def _average(network: nn.Module, average: dict[str, Tensor], decay: float) -> None:
    for key, value in network.state_dict().items() if average else ():
        if value.is_floating_point():
            average[key].lerp_(value, 1 - decay)


def describe(
    folder: Path, readme: str, config: Any, seconds: float, *, pipeline: Pipeline, prompts: str, count: int,
    reward: Reward, num_steps: int, guidance_scale: float,
) -> Path:  # fmt: skip
    """Scores a finished asset on `count` held-out prompts of an asset's file and writes the README with what came out.

    `readme` is filled with score, count, minutes, and the settings of `config`.
    """
    rows = read_prompts(resolve_path(prompts))
    asked = (-(-count // len(rows)) * rows)[:count]
    score = held_out_score(pipeline, asked, reward, num_steps=num_steps, guidance_scale=guidance_scale)
    text = readme.format(score=score, count=len(asked), minutes=seconds / 60, **asdict(config))
    (folder / "README.md").write_text(text, encoding="utf-8")
    return folder


@torch.no_grad()
def held_out_score(
    pipeline: Pipeline, prompts: Sequence[Prompt], reward: Reward, *, num_steps: int, guidance_scale: float,
    batch_size: int = 24,
) -> Interval:  # fmt: skip
    """Mean reward of one sample a prompt by the deterministic sampler, with a 95 % interval."""
    schedule, values = pipeline.schedule(num_steps, "diffusers"), list[float]()
    with progress("scoring", -(-len(prompts) // batch_size)) as advance:
        for first in range(0, len(prompts), batch_size):
            part = prompts[first : first + batch_size]
            x = sample_normals(pipeline.latent_shape, [(0, "eval", row.key, first + i) for i, row in enumerate(part)])
            drawn = generate(pipeline, part, x, schedule, guidance_scale=guidance_scale)
            numbers = range(first, first + len(part))
            inputs = reward_inputs(pipeline, part, drawn, group=torch.tensor(numbers), numbers=numbers, iteration=0)
            values += reward(inputs).values.tolist()
            advance("")
    return bootstrap_mean(values, [row.key for row in prompts])


def write_asset(pipe: Any, folder: Path, readme: str, *, half: bool = True) -> Path:
    """Writes a stock pipeline folder with a README, in float16 (`half`), which keeps a shipped model small.

    CLIP tokenizers get the plain vocabulary files that older readers expect.
    """
    staged = folder.with_name(f".{folder.name}.writing")
    if half:
        pipe.to(torch.float16)
    pipe.save_pretrained(staged)
    if half:
        pipe.to(torch.float32)
    for path in staged.glob("tokenizer*/tokenizer.json"):
        model = json.loads(path.read_text(encoding="utf-8"))["model"]
        if "merges" not in model:
            continue
        merges = [" ".join(pair) for pair in model["merges"]]
        vocabulary = json.dumps(model["vocab"], ensure_ascii=False, indent=0) + "\n"
        path.with_name("vocab.json").write_text(vocabulary, encoding="utf-8")
        path.with_name("merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")
    (staged / "README.md").write_text(readme, encoding="utf-8")
    if folder.exists():
        shutil.rmtree(folder)
    staged.rename(folder)
    return folder
