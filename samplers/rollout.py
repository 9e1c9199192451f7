"""Sampling with a record: states, densities and means of the steps that will be trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.samplers.guidance import Velocity
from flowrl.samplers.kernels import Kernel, ode
from flowrl.samplers.multistep import solve
from flowrl.samplers.parametrization import working_dtype
from flowrl.samplers.transition import Transition, gaussian_log_prob
from flowrl.trajectory import Schedule, Trajectory, start_state


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
    solver: Literal["euler", "dpm2"] = "euler",
    storage_dtype: torch.dtype = torch.float32,
    progress: Callable[[int], None] | None = None,
) -> Trajectory:
    """Denoise x from the first sigma of the schedule to 0: chosen steps by a stochastic kernel, the others by the ODE.

    Every state, the first included, is computed in float32 (float64 if x is), rounded to the storage dtype and raised
    again before anything else sees it. The network therefore meets the same latent in rollout and update, and the
    log-density recorded is that of the value stored: the ratio of an unchanged policy is exactly 1. Only the two states
    of each stochastic step are kept. Wrap the call in `torch.no_grad()` unless gradients through sampling are wanted.

    Args:
        velocity: `velocity(x, sigma, timestep)`, the last two 0-d tensors of the schedule.
        x: [b, *latent] start noise, usually standard normal; times `schedule.start_scale` it is state 0.
        schedule: T steps.
        kernel: A kernel with noise_level and sigma_max bound, `partial(KERNELS[name], noise_level=..., sigma_max=...)`.
        noise: `noise(step) -> [b, *latent]` standard normal, asked for stochastic steps only.
        stochastic: Step indexes in 0 .. T-1 that are stochastic and recorded; may be empty, need not be contiguous.
        keep_means: Record the transition means too.
        keep_velocity: Record the network output at the source of each stochastic step too.
        solver: How the deterministic steps after the last stochastic one are taken: "euler", or "dpm2" for
            DPM-Solver++(2M), started afresh there (see `solve`). Those before and between are Euler steps always.
        storage_dtype: Precision of the states, e.g. torch.bfloat16 when they travel or are stored so.
        progress: Called with the step index after each step.

    Returns:
        The trajectory, states, means and velocities in the working dtype, float32 unless x is float64.

    Raises:
        ValueError: a stochastic index is out of range or given twice; a stochastic step has std 0; a shape is wrong;
            the solver is unknown.
    """
    if solver not in ("euler", "dpm2"):
        raise ValueError(f"unknown solver {solver!r} of the deterministic tail: choose euler or dpm2")
    steps = _check_steps(stochastic, schedule.num_steps)
    kept = sorted({state for step in steps for state in (step, step + 1)})
    dtype = working_dtype(x)
    x = start_state(x, schedule).to(storage_dtype).to(dtype)
    states = {0: x} if 0 in kept else {}
    log_probs, means, velocities = [], [], []
    tail = schedule.num_steps if solver == "euler" else max(steps, default=-1) + 1
    for step in range(tail):
        sigma, sigma_next = schedule.sigma[step], schedule.sigma[step + 1]
        predicted = velocity(x, sigma, schedule.timestep[step])
        if step in steps:
            transition = kernel(x, predicted, sigma, sigma_next)
            x = _draw(transition, noise, step).to(storage_dtype).to(dtype)
            log_probs.append(gaussian_log_prob(x, transition))
            if keep_means:
                means.append(transition.mean)
            if keep_velocity:
                velocities.append(predicted.to(dtype))
        else:
            x = ode(x, predicted, sigma, sigma_next).mean.to(storage_dtype).to(dtype)
        if step + 1 in kept:
            states[step + 1] = x
        if progress is not None:
            progress(step)
    x = solve(velocity, x, schedule, first=tail, storage_dtype=storage_dtype, progress=progress)
    none = x.new_empty(len(x), 0, *x.shape[1:])
    return Trajectory(
        states=torch.stack([states[state] for state in kept], 1) if kept else none,
        kept=tuple(kept),
        steps=steps,
        log_prob=torch.stack(log_probs, 1) if steps else x.new_empty(len(x), 0),
        mean=None if not keep_means else torch.stack(means, 1) if steps else none,
        velocity=None if not keep_velocity else torch.stack(velocities, 1) if steps else none,
        final=x,
    )


def _check_steps(stochastic: Sequence[int], num_steps: int) -> tuple[int, ...]:
    steps = tuple(sorted(stochastic))
    if len(set(steps)) != len(steps) or any(not 0 <= step < num_steps for step in steps):
        raise ValueError(f"stochastic steps must be distinct and in 0 .. {num_steps - 1}, got {list(stochastic)}")
    return steps


def _draw(transition: Transition, noise: Callable[[int], Tensor], step: int) -> Tensor:
    """`mean + std * noise`, with both checked."""
    mean = transition.mean
    if not bool((transition.std > 0).all()):
        raise ValueError(
            f"step {step} is listed as stochastic but its std is 0, so it has no density: leave it out of `stochastic` "
            "(the last step of cps and ddim_flow is always deterministic), or raise the noise level"
        )
    xi = noise(step)
    if xi.shape != mean.shape:
        raise ValueError(f"noise({step}) must have the shape of x {tuple(mean.shape)}, got {tuple(xi.shape)}")
    return mean + transition.std * xi.to(device=mean.device, dtype=mean.dtype)
