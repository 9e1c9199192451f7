"""Network evaluations of an iteration and of a run, counted in advance by its recipe, and their FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flowrl.config.train import Geometry, TrainConfig
from flowrl.pipelines.places import known_checkpoints
from flowrl.planning.network import Network
from flowrl.planning.published_models import Parts
from flowrl.planning.traces import Trace
from flowrl.recipes.counting import Counts, Passes
from flowrl.runtime.files import read_json
from flowrl.session.preflight import recipe_of
from flowrl.training.budget import Budget
from flowrl.training.drift import KL_PROMPTS, KL_SIGMAS


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCounts:
    """A whole run: its iterations, their sum, and evaluations with the rows of one. `base_rows` count once, at the
    first evaluation, for the base that policies are compared with."""

    iterations: int
    total: Counts
    evaluations: int
    evaluation_rows: int | None
    evaluation_images: int | None
    base_rows: int | None


def of_iteration(config: TrainConfig, iteration: int, passes: Passes, geometry: Geometry) -> Counts:
    """An iteration (or one of its rounds) over all processes; `geometry` is `config.resolve_batch` of these."""
    return recipe_of(config).counts(config).of_iteration(iteration, passes, geometry)


def of_run(config: TrainConfig, passes: Passes, processes: int, num_eval_items: int | None) -> RunCounts:
    """All iterations in a budget (but for seconds), counted as `flowrl.training.learner.NetworkCounter` does, and
    evaluations of `num_eval_items` images, None if unknown."""
    geometry, total, done = config.resolve_batch(processes), Counts(), 0
    recipe = recipe_of(config).counts(config)
    counters: dict[str, Any] = {"images": 0, "seconds": 0.0, "evals": 0, "evaluated": -1}
    often = {"evals": config.budget.evals, "num_iterations": config.num_iterations, "eval_every": config.eval_every}
    budget = Budget(config.budget.limits, counters, **often)
    evaluations = int(budget.evaluates and config.eval.initial)
    for iteration in range(config.num_iterations):
        total = total + recipe.of_iteration(iteration, passes, geometry)
        done = iteration + 1
        counters |= {"nfe/all": total.total, "images": total.images}
        last = done == config.num_iterations or budget.spent() >= 1
        evaluations += budget.evaluation_due(done, last=last)
        if last:
            break
    rows, base = None, None
    if num_eval_items is not None:  # every image by the ODE, and the policy where it is compared with the base
        settings, sampler = config.eval, config.sampler
        steps = settings.num_steps or sampler.num_steps
        each = passes(sampler.guidance_scale if settings.guidance_scale is None else settings.guidance_scale)
        compared = {quarter * steps // KL_SIGMAS for quarter in range(KL_SIGMAS)}
        prompts = min(KL_PROMPTS, num_eval_items // settings.samples_per_prompt)
        rows = (num_eval_items * steps + prompts * len(compared)) * each
        base = prompts * (max(compared) + 1) * each
    return RunCounts(
        iterations=done,
        total=total,
        evaluations=evaluations,
        evaluation_rows=rows,
        evaluation_images=num_eval_items,
        base_rows=base,
    )


def graph_rows(config: TrainConfig, passes: Passes) -> int:
    """Network rows whose activations a trained image holds at once.

    Recipes run each call's backward pass before they build the next graph. backprop keeps all trained calls' graphs,
    and `keep_graphs` the whole rollout's, for all images. A recomputed negative half replaces a freed positive one.
    """
    rows = passes(recipe_of(config).trained_scale(config)) if config.sampler.train_negative is True else 1
    return rows * recipe_of(config).counts(config).graphs()


def negative_again(config: TrainConfig, passes: Passes) -> float:
    """Additional forward passes of `sampler.train_negative: recompute` for a row of the backward pass."""
    twice = passes(recipe_of(config).trained_scale(config)) == 2
    return 0.5 if config.sampler.train_negative == "recompute" and twice else 0.0


FLOOR = 788.0
"""TFLOP/s of bfloat16 matrix products, as measured on an H200; nothing can be faster."""

_DECODE = {"VAE_4": 9.8e6, "VAE_16": 9.8e6, "VAE_32": 9.8e6, "VAE_WAN": 8.5e6}  # FLOPs per decoded pixel and frame
_DECODE_WAN_IMAGE = 10.9e6  # a video's frames share work in time


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """FLOPs by stage; `evaluation` and decoding are None if their number of images is unknown."""

    stages: Mapping[str, float]
    evaluation: float | None
    decoding: float | None

    @property
    def training(self) -> float:
        """FLOPs without evaluations."""
        return sum(self.stages.values()) + (self.decoding or 0.0)

    @property
    def total(self) -> float:
        """All known FLOPs."""
        return self.training + (self.evaluation or 0.0)


def cost_of(
    network: Network,
    run: RunCounts,
    *,
    eval_forward: float,
    decode: float | None,
    eval_decode: float | None,
    recomputed: float,
) -> Cost:
    """FLOPs of a whole run.

    Args:
        network: one evaluation.
        eval_forward: FLOPs of a network evaluation at the size of evaluation images.
        decode, eval_decode: FLOPs of decoding one image, in training and evaluations; None where not known.
        recomputed: forward passes that are repeated for a row of the backward pass.
    """
    total = run.total
    stages = {
        "rollout": network.forward * (total.rollout + total.completion),
        "update": network.forward * total.update + network.backward * total.backward,
        "recomputation": network.forward * total.backward * recomputed,
        "reference": network.forward * total.reference,
    }
    evaluation = None
    if not run.evaluations:
        evaluation = 0.0
    elif run.evaluation_rows is not None:
        images = (run.evaluation_images or 0) * (eval_decode or 0.0)
        evaluation = run.evaluations * (run.evaluation_rows * eval_forward + images)
        evaluation += (run.base_rows or 0) * eval_forward
    return Cost(
        stages={name: value for name, value in stages.items() if value},
        evaluation=evaluation,
        decoding=None if decode is None else decode * total.images,
    )


def decode_flops(model: str, parts: Parts | None, size: tuple[int, int, int | None]) -> float | None:
    """FLOPs of decoding one image or video of (height, width, frames), counted in a folder's `AutoencoderKL` or from a
    published decoder's known cost per pixel; None if unknown."""
    height, width, frames = size
    path = Path(model) / "vae" / "config.json"
    if path.is_file():
        config = read_json(path, finite=False)
        if config.get("_class_name") == "AutoencoderKL":
            from diffusers import AutoencoderKL

            with torch.device("meta"):
                vae = AutoencoderKL.from_config(dict(config))
                factor = 2 ** (len(vae.config.block_out_channels) - 1)
                latent = torch.empty(1, vae.config.latent_channels, height // factor, width // factor)
                with torch.no_grad(), Trace() as counter:
                    vae.decode(latent)
            return counter.total
    kinds = {count: kind for kind, count in known_checkpoints.tables()["part_parameters"].items()}
    kind = kinds.get((parts or {}).get("vae", 0))
    if kind not in _DECODE:
        return None
    each = _DECODE_WAN_IMAGE if kind == "VAE_WAN" and frames is None else _DECODE[kind]
    return each * height * width * (frames or 1)
