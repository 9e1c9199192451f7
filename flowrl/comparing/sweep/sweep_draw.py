"""Draws and scores the images of a sweep, prompt by prompt.

Sample k of a prompt starts from the noise of `flowrl.training.heldout`, (seed, "eval", prompt, k), at every scale and
in every run; further candidates of a search have noise of their own, the same in every search.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.benchmarks.diversity import mean_distance
from flowrl.comparing.measure import image_spread
from flowrl.comparing.sweep.sweep_settings import Setting
from flowrl.generation.best_of import candidates, prune_steps
from flowrl.generation.drawing import Make, draw, in_batches
from flowrl.generation.rlg import rlg_velocity
from flowrl.pipelines import Pipeline
from flowrl.prompts.loading import Prompt, spread
from flowrl.rewards import Reward, to_uint8
from flowrl.rewards.base.outputs import check_output
from flowrl.runtime.files import plain
from flowrl.runtime.randomness import sample_normals
from flowrl.runtime.shapes import Float
from flowrl.samplers import Velocity
from flowrl.training.drift import KL_PROMPTS, distance_of
from flowrl.training.prompting import caching, device_of, reward_inputs
from flowrl.trajectory import Schedule

Embed = Callable[[Float[Tensor, " n 3 h w"]], Float[Tensor, " n d"]]
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedModels:
    """A base model with LoRAs side by side, and its sampling. `adapters` are their names by run, "" the swept model."""

    pipeline: Pipeline
    adapters: Mapping[str, str]
    schedule: Schedule
    guidance: float
    base_guidance: float
    batch_size: int
    cache: float = 0.0

    def make(self, scale: float, run: str = "") -> Make:
        """The generator at an RLG scale of a tuned model; scales 0 and 1 run only one of the two models."""

        def velocity(prompts: Sequence[Prompt]) -> Velocity:
            return rlg_velocity(
                self.pipeline,
                [self.adapters[run]],
                prompts,
                [scale],
                guidance_scale=self.guidance,
                base_guidance_scale=self.base_guidance,
            )

        return in_batches(velocity, self.batch_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Judges:
    """Rewards and features that judge the images."""

    rewards: dict[str, Reward]
    """The measured rewards, by name."""
    features: Embed | None = None
    """Features for diversity; None compares only pixels."""
    select: Reward | None = None
    """The reward by which search chooses, and which sub-score of it."""
    part: str | None = None


@torch.no_grad()
def draw_prompts(
    model: TunedModels,
    judges: Judges,
    settings: Sequence[Setting],
    prompts: Sequence[Prompt],
    *,
    samples: int,
    seed: int,
) -> dict[Setting, tuple[Tensor, list[Row]]]:
    """Draws images [P, K, 3, H, W] and a journal row per prompt for one setting, or for best of several N at one scale:
    each takes the first N of the same candidates."""
    first = settings[0]
    count = max(setting.plan.num_candidates for setting in settings)
    plain = model.make(first.scale, first.run)
    owners = [prompt for prompt in prompts for _ in range(samples)]
    x = start_noise(model, prompts, samples=samples, count=count, seed=seed)
    drawn: dict[Setting, Tensor] = {}
    with caching(model.pipeline, model.cache) as cached:

        def make(prompts: Sequence[Prompt]) -> Velocity:
            return cached(plain(prompts))

        if first.kind in ("rlg", "run"):
            drawn[first] = draw(model.pipeline, make, owners, x[:, 0], model.schedule)
        else:
            assert judges.select is not None
            given = (model.pipeline, make, owners, x, model.schedule, judges.select)
            if first.kind == "prune":
                drawn[first] = prune_steps(*given, first.plan, part=judges.part).images
            else:
                pool = candidates(*given, part=judges.part)
                for setting in settings:
                    drawn[setting] = pool.images[torch.arange(len(owners)), pool.best(setting.plan.num_candidates)]
    return {
        setting: (
            images.unflatten(0, (len(prompts), samples)),
            judge(model.pipeline, judges, prompts, images, samples),
        )
        for setting, images in drawn.items()
    }


def start_noise(model: TunedModels, prompts: Sequence[Prompt], *, samples: int, count: int, seed: int) -> Tensor:
    """[P * K, N, *latent] start noise on the model's device."""
    keys = [
        (seed, "eval", prompt.noise_name, k, *(("candidate", n) if n else ()))
        for prompt in prompts
        for k in range(samples)
        for n in range(count)
    ]
    return sample_normals(model.pipeline.latent_shape, keys).to(device_of(model.pipeline)).unflatten(0, (-1, count))


