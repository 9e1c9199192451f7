"""What the makers of the embedded models share: examples encoded once, held-out scores, and the folders they write."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from flowrl.config.train import resolve_path
from flowrl.pipelines import Pipeline
from flowrl.pipelines.weights.stock_loading import quiet_libraries
from flowrl.pretraining.label_head import LabelHead
from flowrl.pretraining.network_training import WrongCaptions, in_low_precision, save_atomically, train_denoiser
from flowrl.prompts.identity import distinct
from flowrl.prompts.loading import Prompt, eval_items, read_prompts
from flowrl.rewards import Reward
from flowrl.runtime.files import read_json
from flowrl.runtime.progress import progress
from flowrl.runtime.randomness import sample_normals
from flowrl.statistics.bootstrap import Interval
from flowrl.statistics.means import ScoreRow, stratified_score, task_scores
from flowrl.statistics.paired import best_of_prompt
from flowrl.training.heldout import generate
from flowrl.training.prompting import reward_inputs

SAMPLES = 4
"""Images, clips or edits of each held-out prompt that a model's README speaks of."""


def prepare(out: str) -> Path:
    """Makes the folder of a pre-training, and silences the libraries."""
    quiet_libraries()
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def encode_once(
    what: str, path: Path, total: int, size: int, encode: Callable[[range], tuple[dict[str, Tensor], list[str]]]
) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors by name, and prompts, of all examples, which `encode` makes of a range of their numbers, `size` at a
    time; those of the file at `path` once it is there. Raises ValueError: the file is of an older version."""
    if path.exists():
        saved = torch.load(path, weights_only=True)
        if "prompts" not in saved:
            raise ValueError(f"{path} was written by an older version: delete it, so that it is made again")
        return saved, saved.pop("prompts")
    pieces: list[dict[str, Tensor]] = []
    prompts: list[str] = []
    with progress(f"encoding {what}", -(-total // size)) as advance, torch.no_grad():
        for first in range(0, total, size):
            latents, texts = encode(range(first, min(first + size, total)))
            pieces.append(latents)
            prompts += texts
            advance("")
    joined = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
    save_atomically({**joined, "prompts": prompts}, path)
    return joined, prompts


def learn(
    pipe: Any, parts: Sequence[str], error: Callable[..., Tensor], head: LabelHead, what: str,
    encode: Callable[..., tuple[dict[str, Tensor], list[str]]], config: WrongCaptions, out: Path, *, at_once: int = 128,
) -> float:  # fmt: skip
    """A denoiser's two courses: from right examples until it can, then from some wrong ones until it does so sometimes.
    Returns its seconds, with earlier sessions. The pipeline after the first course is at `out/clean`.

    Args:
        parts: names of what learns; the autoencoder is finished.
        error: of an update, `error(pipe, *latents, prompts, config, step)`.
        head: hooked to the denoiser; taken away at the end.
        what: what the examples are, in one word.
        encode: `encode(pipe.vae, config, course, numbers, wrong)`: latents by name and, last, labels of the examples
            of these numbers, and their prompts; `wrong` is the share that is, and `course` tells the two sets apart.
        at_once: examples that are encoded together.
    """

    def loss(pipe: Any, *given: Any) -> Tensor:
        *latents, labels, prompts, config, step = given
        found = error(pipe, *latents, prompts, config, step)
        return found + config.label_weight * head.error(labels)

    def course(name: str, settings: WrongCaptions, count: int, wrong: float) -> float:
        drawn = partial(encode, pipe.vae, config, name, wrong=wrong)
        found, prompts = encode_once(what, out / f"{what}-{name}.pt", count, at_once, drawn)
        return train_denoiser(pipe, parts, loss, list(found.values()), prompts, settings, out, name=name, head=head)

    seconds = course("clean", config, config.num_right, 0.0)
    write_asset(pipe, out / "clean", half=False)
    later = replace(config, steps=config.wrong_steps, lr=config.wrong_lr)
    seconds += course("wrong", later, config.num_wrong, config.wrong)
    head.remove()
    return seconds


def autoencoder_of(model: str) -> AutoencoderKL:
    """That of a pipeline folder or asset:NAME, frozen."""
    return AutoencoderKL.from_pretrained(resolve_path(model) / "vae").requires_grad_(False)


def describe(
    out: Path, folder: Path, config: WrongCaptions, seconds: float, *, load: Callable[[str], Pipeline], prompts: str,
    reward: Reward, num_steps: int, guidance_scale: float, wrongs: Mapping[str, str],
) -> Path:  # fmt: skip
    """Scores a finished model on four samples of each held-out prompt and writes its README with what came out.

    Args:
        out: folder of the making; what could be drawn before wrong examples is measured at `out/clean`.
        prompts: an asset's file of held-out prompts.
        reward: 1 for a right sample, else 0.
        wrongs: by task, what a wrong example shows.
    """

    def rows(model: Path) -> list[ScoreRow]:
        pipeline = load(str(model))
        items = eval_items(distinct(read_prompts(resolve_path(prompts))), samples_per_prompt=SAMPLES)
        values = held_out_values(
            pipeline,
            [item.prompt for item in items],
            [item.sample for item in items],
            reward,
            num_steps=num_steps,
            guidance_scale=guidance_scale,
        )
        return [
            ScoreRow(task=item.prompt.metadata["tag"], prompt=item.prompt_id, sample=item.sample, value=value)
            for item, value in zip(items, values, strict=True)
        ]

    can, found = task_scores(best_of_prompt(rows(out / "clean"))), rows(folder)
    does = task_scores(found)
    table = "\n".join(f"| {task} | {_share(can[task])} | {_share(does[task])} | {wrongs[task]} |" for task in wrongs)
    facts = {"score": stratified_score(found), "table": table, "count": len(found)}
    return write_readme(folder, config, seconds, facts)


def _share(found: Interval) -> str:
    return f"{found.mean:.2f} ({found.low:.2f} to {found.high:.2f})"


def readme_text(name: str) -> str:
    """The README of an asset, with {fields} for what is measured."""
    return (resources.files("flowrl.pretraining") / "readmes" / f"{name}.md").read_text(encoding="utf-8")


def write_readme(folder: Path, config: Any, seconds: float, facts: Mapping[str, Any]) -> Path:
    """Writes README.md, filled with facts, minutes and settings, into an asset's folder; returns the folder."""
    text = readme_text(folder.name).format(minutes=seconds / 60, **facts, **asdict(config))
    (folder / "README.md").write_text(text, encoding="utf-8")
    return folder


