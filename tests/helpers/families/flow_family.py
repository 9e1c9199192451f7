"""Checks of a family of flow models around a tiny pipeline of it: sampling, replay, gradients, a saved LoRA."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import family_sampling
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from family_sampling import idle_tensors, replayed, sample, start_noise
from rounding import assert_same_sum
from torch import Tensor

from flowrl.pipelines import ModelFamily
from flowrl.pipelines.places.known_checkpoints import checkpoints
from flowrl.pipelines.shared.family_pipeline import Family
from flowrl.pipelines.weights.lora import Policy
from flowrl.trajectory import Conditioning, Schedule

PROMPTS = ["a red circle", "two big blue squares left of a star"]
NEGATIVE = " "
STEPS = 3
RANK, ALPHA = 2, 8


class OnSchedule(FlowMatchEulerDiscreteScheduler):  # type: ignore[misc]
    """Stock Euler steps on exactly these levels: the last bit of a timestep would be seen in images at 1e-5."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self.given = schedule

    def set_timesteps(self, num_inference_steps: Any = None, device: Any = None, sigmas: Any = None, **_: Any) -> None:
        self.sigmas, self.timesteps = self.given.sigma, self.given.timestep
        self.num_inference_steps, self._step_index, self._begin_index = self.given.num_steps, None, None


def check_schedule_is_stocks(pipeline: Any, mu: float) -> None:
    """Our levels are those of the checkpoint's scheduler, given what the stock pipeline gives it."""
    schedule, scheduler = pipeline.schedule(STEPS, "diffusers"), pipeline.pipe.scheduler
    scheduler.set_timesteps(sigmas=[1 - i / STEPS for i in range(STEPS)], mu=mu)
    torch.testing.assert_close(schedule.sigma, scheduler.sigmas, atol=1e-6, rtol=0)
    torch.testing.assert_close(schedule.timestep, scheduler.timesteps, atol=1e-3, rtol=0)


def sample_ode(pipeline: Any, cond: Conditioning, negative: Conditioning | None, scale: float) -> Tensor:
    """Finished latents of the family's own grid, without any noise on the way."""
    velocity = pipeline.guided(pipeline.network, cond, negative, scale)
    return sample(pipeline, velocity, pipeline.schedule(STEPS, "diffusers"), len(cond))


def adapted(pipeline: Any) -> Policy:
    """A LoRA whose alpha is not its rank's double: the scale has to travel."""
    return family_sampling.adapted(pipeline, rank=RANK, alpha=ALPHA, scale=0.1)


def check_replay(pipeline: Any, policy: Policy, cond: Conditioning, negative: Conditioning, scale: float) -> set[str]:
    """Replays a rollout's steps, bit for bit, and gives the names of the LoRA tensors that got no gradient."""
    log_prob = replayed(pipeline, pipeline.guided(pipeline.network, cond, negative, scale), len(cond), STEPS)
    assert {p.dtype for p in policy.parameters.values()} == {torch.float32}
    assert {p.dtype for p in pipeline.pipe.vae.parameters()} == {torch.float32}
    return idle_tensors(policy, (log_prob * torch.linspace(1, 2, len(cond))).sum())


def check_known_prompts_stay(pipeline: Any) -> None:
    """Once the encoder is freed, only prompts that were embedded before can be asked for, at any size."""
    before = pipeline.encode(PROMPTS)
    pipeline.free_text_encoders()
    assert pipeline.pipe.text_encoder is None
    after = pipeline.resized(24, 16).encode(PROMPTS[::-1])
    assert torch.equal(after.tensors["embeds"], before.tensors["embeds"].flip(0))
    with pytest.raises(ValueError, match="was not encoded"):
        pipeline.encode(["a cube"])


def check_autoencoder(pipeline: Any, sliced: Any, normalised: Callable[[Any, Tensor], Tensor]) -> None:
    """Images decode in slices as in one, with gradient, and are encoded as the posterior's mode, normalised by hand."""
    latents = start_noise(pipeline, 3).requires_grad_()
    images = pipeline.decode(latents, gradient=True)
    assert (images.shape, images.dtype) == ((3, *pipeline.image_shape), torch.float32)
    (gradient,) = torch.autograd.grad(images.sum(), latents)
    assert gradient.abs().sum() > 0
    again = sliced.decode(latents)
    assert_same_sum(again, images.detach())
    assert not again.requires_grad
    with torch.no_grad():
        expected = normalised(pipeline.pipe.vae, 2 * images.detach() - 1)
    assert_same_sum(pipeline.encode_images(images.detach()), expected)


def check_another_class_is_refused(family: Family, folder: Path) -> None:
    """A folder without anything but an index that names FLUX."""
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}), encoding="utf-8")
    wanted = rf"is a FluxPipeline, and pipeline\.name={family.name} loads {family.stock[0]}"
    for refusal in (lambda: family.check(str(folder), None), lambda: family.load(str(folder))):
        with pytest.raises(ValueError, match=wanted):
            refusal()


def bare(folder: Path, to: Path) -> Path:
    """A copy of a pipeline folder without weights: what passes or is refused there was known before anything loads."""
    return Path(shutil.copytree(folder, to / "bare", ignore=shutil.ignore_patterns("*.safetensors")))


def edited(path: Path, **changes: Any) -> None:
    """Changes entries of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def published(family: ModelFamily) -> list[str]:
    """Hub ids of a family's published checkpoints."""
    return [model for model, found in checkpoints().items() if found.family == family.name]
