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

from flowrl.runtime.placement import sent, taken
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
) -> Float[Tensor, " b V *latent"]:
    """Carry the latent before each stochastic step to sigma 0 by the ODE.

    The velocity at that latent comes from the rollout and is not evaluated again. All completions run together: turn by
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

    Returns the values [b, K + 1, *latent], entry k from the latent before stochastic step k, the last the rollout's own
    latent; the working dtype of the states. Raises ValueError: the trajectory has no velocities or no stochastic step,
    or steps outside the schedule; mode or batch_size is not as above.
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
    x = torch.cat([states[:, trajectory.kept.index(step), None] for step in steps] + [trajectory.final[:, None]], 1)
    x = x.to(working_dtype(states))
    flat, first = x.flatten(0, 1), velocity.flatten(0, 1)
    for turn in range(max(grid.num_steps for grid in rest)):
        active = [k for k, grid in enumerate(rest) if turn < grid.num_steps]
        sample = torch.arange(b).repeat_interleave(len(active))
        place = sample * x.shape[1] + torch.tensor(active).repeat(b)
        sigma, sigma_next = (torch.stack([rest[k].sigma[turn + i] for k in active]).repeat(b) for i in (0, 1))
        timestep = torch.stack([rest[k].timestep[turn] for k in active]).repeat(b)
        for r in torch.arange(len(place)).split(batch_size):  # at the first turn all are active
            rows = taken(flat, place[r])
            predicted = velocity_of(sample[r])(rows, sigma[r], timestep[r]) if turn else taken(first, r)
            flat[sent(place[r], x.device)] = euler(rows, predicted, sigma[r], sigma_next[r])
    return x


def _remaining(schedule: Schedule, step: int, mode: Mode) -> Schedule:
    """The grid that a completion from before `step` follows."""
    if mode == "full":
        return Schedule(sigma=schedule.sigma[step:], timestep=schedule.timestep[step:])
    count = 1 if mode == "clean" else mode
    if not isinstance(count, int) or count < 1:
        raise ValueError(f'mode is "full", "clean" or a number of Euler steps of at least 1, got {mode!r}')
    left = torch.arange(count, -1, -1, dtype=torch.float64) / count
    sigma, times = (left * float(grid[step].real) for grid in (schedule.sigma, schedule.timestep))
    timestep = torch.complex(times[:-1], times[1:]) if schedule.timestep.is_complex() else times[:-1]
    return Schedule(sigma=sigma.to(schedule.sigma.dtype), timestep=timestep.to(schedule.timestep.dtype))


def sample_trajectories(
    trajectory: Trajectory, group_b: Int[Tensor, " b"], values: Float[Tensor, " b V *latent"] | None
) -> Sampled:
    """Flatten a rollout of b samples with K stochastic steps into transitions and finished latents.

    Transition `i * K + k` is stochastic step k of sample i. Finished latents are the b images of the rollout or, with
    completions, `i * (K + 1) + k`: value k of sample i, the last of them the rollout's own image. What tells rows apart
    is on the host.

    Args:
        group_b: [b] prompt group of each sample, numbered over all processes.
        values: [b, K + 1, *latent] from `complete`; None if only finished images are scored.

    Raises ValueError: there is no stochastic step, or a shape does not fit.
    """
    b, count = len(trajectory), len(trajectory.steps)
    if count == 0:
        raise ValueError("the trajectory has no stochastic step, so nothing to train: name some in the rollout")
    wanted = (b, count + 1, *trajectory.final.shape[1:])
    if group_b.shape != (b,) or (values is not None and values.shape != wanted):
        raise ValueError(
            f"{b} samples of {count} stochastic steps have group_b ({b},) and values {wanted} or None, got "
            f"{tuple(group_b.shape)} and {None if values is None else tuple(values.shape)}"
        )
    row = torch.arange(b * count).reshape(b, count)
    sample = torch.arange(b).repeat_interleave(count)
    group = group_b.cpu().long()
    position = torch.tensor([trajectory.kept.index(step) for step in trajectory.steps])
    source = sample * len(trajectory.kept) + position.repeat(b)
    finished, after = trajectory.final[:, None], row[:, -1:]
    if values is not None:
        finished, after = values, torch.cat([torch.full_like(after, -1), row], 1)
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
        memory=None if trajectory.memory is None else trajectory.memory.flatten(0, 1),
        finished=finished.flatten(0, 1),
        finished_group=group.repeat_interleave(finished.shape[1]),
        finished_after=after.flatten(),
    )
