"""Checks that every video family passes, around a tiny pipeline of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flow_family import start_noise
from torch import Tensor

from flowrl.pipelines.lora import Policy
from flowrl.randomness import counter_normal
from flowrl.samplers import KERNELS, Velocity, gaussian_log_prob, rollout
from flowrl.trajectory import Schedule

PROMPTS = ["a photo of a red circle", "two blue squares"]
STEPS = 4
Sources = Sequence[Sequence[Tensor]]


def image(seed: int, height: int, width: int) -> Tensor:
    """A source image of 8-bit values: a colour gradient."""
    ramp = torch.linspace(0, 1, height)[:, None] * torch.linspace(seed % 3 / 2, 1, width)
    return torch.stack([ramp, 1 - ramp, ramp.flip(0)]).mul(255).round() / 255


def guided(pipeline: Any, scale: float, sources: Sources | None = None) -> Velocity:
    """The guided velocity of the prompts."""
    cond = pipeline.encode(PROMPTS, sources)
    negative = pipeline.encode([""] * len(PROMPTS), sources) if pipeline.passes(scale) > 1 else None
    velocity: Velocity = pipeline.guided(pipeline.network, cond, negative, scale)
    return velocity


@torch.no_grad()
def sample_ode(pipeline: Any, schedule: Schedule, scale: float, sources: Sources | None = None) -> Tensor:
    """Finished latents without any noise on the way."""
    kernel = replace(KERNELS["ode"], sigma_max=schedule.sigma_max)
    x = start_noise(pipeline)
    return rollout(guided(pipeline, scale, sources), x, schedule, kernel, lambda step: x, stochastic=()).final


def adapted(pipeline: Any) -> Policy:
    """A LoRA on the published targets that does something."""
    policy = Policy(pipeline.denoiser, rank=2, alpha=4, targets=pipeline.lora_targets, seed=1)
    for name, parameter in policy.parameters.items():
        if "lora_B" in name:
            parameter.data.copy_(0.2 * counter_normal(parameter.shape, 0, "filled", name))
    return policy


def check_ratio_is_one(
    pipeline: Any, policy: Policy, scale: float, sources: Sources | None = None, kernel: str = "flow_sde"
) -> None:
    """Replayed log-probabilities equal the rollout's to the bit, and every LoRA tensor is trained by some step."""
    schedule = pipeline.schedule(STEPS, "diffusers")
    step_rule = replace(KERNELS[kernel], sigma_max=schedule.sigma_max)
    x = start_noise(pipeline)
    with torch.no_grad():
        trajectory = rollout(
            guided(pipeline, scale, sources), x, schedule, step_rule, lambda step: counter_normal(x.shape, "s", step),
            stochastic=range(STEPS - 1),
        )  # fmt: skip
    velocity = guided(pipeline, scale, sources)
    loss = torch.zeros(())
    for k, step in enumerate(trajectory.steps):
        x, sigma = trajectory.states[:, k], schedule.sigma[step]
        transition = step_rule(x, velocity(x, sigma, schedule.timestep[step]), sigma, schedule.sigma[step + 1])
        log_prob = gaussian_log_prob(trajectory.states[:, k + 1], transition)
        assert log_prob.dtype == torch.float32
        assert torch.equal(log_prob, trajectory.log_prob[:, k])
        loss = loss + (log_prob * torch.tensor([1.0, -2.0])).sum()
    gradients = torch.autograd.grad(loss, list(policy.parameters.values()))
    for name, gradient in zip(policy.parameters, gradients, strict=True):
        assert gradient.dtype == torch.float32
        assert bool(gradient.isfinite().all())
        assert float(gradient.abs().sum()) > 0, name


def check_prompts_are_embedded_by_themselves(pipeline: Any, fresh: Any) -> dict[str, Tensor]:
    """An embedding does not depend on its batch; once the encoders are freed, only known prompts can be asked for."""
    together, alone = pipeline.encode([*PROMPTS, PROMPTS[0]]), fresh.encode([PROMPTS[1]])
    for name, tensor in together.tensors.items():
        assert torch.equal(tensor[1:2], alone.tensors[name])
        assert torch.equal(tensor[0], tensor[2])
    assert not torch.equal(together.tensors["embeds"][0], together.tensors["embeds"][1])
    pipeline.free_text_encoders()
    assert pipeline.pipe.text_encoder is None
    with pytest.raises(ValueError, match="'three stars' was not encoded before"):
        pipeline.encode(["three stars"])
    tensors: dict[str, Tensor] = together.tensors
    return tensors


def check_autoencoder(pipeline: Any, sliced: Any, normalised: Callable[[Tensor], Tensor]) -> None:
    """Clips decode and encode in slices of one as in one of three, and every latent frame gets gradient."""
    latents = start_noise(pipeline, 3)
    clips = pipeline.decode(latents)
    assert (clips.shape, clips.dtype) == ((3, *pipeline.image_shape), torch.float32)
    torch.testing.assert_close(sliced.decode(latents), clips, atol=1e-5, rtol=0)
    raw = pipeline.pipe.vae.encode(2 * clips.transpose(1, 2) - 1).latent_dist.mode()
    torch.testing.assert_close(sliced.encode_images(clips), normalised(raw), atol=1e-5, rtol=1e-5)
    assert sliced.encode_images(clips).shape[1:] == sliced.latent_shape
    leaf = latents.requires_grad_()
    sliced.decode(leaf, gradient=True).square().sum().backward()
    assert leaf.grad is not None
    assert (leaf.grad.flatten(2).abs().amax(2) > 0).all()


def check_stock_loads_the_saved_lora(
    pipeline: Any, policy: Policy, folder: Path, pipe: Any, drawn: Callable[[], Tensor], expected: Tensor
) -> None:
    """`drawn` is what the stock pipeline draws: as ours with the saved LoRA, and something else without."""
    assert pipeline.save_lora(folder, policy.tensors(), policy.config).is_file()
    without = drawn()
    pipe.load_lora_weights(folder)
    torch.testing.assert_close(drawn(), expected, atol=2e-5, rtol=1e-5)
    assert (without - expected).abs().max() > 1e-2
