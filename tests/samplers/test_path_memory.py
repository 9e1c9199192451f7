"""Adaptive projected guidance against diffusers' guider, and what a path keeps for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from diffusers import AdaptiveProjectedGuidance, AdaptiveProjectedMixGuidance
from torch import Tensor

from flowrl.objectives.gradient_paths import backprop_sample
from flowrl.runtime.randomness import counter_normal
from flowrl.samplers import KERNELS, Velocity, rollout
from flowrl.samplers.guidance import classifier_free_guidance
from flowrl.samplers.path_memory import AdaptiveProjection, PathMemory, ProjectedGuidance
from flowrl.samplers.rollout import ode_rollout
from flowrl.trajectory import Conditioning, Schedule

STEPS = 6
SCHEDULE = Schedule(sigma=torch.linspace(1, 0, STEPS + 1), timestep=1000 * torch.linspace(1, 1 / STEPS, STEPS))


def outputs(step: int) -> tuple[Tensor, Tensor]:
    negative, positive = counter_normal((2, 3, 4, 5, 6), "outputs", step)
    return negative, positive


def network(x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
    return (x * cond.tensors["text"].view(-1, 1, 1)).sin() - x / 3 + timestep.view(-1, 1, 1) / 1000


def at(path: PathMemory, step: int, evaluate: Callable[[], Tensor]) -> Tensor:
    """What is evaluated at a step of a path."""
    velocity = path.along(lambda x, sigma, timestep: evaluate())
    return velocity(torch.zeros(1), SCHEDULE.sigma[step], SCHEDULE.timestep[step])


def guided(weight: Tensor | None = None, last_linear: int = 1) -> Velocity:
    text = torch.tensor([1.0, 2.0, 3.0])
    cond = Conditioning({"text": text if weight is None else text * weight})
    rule = ProjectedGuidance(last_linear=torch.full((3,), last_linear), longest=2.0)
    return classifier_free_guidance(network, cond, Conditioning({"text": torch.tensor([0.5])}), 3.5, rule=rule)


@pytest.mark.parametrize(
    ("momentum", "scale", "eta"), [(-0.5, 10.0, 0.0), (0.3, 4.0, 0.7), (None, 10.0, 0.0), (-0.5, 1.0, 0.0)]
)
def test_every_step_is_that_of_diffusers_guider(momentum: float | None, scale: float, eta: float) -> None:
    """For samples whose projections start at different steps, each against a guider of its own."""
    starts = torch.tensor([0, 2, 9])
    rule = ProjectedGuidance(
        last_linear=starts, projected_scale=scale, momentum=momentum or 0.0, longest=10.0, parallel=eta
    )
    guiders = [
        AdaptiveProjectedMixGuidance(
            guidance_scale=3.5,
            adaptive_projected_guidance_scale=scale,
            adaptive_projected_guidance_rescale=10.0,
            adaptive_projected_guidance_momentum=momentum,
            eta=eta,
            adaptive_projected_guidance_start_step=start,
        )
        for start in starts.tolist()
    ]
    path = PathMemory(SCHEDULE)
    for step in range(STEPS):
        negative, positive = outputs(step)
        found = at(path, step, partial(rule, negative, positive, 3.5))
        for row, guider in enumerate(guiders):
            guider.set_state(step, STEPS, torch.tensor(0))
            guider.prepare_inputs({})
            wanted = guider.forward(positive[row : row + 1], negative[row : row + 1]).pred
            torch.testing.assert_close(found[row : row + 1], wanted, rtol=1e-5, atol=1e-5)
    kept = path.at_states(range(STEPS))
    assert kept is not None
    assert kept.shape == (3, STEPS, 4, 5, 6)
    assert not kept[:, 0].any()


@pytest.mark.parametrize(("momentum", "longest", "eta"), [(0.1, 3.0, 1.0), (None, 0.0, 0.4)])
def test_every_step_is_that_of_diffusers_guider_of_the_original_formulation(
    momentum: float | None, longest: float, eta: float
) -> None:
    """With a norm for each row of the last dimension but two; without momentum nothing is kept."""
    rule = AdaptiveProjection(momentum=momentum or 0.0, longest=longest, parallel=eta, dims=(-1, -3))
    guider = AdaptiveProjectedGuidance(
        guidance_scale=8.0,
        adaptive_projected_guidance_rescale=longest,
        adaptive_projected_guidance_momentum=momentum,
        adaptive_projected_guidance_norm_dim=(-1, -3),
        use_original_formulation=True,
        eta=eta,
    )
    path = PathMemory(SCHEDULE)
    for step in range(STEPS):
        negative, positive = outputs(step)
        found = at(path, step, partial(rule, negative, positive, 8.0))
        guider.set_state(step, STEPS, torch.tensor(0))
        guider.prepare_inputs({})
        wanted = guider.forward(positive, negative).pred
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        assert torch.equal(rule(negative, positive, 8.0), found) == (step == 0 or momentum is None)
    assert (path.at_states(range(STEPS)) is None) == (momentum is None)


def test_a_step_beside_any_path_is_the_first() -> None:
    negative, positive = outputs(0)
    rule = ProjectedGuidance(last_linear=torch.tensor([-1, -1, -1]))
    assert torch.equal(rule(negative, positive, 3.5), negative + 3.5 * (positive - negative))


def test_a_rollout_records_what_a_step_needs_to_be_evaluated_again() -> None:
    velocity, x = guided(), counter_normal((3, 5, 6), "x")
    found = rollout(
        velocity,
        x,
        SCHEDULE,
        KERNELS["flow_sde"],
        lambda step: counter_normal(x.shape, step),
        stochastic=(0, 3, 4),
        keep_velocity=True,
    )
    assert found.memory is not None
    assert found.velocity is not None
    assert found.memory.shape == found.states.shape
    for k, step in enumerate(found.steps):
        place = found.kept.index(step)
        evaluated = PathMemory(SCHEDULE, found.memory[:, place]).along(guided())
        again = evaluated(found.states[:, place], SCHEDULE.sigma[step], SCHEDULE.timestep[step])
        assert torch.equal(again, found.velocity[:, k])
        without = guided()(found.states[:, place], SCHEDULE.sigma[step], SCHEDULE.timestep[step])
        assert torch.equal(without, again) == (step == 0)
    plain = guided(last_linear=STEPS)
    assert not torch.allclose(ode_rollout(velocity, x, SCHEDULE), ode_rollout(plain, x, SCHEDULE), atol=1e-2)


def test_linear_guidance_records_nothing() -> None:
    cond = Conditioning({"text": torch.tensor([1.0, 2.0, 3.0])})
    velocity = classifier_free_guidance(network, cond, Conditioning({"text": torch.tensor([0.5])}), 3.5)
    x = counter_normal((3, 5, 6), "x")
    found = rollout(velocity, x, SCHEDULE, KERNELS["flow_sde"], lambda step: x, stochastic=(0, 3))
    assert found.memory is None


def test_calls_that_are_recomputed_in_a_backward_pass_have_the_memory_of_their_step() -> None:
    x, found = counter_normal((3, 5, 6), "x"), []
    for checkpoint in (False, True):
        weight = torch.ones((), requires_grad=True)
        end = backprop_sample(guided(weight), x, SCHEDULE, train_steps=(2, 4), checkpoint=checkpoint)
        found.append((end.detach(), *torch.autograd.grad(end.square().sum(), weight)))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_chosen_samples_go_on_with_what_they_had() -> None:
    path, places = PathMemory(SCHEDULE), torch.tensor([2, 0])
    rule = ProjectedGuidance(last_linear=torch.zeros(3, dtype=torch.long))
    for step in range(3):
        at(path, step, partial(rule, *outputs(step), 3.5))
    later = path.chosen(lambda kept: kept[places])
    whole = at(path, 3, partial(rule, *outputs(3), 3.5))
    rule, (no, yes) = ProjectedGuidance(last_linear=torch.zeros(2, dtype=torch.long)), outputs(3)
    assert torch.equal(at(later, 3, partial(rule, no[places], yes[places], 3.5)), whole[places])
