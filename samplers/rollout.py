"""Sampling with a record: states, densities and means of the steps that will be trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from flowrl.runtime.shapes import Float
from flowrl.samplers.guidance import Velocity
from flowrl.samplers.kernels import KERNELS, Kernel
from flowrl.samplers.multistep import solve
from flowrl.samplers.path_memory import PathMemory
from flowrl.samplers.step import advance, check_steps, euler
from flowrl.trajectory import Schedule, Trajectory, start_state


def ode_rollout(
    velocity: Velocity,
    x: Float[Tensor, " b *latent"],
    schedule: Schedule,
    *,
    solver: Literal["euler", "dpm2"] = "euler",
) -> Float[Tensor, " b *latent"]:
    """The finished latent of a `rollout` without stochastic steps; arguments as there."""

    def no_noise(step: int) -> Tensor:
        raise AssertionError(f"step {step} of an ODE rollout asked for noise")

    return rollout(velocity, x, schedule, KERNELS["ode"], no_noise, stochastic=(), solver=solver).final


def rollout(
    velocity: Velocity,
    x: Float[Tensor, " b *latent"],
    schedule: Schedule,
    kernel: Kernel,
    noise: Callable[[int], Tensor],
    *,
    stochastic: Sequence[int],
    keep_means: bool = False,
    keep_velocity: bool = False,
    keep_states: Sequence[int] = (),
    solver: Literal["euler", "dpm2"] = "euler",
) -> Trajectory:
    """Denoise x from the first sigma of the schedule to 0: chosen steps by a stochastic kernel, the others by the ODE.

    Every state is float32 (float64 if x is). The network meets the same latent in rollout and update, and the recorded
    log-density belongs to the stored value, so the ratio of an unchanged policy is exactly 1. Only the two states of
    each stochastic step are kept, and `keep_states`. Wrap the call in `torch.no_grad()` unless gradients are wanted.

    Args:
        velocity: `velocity(x, sigma, timestep)`, the last two 0-d tensors of the schedule.
        x: [b, *latent] start noise, usually standard normal; times `schedule.start_scale` it is state 0.
        kernel: With noise_level and sigma_max bound, `replace(KERNELS[name], noise_level=..., sigma_max=...)`.
        noise: `noise(step) -> [b, *latent]` standard normal, called only for stochastic steps, and after the
            network, so the host draws while a GPU computes.
        stochastic: Step indexes in 0 .. T-1 that are stochastic and recorded; may be empty, need not be contiguous.
        keep_means: Record the transition means too.
        keep_velocity: Record the network output at the source of each stochastic step too.
        keep_states: Indexes of further states to keep, of 0 .. T; with "dpm2" none of the deterministic tail.
        solver: Solver of the deterministic steps after the last stochastic one: "euler", or "dpm2" for
            DPM-Solver++(2M), started afresh there (see `solve`). Earlier deterministic steps are always Euler steps.

    Returns the trajectory, states, means and velocities in the working dtype, float32 unless x is float64. Raises
    ValueError: a stochastic index is out of range or given twice, or a kept one out of range; a stochastic step has std
    0; a shape is wrong; the solver is unknown.
    """
    steps = check_steps(stochastic, schedule.num_steps, "stochastic steps", least=0)
    tails = {"euler": schedule.num_steps, "dpm2": max(steps, default=-1) + 1}
    if solver not in tails:
        raise ValueError(f"unknown solver {solver!r} of the deterministic tail: choose euler or dpm2")
    tail = tails[solver]
    kept = sorted({*keep_states, *(state for step in steps for state in (step, step + 1))})
    if not set(kept) <= set(range(tail + 1)):
        raise ValueError(f"states 0 .. {tail} of this path can be kept, got {kept}")
    x = start_state(x, schedule)
    columns, log_probs, memory = dict[str, Tensor](), list[Tensor](), PathMemory(schedule)
    velocity = memory.along(velocity)

    def keep(name: str, place: int, count: int, latents: Tensor) -> None:
        if name not in columns:  # room for all: a stack would hold them twice
            columns[name] = latents.new_empty(len(latents), count, *latents.shape[1:])
        columns[name][:, place] = latents

    if 0 in kept:
        keep("states", 0, len(kept), x)
    for step in range(tail):
        sigma, sigma_next = schedule.sigma[step], schedule.sigma[step + 1]
        predicted = velocity(x, sigma, schedule.timestep[step])
        if step in steps:
            x, log_prob, mean = advance(kernel, x, predicted, sigma, sigma_next, noise(step))
            if keep_means:
                keep("mean", len(log_probs), len(steps), mean)
            if keep_velocity:
                keep("velocity", len(log_probs), len(steps), predicted.to(x.dtype))
            log_probs.append(log_prob)
        else:
            x = euler(x, predicted, sigma, sigma_next)
        if step + 1 in kept:
            keep("states", kept.index(step + 1), len(kept), x)
    none = x.new_empty(len(x), 0, *x.shape[1:])
    return Trajectory(
        states=columns.get("states", none),
        kept=tuple(kept),
        steps=steps,
        log_prob=torch.stack(log_probs, 1) if steps else x.new_empty(len(x), 0),
        mean=columns.get("mean", none) if keep_means else None,
        velocity=columns.get("velocity", none) if keep_velocity else None,
        memory=memory.at_states(kept),
        final=solve(velocity, x, schedule, first=tail),
    )
