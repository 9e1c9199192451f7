"""Values on the way: the images that the ODE makes of the latents a trajectory passed through.

With K stochastic steps, value k is the image of the latent before stochastic step k, carried to sigma 0 without noise:
value 0 is the ODE image of the start noise and value K the rollout's own image. Steps between stochastic steps are ODE
steps already, so value k is the image after k stochastic steps, whichever steps these are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from flowrl.runtime.shapes import Float, Int
from flowrl.samplers.guidance import Velocity
from flowrl.samplers.parametrization import working_dtype
from flowrl.samplers.step import euler
from flowrl.trajectory import Sampled, Schedule, Trajectory

Mode = Literal["full", "clean"] | int


def complete(
    velocity_of: Callable[[Tensor], Velocity],
    trajectory: Trajectory,
    schedule: Schedule,
    *,
    mode: Mode,
    batch_size: int,
) -> Float[Tensor, " b K *latent"]:
    """Carry the latent before each stochastic step to sigma 0 by the ODE.

    The velocity at that latent is the rollout's own and is not evaluated again. All completions run together: turn by
    turn every one that is not finished yet takes an Euler step, in batches of `batch_size` rows. "full" is what the
    rollout would have made of the latent without noise and with Euler steps; a rollout with another solver ends in an
    image that is not comparable. Wrap the call in `torch.no_grad()`.

    | mode | Euler steps from step j on | evaluations, T steps |
    |---|---|---|
    | "full" | those left of the schedule (DenseGRPO, arXiv 2601.20218; TP-GRPO, arXiv 2602.06422) | T - j - 1 |
    | m | m of equal size in sigma; the timestep shrinks with sigma (Stepwise-Flow-GRPO, m = 5) | m - 1 |
    | "clean" | one, the clean estimate x - sigma * velocity (VGPO, arXiv 2512.12387); the same as m = 1 | 0 |

    Args:
        velocity_of: `velocity_of(index)` binds the samples `index` [r], integers in 0 .. b-1 on the CPU, and gives
            `velocity(x, sigma, timestep)` for r rows with sigma and timestep [r]. A sample comes up several times.
        trajectory: b samples of K stochastic steps with their velocities (`rollout(..., keep_velocity=True)`).
        batch_size: Most rows of one network call.

    Returns [b, K, *latent], entry k from the latent before stochastic step k; the working dtype of the states. Raises
    ValueError: the trajectory has no velocities or no stochastic step, or steps outside the schedule; mode or
    batch_size is not as above.
    """
    states, steps, velocity, b = trajectory.states, trajectory.steps, trajectory.velocity, len(trajectory)
    if velocity is None:
        raise ValueError("completions start with the velocities of the rollout: run it with keep_velocity=True")
    if not steps or steps[-1] >= schedule.num_steps:
        raise ValueError(
            f"completions start before stochastic steps in 0 .. {schedule.num_steps - 1}, the trajectory has {steps}: "
            "pass the schedule of the rollout, and a rollout with stochastic steps"
        )
    if batch_size < 1:
        raise ValueError(f"batch_size is the number of rows of one network call and at least 1, got {batch_size}")
    rest = [_remaining(schedule, step, mode) for step in steps]
    x = states[:, [trajectory.kept.index(step) for step in steps]].to(working_dtype(states))
    for turn in range(max(grid.num_steps for grid in rest)):
        active = [k for k, grid in enumerate(rest) if turn < grid.num_steps]
        sample = torch.arange(b).repeat_interleave(len(active))
        sigma, sigma_next = (torch.stack([rest[k].sigma[turn + i] for k in active]).repeat(b) for i in (0, 1))
        timestep = torch.stack([rest[k].timestep[turn] for k in active]).repeat(b)
        rows = x[:, active].flatten(0, 1)
        if turn == 0:
            predicted = velocity.flatten(0, 1)
        else:
            blocks = torch.arange(len(rows)).split(batch_size)
            predicted = torch.cat([velocity_of(sample[r])(rows[r], sigma[r], timestep[r]) for r in blocks])
        x[:, active] = euler(rows, predicted, sigma, sigma_next).unflatten(0, (b, len(active)))
    return x


def _remaining(schedule: Schedule, step: int, mode: Mode) -> Schedule:
    """The grid that a completion from before `step` follows."""
    if mode == "full":
        return Schedule(sigma=schedule.sigma[step:], timestep=schedule.timestep[step:])
    count = 1 if mode == "clean" else mode
    if not isinstance(count, int) or count < 1:
        raise ValueError(f'mode is "full", "clean" or a number of Euler steps of at least 1, got {mode!r}')
    left = torch.arange(count, -1, -1, dtype=torch.float64) / count
    sigma, timestep = (left * float(grid[step]) for grid in (schedule.sigma, schedule.timestep))
    return Schedule(sigma=sigma.to(schedule.sigma.dtype), timestep=timestep[:-1].to(schedule.timestep.dtype))


def sample_trajectories(
    trajectory: Trajectory, group_b: Int[Tensor, " b"], completed: Float[Tensor, " b K *latent"] | None
) -> Sampled:
    """Flatten a rollout of b samples with K stochastic steps into transitions and finished latents.

    Transition `i * K + k` is stochastic step k of sample i. Finished latents are the b images of the rollout or, with
    completions, `i * (K + 1) + k`: value k of sample i, the last of them the rollout's own image. What tells rows apart
    is on the host.

    Args:
        group_b: [b] prompt group of each sample, numbered over all processes.
        completed: [b, K, *latent] from `complete`; None where only finished images are scored.

    Raises ValueError: there is no stochastic step, or a shape does not fit.
    """
    b, count = len(trajectory), len(trajectory.steps)
    if count == 0:
        raise ValueError("the trajectory has no stochastic step, so nothing to train: name some in the rollout")
    wanted = (b, count, *trajectory.final.shape[1:])
    if group_b.shape != (b,) or (completed is not None and completed.shape != wanted):
        raise ValueError(
            f"{b} samples of {count} stochastic steps have group_b ({b},) and completions {wanted} or None, got "
            f"{tuple(group_b.shape)} and {None if completed is None else tuple(completed.shape)}"
        )
    row = torch.arange(b * count).reshape(b, count)
    sample = torch.arange(b).repeat_interleave(count)
    group = group_b.cpu().long()
    position = torch.tensor([trajectory.kept.index(step) for step in trajectory.steps])
    source = sample * len(trajectory.kept) + position.repeat(b)
    finished, after = trajectory.final[:, None], row[:, -1:]
    if completed is not None:
        finished = torch.cat([completed.to(finished.dtype), finished], 1)
        after = torch.cat([torch.full_like(after, -1), row], 1)
    return Sampled(
        states=trajectory.states.flatten(0, 1),
        source=source,
        produced=source + 1,  # step and step + 1 are both kept, hence neighbours
        step=torch.tensor(trajectory.steps).repeat(b),
        sample=sample,
        group=group[sample],
        parent=torch.cat([torch.full_like(row[:, :1], -1), row[:, :-1]], 1).flatten(),
        log_prob=trajectory.log_prob.flatten(),
        mean=None if trajectory.mean is None else trajectory.mean.flatten(0, 1),
        finished=finished.flatten(0, 1),
        finished_group=group.repeat_interleave(finished.shape[1]),
        finished_after=after.flatten(),
    )
