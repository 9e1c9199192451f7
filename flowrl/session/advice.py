"""What a run is told at its start: its batch sizes, and what is known of few-step checkpoints and a KL's reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flowrl.config.sections import PipelineConfig
from flowrl.config.train import Geometry, TrainConfig, location_of
from flowrl.pipelines.places.known_checkpoints import checkpoints, published
from flowrl.pipelines.shared.cards import read_part
from flowrl.session.preflight import recipe_of


def geometry_of(config: TrainConfig, ranks: int) -> Geometry:
    """How one process splits its images of an iteration; only processes that draw images of their own count as `ranks`.
    Raises ValueError: the images do not divide by these processes, or a group would be split."""
    geometry = config.resolve_batch(ranks)
    micro = recipe_of(config).counts(config).micro_batch_size
    if micro is None:
        return geometry
    size = micro(ranks)
    count = geometry.images_per_process // size // config.updates_per_rollout
    return replace(geometry, micro_batch_size=size, micro_batches_per_update=count)


def sizes_line(config: TrainConfig, ranks: int) -> str:
    """Names the batch sizes that are smaller than configured, with the reason; empty if there are none."""
    geometry = geometry_of(config, ranks)
    own = geometry.images_per_process
    found = []
    for key, images in (("rollout_batch_size", own), ("micro_batch_size", own // config.updates_per_rollout)):
        given, taken = getattr(config, key), getattr(geometry, key)
        if given is not None and taken != given:
            found.append(f"{key} is {taken}, the largest up to {given} that divides {images} images")
    return "; ".join(found)


FEW = 8
"""Largest published number of steps of a few-step checkpoint."""
NAMES = ("turbo", "lightning", "schnell", "distill", "hyper-sd", "lcm")
"""Words in the names of such checkpoints."""

SMALL_CLIP = 1e-5
"""The clip range of RTDMD (arXiv 2605.26108), which trains models of four steps."""


def is_few_step(settings: PipelineConfig) -> bool:
    """Whether a model is distilled to few steps, by its entry in the table of checkpoints, its index or its name."""
    model = location_of(settings)
    known = published(model)
    if known is not None:
        return known.sampling.get("num_steps", FEW + 1) <= FEW or bool(known.index.get("is_distilled"))
    index = read_part(model, "model_index.json") if Path(model).is_dir() else None
    return bool((index or {}).get("is_distilled")) or any(word in Path(model).name.lower() for word in NAMES)


def undistilled(model: str) -> str | None:
    """A published checkpoint of the family that is not distilled, with the same network if there is one."""
    known = checkpoints()
    own = known.get(model)
    if own is None:
        return None
    family = [name for name, one in known.items() if one.family == own.family]
    full = [name for name in family if not is_few_step(PipelineConfig(model=name))]
    return next((name for name in full if known[name].network == own.network), next(iter(full), None))


def few_step_advice(config: TrainConfig) -> tuple[str, ...]:
    """What is known about tuning a few-step checkpoint with this recipe, then what helps; empty for other models."""
    if not is_few_step(config.pipeline) or recipe_of(config).REGRESSES is None:
        return ()
    name = config.pipeline.model
    base = undistilled(name)
    if recipe_of(config).REGRESSES:
        known = (
            f"{name} is distilled to few steps, and recipe {config.recipe} trains it to predict what many steps lead "
            "to. Runs of others gained reward for a while, then images blurred (DiffusionNFT's authors do not support "
            "it; Flow-Factory saw blur after 4,000 to 5,000 steps without a KL)"
        )
        advice = ["take recipe=grpo with sampler.kernel=cps, whose noise stays finite at the first step"]
        if config.kl_coef == 0:
            advice.append("else set kl_coef above 0")
        advice.append("stop early, at the evaluation before sharpness falls")
    else:
        known = (
            f"{name} is distilled to few steps. Policy gradients keep to its own steps, but users of such models "
            "report collapse, and blur in long runs without a KL"
        )
        advice = (
            [] if config.sampler.kernel == "cps" else ["sampler.kernel=cps, whose noise stays finite at the first step"]
        )
        if max(config.clip_bounds) > SMALL_CLIP:
            advice.append(f"a small clip_range ({SMALL_CLIP:g} helped others)")
        advice += ["steps and guidance as published", "short runs"]
    if base is not None:
        advice.append(f"or train {base}, which is not distilled, and distil it after")
    if not watches_sharpness(config):
        advice.append("and watch sharpness: add {name: jpeg_compressibility, weight: 0} to rewards")
    return (known, f"what helps: {'; '.join(advice)}")


def watches_sharpness(config: TrainConfig) -> bool:
    """Whether a reward measures fine detail: an image with little of it makes a small JPEG file."""
    return any((reward.name or "").startswith("jpeg_") for reward in (*config.rewards, *config.eval.rewards))


def reference_notes(config: TrainConfig) -> tuple[str, ...]:
    """A note that the reference of a run from a LoRA is the model without that LoRA; empty for other runs."""
    lora, beyond = config.policy.init_lora, config.num_iterations + 1
    if lora is None or config.kl_coef == 0 or config.kl_reference != "base":
        return ()
    return (
        f"kl_reference=base is the model without {lora}, so the KL pulls back past the LoRA that the run starts from. "
        f"To stay near that LoRA, set kl_reference={beyond}, which no iteration reaches",
    )
