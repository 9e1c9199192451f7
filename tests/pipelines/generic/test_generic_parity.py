"""Stock pipelines called step by step against the families that are written for them: the same numbers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from family_sampling import adapted
from rounding import assert_same_sum
from tiny_folders import SETTINGS, save_tiny
from torch import Tensor

from flowrl.pipelines import family
from flowrl.pipelines.shared import common
from flowrl.runtime.randomness import counter_normal

PROMPTS = ["a red circle", "two big blue squares left of a star"]
SCALES = {"flux": 3.5}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    room = tmp_path_factory.mktemp("models")
    return cache(lambda name: save_tiny(name, room / name))


def _loaded(route: str, name: str, folder: Path, **more: Any) -> Any:
    return family(route).load(str(folder), dtype=torch.float32, **{**SETTINGS.get(name, {}), **more})


def _answers(
    p: Any, name: str, x: Tensor, weights: Tensor, schedule: Any, targets: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Guided velocity of two prompts at one level, and its gradient at a LoRA."""
    p.lora_targets = targets
    policy = adapted(p)
    scale = SCALES.get(name, 2.5)
    cond, negative = p.encode(PROMPTS), p.encode([""])
    velocity = p.guided(p.network, cond, negative, scale)
    found = velocity(x, schedule.sigma[1], schedule.timestep[1])
    gradients = torch.autograd.grad((found * weights).sum(), list(policy.parameters.values()), allow_unused=True)
    return found.detach(), {n: g for n, g in zip(policy.parameters, gradients, strict=True) if g is not None}


@pytest.mark.parametrize("name", ["sd3", "flux", "qwen_image", "wan", "sana"])
def test_velocities_and_gradients_are_the_familys(name: str, folders: Any) -> None:
    own = _loaded(name, name, folders(name))
    height, width = own.image_shape[-2:]
    generic = _loaded("generic", name, folders(name), height=height, width=width)
    packed = own.latent_shape != generic.latent_shape
    x = counter_normal((2, *generic.latent_shape), "x")
    theirs = common.unpack(x, own.latent_shape) if packed else x
    assert generic.image_shape == own.image_shape
    for grid in ("diffusers", "linspace"):
        ours, exact = (p.schedule(5, grid) for p in (generic, own))
        torch.testing.assert_close(ours.sigma, exact.sigma, atol=2e-6, rtol=0)
    images = own.decode(theirs)
    assert_same_sum(generic.decode(x), images)
    weights = counter_normal(theirs.shape, "weights")
    schedule = own.schedule(4, "diffusers")
    wanted, gradients = _answers(own, name, theirs, weights, schedule, own.lora_targets)
    weights, wanted = (common.pack(one) if packed else one for one in (weights, wanted))
    found, again = _answers(generic, name, x, weights, schedule, own.lora_targets)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5
    assert gradients.keys() == again.keys()
    whole = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
    assert float(torch.stack([(again[n] - gradients[n]).norm() for n in gradients]).norm() / whole) < 1e-4
