"""The whole chain rollout, credit, advantages, rows, densities and loss estimates the gradient of the expected reward.

The network is linear, `velocity = gain * x + drift * direction`, so the finished latent is Gaussian and the expected
reward and its gradient have closed forms. Every group gets its own copy of the two parameters, which makes the gradient
of each group available at once and with it the standard error of their mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from flowrl.advantages.normalise import aggregate
from flowrl.credit import CREDIT
from flowrl.objectives.terms import clipped_surrogate
from flowrl.recipes.grpo import rows_of
from flowrl.runtime.randomness import counter_normal
from flowrl.samplers import KERNELS, build_schedule, gaussian_log_prob, rollout
from flowrl.samplers.completion import sample_trajectories
from flowrl.trajectory import Schedule

DIRECTION = torch.tensor([1.0, -0.5], dtype=torch.float64)
TARGET = torch.tensor([0.8, 0.3], dtype=torch.float64)
SLOPE = torch.tensor([0.7, 0.4], dtype=torch.float64)
GAIN, DRIFT = 0.6, -0.4
LEVELS = {"flow_sde": 0.7, "dance_sde": 0.6, "cps": 0.5, "ddim_flow": 0.8, "wan_sde": 0.7, "dpm_sde": 0.6}

Reward = Literal["linear", "quadratic"]


def reward_of(final: Tensor, kind: Reward) -> Tensor:
    return final @ SLOPE if kind == "linear" else -(final - TARGET).square().sum(1)


def noise_rule(name: str, s: float, s_next: float, sigma_max: float) -> tuple[float, float]:
    """(k, std) from the published formulas."""
    h, level = s - s_next, LEVELS[name]
    if name == "cps":
        return s_next * math.cos(level * math.pi / 2), s_next * math.sin(level * math.pi / 2)
    if name == "ddim_flow":
        std = level * s_next * math.sqrt(1 - (s_next * (1 - s) / (s * (1 - s_next))) ** 2)
        return math.sqrt(s_next**2 - std**2), std
    if name == "dpm_sde":
        survives = (s_next * (1 - s) / (s * (1 - s_next))) ** level**2
        return s_next * survives, s_next * math.sqrt(1 - survives**2)
    rates = {"flow_sde": s / (1 - (sigma_max if s == 1 else s)), "dance_sde": 1.0, "wan_sde": (sigma_max * s) ** 2}
    g2 = level**2 * rates[name]
    return s_next - g2 * h / (2 * s), math.sqrt(g2 * h)


def expected_gradient(name: str, schedule: Schedule, steps: list[int], kind: Reward) -> Tensor:
    """d E[reward] / d (gain, drift) as felt at the stochastic steps; ODE steps count as fixed."""
    free = torch.tensor([GAIN, DRIFT], dtype=torch.float64, requires_grad=True)
    mean, variance = torch.zeros(2, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    sigma = schedule.sigma.tolist()
    for step in range(schedule.num_steps):
        s, s_next = sigma[step], sigma[step + 1]
        k, std = noise_rule(name, s, s_next, sigma[1]) if step in steps else (s_next, 0.0)
        gain, drift = free if step in steps else free.detach()
        sensitivity = k * (1 - s) - (1 - s_next) * s  # of the step's mean to the velocity
        growth = (1 - s_next) + k + sensitivity * gain
        mean, variance = growth * mean + sensitivity * drift * DIRECTION, growth**2 * variance + std**2
    value = mean @ SLOPE if kind == "linear" else -(mean - TARGET).square().sum() - 2 * variance
    return torch.autograd.grad(value, free)[0]


def velocity_of(gain: Tensor, drift: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda x, sigma, timestep: gain[:, None] * x + drift[:, None] * DIRECTION


def estimated_gradient(
    name: str, steps: list[int], kind: Reward, baseline: Any, groups: int, group_size: int
) -> tuple[Tensor, Tensor]:
    """Mean over groups of the ascent direction of one on-policy update, and its standard error, both (gain, drift)."""
    schedule = build_schedule({"shift": 2.0}, 3, grid="linspace")
    kernel = replace(KERNELS[name], noise_level=LEVELS[name], sigma_max=schedule.sigma_max)
    b = groups * group_size
    gain = torch.full((groups,), GAIN, dtype=torch.float64, requires_grad=True)
    drift = torch.full((groups,), DRIFT, dtype=torch.float64, requires_grad=True)
    group_B = torch.arange(groups).repeat_interleave(group_size)
    with torch.no_grad():
        trajectory = rollout(
            velocity_of(gain[group_B], drift[group_B]),
            counter_normal((b, 2), 0, "start").double(),
            schedule,
            kernel,
            lambda step: counter_normal((b, 2), 0, "step", step),
            stochastic=steps,
        )
    sampled = sample_trajectories(trajectory, group_B, None)
    credit = CREDIT["outcome"].options()(sampled, reward_of(sampled.finished, kind)[None])
    one = torch.ones(1, dtype=torch.float64)
    advantage_M = aggregate(credit.raw, credit.norm, one, scope="none", baseline=baseline)
    rows = rows_of(sampled, credit, advantage_M[None], torch.ones_like(sampled.step, dtype=torch.bool), (0.2, 0.2))
    x, x_next = sampled.states[rows.source], sampled.states[rows.produced]
    sigma, sigma_next = schedule.sigma[rows.step], schedule.sigma[rows.step + 1]
    velocity = velocity_of(gain[rows.group], drift[rows.group])(x, sigma, schedule.timestep[rows.step])
    log_ratio = gaussian_log_prob(x_next, kernel(x, velocity, sigma, sigma_next)) - rows.old_log_prob
    assert not log_ratio.detach().any()
    loss = clipped_surrogate(log_ratio, rows.advantage, clip_low=rows.clip_low, clip_high=rows.clip_high)
    per_group = torch.stack(torch.autograd.grad(-loss.sum() / group_size, (gain, drift)), 1)
    return per_group.mean(0), per_group.std(0) / math.sqrt(groups)


CASES: list[tuple[str, list[int]]] = [
    ("flow_sde", [0, 1, 2]),
    ("dance_sde", [0, 1, 2]),
    ("flow_sde", [1]),
    ("cps", [0, 1]),
    ("ddim_flow", [0, 1]),
    ("wan_sde", [0, 1, 2]),
    ("dpm_sde", [0, 1]),
]


@pytest.mark.parametrize("kind", ["linear", "quadratic"])
@pytest.mark.parametrize(("name", "steps"), CASES)
def test_leave_one_out_gradient_is_unbiased(name: str, steps: list[int], kind: Reward) -> None:
    schedule = build_schedule({"shift": 2.0}, 3, grid="linspace")
    wanted = expected_gradient(name, schedule, steps, kind)
    got, error = estimated_gradient(name, steps, kind, "leave_one_out", groups=30_000, group_size=4)
    assert bool(((got - wanted).abs() < 4 * error).all()), (got, wanted, error)
    # The test can tell: the gradient of the drift is at least 20 standard errors away from 0.
    assert float(wanted[1].abs() / error[1]) > 20


@pytest.mark.parametrize("group_size", [2, 4])
def test_plain_group_mean_shrinks_the_gradient(group_size: int) -> None:
    """A sample that takes part in its own baseline costs a factor (G - 1) / G in expectation."""
    schedule, steps = build_schedule({"shift": 2.0}, 3, grid="linspace"), [0, 1, 2]
    wanted = expected_gradient("flow_sde", schedule, steps, "quadratic")
    got, error = estimated_gradient("flow_sde", steps, "quadratic", "mean", groups=40_000, group_size=group_size)
    factor = (group_size - 1) / group_size
    assert bool(((got - factor * wanted).abs() < 4 * error).all()), (got, wanted, error)
    assert float((got - wanted).abs()[1] / error[1]) > 10
    full, _ = estimated_gradient("flow_sde", steps, "quadratic", "leave_one_out", groups=40_000, group_size=group_size)
    torch.testing.assert_close(got, factor * full)