def judge(pipeline: Pipeline, judges: Judges, prompts: Sequence[Prompt], images: Tensor, samples: int) -> list[Row]:
    """A row per prompt: `values` by reward and by reward/part, K numbers each, null where failed; and `diversity`."""
    owners = [prompt for prompt in prompts for _ in range(samples)]
    places = torch.arange(len(images))
    inputs = reward_inputs(
        pipeline, owners, images, group=places // samples, numbers=(places % samples).tolist(), iteration=0
    )
    columns: dict[str, Tensor] = {}
    for name, reward in judges.rewards.items():
        output = check_output(reward(inputs), len(inputs), name)
        columns[name] = output.values
        columns |= {f"{name}/{part}": torch.where(output.valid, v, torch.nan) for part, v in output.parts.items()}
    features = None if judges.features is None else judges.features(images)
    rows = []
    for place, prompt in enumerate(prompts):
        own = slice(place * samples, (place + 1) * samples)
        diversity = {"pixels": image_spread(images[own])}
        if features is not None:
            unit = torch.nn.functional.normalize(features[own].cpu().double(), dim=1)
            diversity["features"] = mean_distance(unit.numpy(), "cosine")
        values = {name: plain(column[own].tolist()) for name, column in columns.items()}
        rows.append({"prompt": prompt.text, "values": values, "diversity": diversity})
    return rows


@torch.no_grad()
def drift(model: TunedModels, prompts: Sequence[Prompt], seed: int, run: str = "") -> float:
    """`flowrl.training.drift.KL_TEXT` of a tuned model, each model under its own guidance. RLG at scale w has w² times
    this: `out_base + w (out_tuned - out_base)` differs w times as much."""
    chosen = [prompts[place] for place in spread(len(prompts), KL_PROMPTS)]
    base, tuned = model.make(0.0, run)(chosen), model.make(1.0, run)(chosen)
    return distance_of(model.pipeline, chosen, base, tuned, model.schedule, seed=seed)


FEATURES_TEXT = {
    "attributes": "the embedded world's attribute scorer, mean over the cells of its last convolution",
    "clip": "CLIP ViT-L/14's image embedding",
    "dinov2": "DINOv2 base's class token",
}


def load_features(kind: str, device: torch.device) -> Embed | None:
    """Loads features by name; None for "none". Raises ValueError: a checkpoint cannot be loaded."""
    if kind == "attributes":
        from flowrl.rewards.networks.discriminators import attributes_discriminator

        network = attributes_discriminator(seed=0, device=device)
        return lambda images: network.tokens(network.pixels(list(to_uint8(images)), True))[:, 0]
    if kind == "clip":
        from flowrl.rewards.networks.clip_encoder import CLIP_MODEL
        from flowrl.rewards.networks.pretrained import clip_of_pixels, load_clip

        clip, processor = load_clip(CLIP_MODEL, device=device, owner="`features` clip", option="`features`")
        return lambda images: clip_of_pixels(clip, processor, list(to_uint8(images)))
    if kind == "dinov2":
        from flowrl.rewards.networks.dinov2 import DINOV2_MODEL
        from flowrl.rewards.networks.discriminators import dinov2_discriminator

        dino = dinov2_discriminator(
            model=DINOV2_MODEL, revision=None, image_size=224, seed=0, device=device, published=False
        )
        return lambda images: dino.tokens(dino.pixels(list(to_uint8(images)), True))[:, 0]
    return None
