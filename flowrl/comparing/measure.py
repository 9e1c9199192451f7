"""Measures the saved model of every method in the same way: distance from the base model, and diversity."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from flowrl.config.train import load_config
from flowrl.generation.drawing import find_device
from flowrl.pipelines import Pipeline
from flowrl.pipelines.shared.saved_model import load_saved
from flowrl.pipelines.weights.loading_choices import Loading
from flowrl.pipelines.weights.lora import add_saved_lora
from flowrl.pipelines.weights.trained_weights import TrainedWeights
from flowrl.prompts.loading import EvalItem, eval_items
from flowrl.runtime.files import read_json, write_atomically
from flowrl.runtime.randomness import sample_normals
from flowrl.runtime.shapes import Float
from flowrl.training.drift import KL_PROMPTS, base_sides, spread, velocity_distances
from flowrl.training.heldout import generate
from flowrl.training.model_files import MODEL, digests_of
from flowrl.training.parts import at_eval_size, encode_everything, eval_schedule, load_pipeline, read_prompts
from flowrl.training.prompting import RunPrompts, device_of
from flowrl.training.resume_check import digest_of, inputs_of
from flowrl.trajectory import Schedule

DIVERSITY_PROMPTS, DIVERSITY_SEEDS, PIXELS = 8, 8, 16

DIVERSITY_TEXT = (
    f"mean distance of two images of one prompt from different start noises: root mean square difference of the pixels "
    f"after averaging to {PIXELS} x {PIXELS}, over up to {DIVERSITY_PROMPTS} evaluation prompts and all pairs of "
    f"{DIVERSITY_SEEDS} noises; colour and layout count, fine detail does not"
)


def measure(run_folder: Path, *, base: bool = False) -> dict[str, float]:
    """Distance from the base and diversity of a finished run's trained model; kept in `measure.json` of the run folder.

    Returns "kl" (`flowrl.training.drift.KL_TEXT`), "diversity" (`DIVERSITY_TEXT`) and, with `base`, "base_diversity",
    the diversity before training.
    """
    config = load_config(run_folder / "config.yaml")
    full, kept = config.policy.train == "full", run_folder / "measure.json"
    saved = run_folder / (MODEL if full else "lora")
    assert config.prompts.eval is not None
    prompts = read_prompts(config.prompts, config.prompts.eval)
    inputs = inputs_of(config, RunPrompts(train=(), held_out=tuple(prompts)))
    mark = digest_of(inputs | {"saved": digests_of(saved)})
    if kept.is_file():
        found = read_json(kept, "delete it, it is measured again")
        if found.pop("of", None) == mark and (not base or "base_diversity" in found):
            return found
    later = config.pipeline.free_text_encoders
    trained = load_pipeline(config.pipeline, find_device(config.pipeline.device), Loading(later=later))
    pipeline = at_eval_size(config, trained)
    items = eval_items(prompts, num_prompts=config.eval.num_prompts)
    distinct = [item for item in items if item.sample == 0]  # each once
    compared, drawn = spread(distinct, KL_PROMPTS), spread(distinct, DIVERSITY_PROMPTS)
    if later:
        asked = tuple(item.prompt for item in (*compared, *drawn))
        encode_everything(trained, pipeline, RunPrompts(train=(), held_out=asked))
    trained.load_denoiser()
    policy: TrainedWeights = load_saved(trained, saved) if full else add_saved_lora(trained.denoiser, saved)
    schedule, scale = eval_schedule(config, trained, pipeline), config.eval.guidance_scale
    scale = config.sampler.guidance_scale if scale is None else scale
    sides = base_sides(pipeline, policy, compared, schedule, scale=scale, seed=config.eval.seed)
    result = {
        "kl": sum(velocity_distances(pipeline, policy, sides, schedule, scale=scale)) / len(compared),
        "diversity": diversity_of(pipeline, drawn, schedule, scale=scale),
    }
    if base:
        with policy.under("reference"):
            result["base_diversity"] = diversity_of(pipeline, drawn, schedule, scale=scale)
    write_atomically(kept, json.dumps(result | {"of": mark}) + "\n")
    return result


def diversity_of(pipeline: Pipeline, items: Sequence[EvalItem], schedule: Schedule, *, scale: float) -> float:
    """The diversity (`DIVERSITY_TEXT`) of the network with its current weights."""
    device = device_of(pipeline)
    distances = []
    for item in items:
        keys = [(0, "diversity", item.prompt.noise_name, number) for number in range(DIVERSITY_SEEDS)]
        x = sample_normals(pipeline.latent_shape, keys).to(device)
        distances.append(
            image_spread(generate(pipeline, [item.prompt] * DIVERSITY_SEEDS, x, schedule, guidance_scale=scale))
        )
    return sum(distances) / len(distances)


def image_spread(images: Float[Tensor, " n 3 h w"]) -> float:
    """Mean over pairs of the root mean square difference of images averaged to `PIXELS` x `PIXELS`."""
    frames = images.flatten(1, 2) if images.ndim == 5 else images
    small = torch.nn.functional.adaptive_avg_pool2d(frames.double(), PIXELS).flatten(1)
    return float(torch.nn.functional.pdist(small).mean()) / small.shape[1] ** 0.5