def held_out_values(
    pipeline: Pipeline, prompts: Sequence[Prompt], samples: Sequence[int], reward: Reward, *, num_steps: int,
    guidance_scale: float,
) -> list[float]:  # fmt: skip
    """The reward of one sample per prompt; its start noise is drawn by the prompt and the number of the sample."""
    keys = [(0, "eval", row.noise_name, sample) for row, sample in zip(prompts, samples, strict=True)]
    values: list[float] = []
    for numbers, drawn in draw(pipeline, prompts, keys, num_steps, guidance_scale, "scoring"):
        part, group = prompts[numbers.start : numbers.stop], torch.tensor(numbers)
        inputs = reward_inputs(pipeline, part, drawn, group=group, numbers=numbers, iteration=0)
        values += reward(inputs).values.tolist()
    return values


def scaled_latents(vae: Any, images: Tensor) -> Tensor:
    """Latents of images in [-1, 1] as the denoiser of an `AutoencoderKL` sees them (in low precision)."""
    with in_low_precision():
        mean = vae.encode(images).latent_dist.mean.float()
    return (mean - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor


@torch.no_grad()
def draw(
    pipeline: Pipeline, prompts: Sequence[Prompt], keys: Sequence[tuple[int | str, ...]], num_steps: int,
    guidance_scale: float, label: str, *, batch_size: int = 24,
) -> Iterator[tuple[range, Tensor]]:  # fmt: skip
    """Samples of prompts by the deterministic sampler, in batches with their places; noise is drawn by the keys."""
    schedule = pipeline.schedule(num_steps, "diffusers")
    with progress(label, -(-len(prompts) // batch_size)) as advance:
        for first in range(0, len(prompts), batch_size):
            part = range(first, min(first + batch_size, len(prompts)))
            x = sample_normals(pipeline.latent_shape, keys[part.start : part.stop])
            yield part, generate(pipeline, prompts[first : part.stop], x, schedule, guidance_scale=guidance_scale)
            advance("")


def write_asset(pipe: Any, folder: Path, *, half: bool = True) -> Path:
    """Writes a stock pipeline folder, in float16 (`half`), which keeps a shipped model small. CLIP tokenizers get the
    plain vocabulary files that older readers expect."""
    staged = folder.with_name(f".{folder.name}.writing")
    if half:
        pipe.to(torch.float16)
    pipe.vae.register_to_config(_name_or_path="")  # the folder of this machine that it was read from
    pipe.save_pretrained(staged)
    if half:
        pipe.to(torch.float32)
    for path in staged.glob("tokenizer*/tokenizer.json"):
        model = read_json(path, finite=False)["model"]
        if "merges" not in model:
            continue
        merges = [" ".join(pair) for pair in model["merges"]]
        vocabulary = json.dumps(model["vocab"], ensure_ascii=False, indent=0) + "\n"
        path.with_name("vocab.json").write_text(vocabulary, encoding="utf-8")
        path.with_name("merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")
    if folder.exists():
        shutil.rmtree(folder)
    staged.rename(folder)
    return folder
