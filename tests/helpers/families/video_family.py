"""Checks that every video family passes, around a tiny pipeline of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from family_sampling import adapted, idle_tensors, replayed, sample, start_noise
from rounding import assert_same_sum
from torch import Tensor

from flowrl.pipelines.weights.lora import Policy
from flowrl.samplers import Velocity
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


def sample_ode(pipeline: Any, schedule: Schedule, scale: float, sources: Sources | None = None) -> Tensor:
    """Finished latents without any noise on the way."""
    return sample(pipeline, guided(pipeline, scale, sources), schedule)


def with_lora(pipeline: Any) -> tuple[Any, Policy]:
    """A pipeline and a LoRA in it; the tests that share them leave them as they were."""
    return pipeline, adapted(pipeline)


def check_ratio_is_one(
    pipeline: Any, policy: Policy, scale: float, sources: Sources | None = None, kernel: str = "flow_sde"
) -> None:
    """Replayed log-probabilities equal the rollout's to the bit, and every LoRA tensor is trained by some step."""
    log_prob = replayed(pipeline, guided(pipeline, scale, sources), len(PROMPTS), STEPS, kernel)
    assert not idle_tensors(policy, (log_prob * torch.tensor([1.0, -2.0])).sum())


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
    assert_same_sum(sliced.decode(latents), clips)
    raw = pipeline.pipe.vae.encode(2 * clips.transpose(1, 2) - 1).latent_dist.mode()
    assert_same_sum(sliced.encode_images(clips), normalised(raw))
    assert sliced.encode_images(clips).shape[1:] == sliced.latent_shape
    leaf = latents.requires_grad_()
    sliced.decode(leaf, gradient=True).square().sum().backward()
    assert leaf.grad is not None
    assert (leaf.grad.flatten(2).abs().amax(2) > 0).all()


def check_stock_loads_the_saved_lora(
    pipeline: Any, policy: Policy, folder: Path, pipe: Any, stock_call: Callable[..., Tensor], scale: float
) -> None:
    """The stock pipeline, whose latents `stock_call` gives as ours are, draws as we do; something else without."""
    expected = sample_ode(pipeline, pipeline.schedule(STEPS, "diffusers"), scale)
    assert pipeline.save_lora(folder, policy.tensors(), policy.config).is_file()
    without = stock_call(pipe, pipeline, scale, "latent")
    pipe.load_lora_weights(folder)
    torch.testing.assert_close(stock_call(pipe, pipeline, scale, "latent"), expected, atol=6e-5, rtol=1e-5)
    assert (without - expected).abs().max() > 1e-2
