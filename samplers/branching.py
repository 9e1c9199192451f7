"""Branches: stochastic successors of an ODE trajectory, each completed by the ODE (TempFlow-GRPO, G2RPO).

A branch differs from its siblings only in the noise of one step, so the reward of its image is credit for that step.

Replay rule, for trees too: the distinct sources of a step are evaluated in ascending pool order, `batch_size` at a
time, and the transitions of a chunk are scored together in row order. Networks answer a little differently in another
batch; an update that follows this rule computes the recorded log-densities to the bit.

The host holds all latents; each level goes to its place in the pool when drawn. The device holds one call's latents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from flowrl.runtime.placement import host_rows, put, sent, settle, taken
from flowrl.runtime.shapes import Float, Int
from flowrl.samplers.guidance import Velocity
from flowrl.samplers.kernels import Kernel
from flowrl.samplers.step import Moved, advance, check_steps, euler
from flowrl.samplers.windows import thinned_steps
from flowrl.trajectory import Sampled, Schedule, start_state

VelocityOf = Callable[[Tensor], Velocity]  # indexes of prompts [b] -> the guided velocity of a batch of b
NodeNoise = Callable[[int, range], Tensor]  # (step, some of the latents that it produces) -> [their number, *latent]


def chunked_velocities(
    velocity_of: VelocityOf,
    x: Tensor,
    prompt: Tensor,
    schedule: Schedule,
    step: int,
    batch_size: int,
    device: torch.device,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The latents [n, *latent] of one step, `batch_size` at a time: first place, latents on the device, velocities."""
    for start in range(0, len(x), batch_size):
        own = sent(x[start : start + batch_size], device)
        index = prompt[start : start + batch_size]
        yield start, own, velocity_of(index)(own, schedule.sigma[step], schedule.timestep[step])


def draw_successors(
    kernel: Kernel, x: Tensor, start: int, velocity: Tensor, schedule: Schedule, step: int, noise: NodeNoise, width: int
) -> Moved:
    """`width` stochastic successors of each latent of a chunk that begins with number `start`; siblings are
    next to each other. Raises ValueError: the noise has another shape."""
    nodes = range(start * width, (start + len(x)) * width)
    xi, shape = noise(step, nodes), (len(nodes), *x.shape[1:])
    if tuple(xi.shape) != shape:
        raise ValueError(f"noise({step}, {nodes}) must give one noise per successor {shape}, got {tuple(xi.shape)}")
    source, output = x.repeat_interleave(width, 0), velocity.repeat_interleave(width, 0)
    return advance(kernel, source, output, schedule.sigma[step], schedule.sigma[step + 1], xi)


def check_start(x: Tensor, prompt_a: Tensor, group_a: Tensor, batch_size: int) -> None:
    """Check what branches and trees start from. Raises ValueError: there is no start noise, prompts or groups are not
    one per start noise, or batch_size < 1."""
    if len(x) == 0 or prompt_a.shape != x.shape[:1] or group_a.shape != x.shape[:1]:
        raise ValueError(
            f"each of the start noises x {tuple(x.shape)} needs its prompt and its group, at least one of each, got "
            f"prompt_a {tuple(prompt_a.shape)} and group_a {tuple(group_a.shape)}"
        )
    if batch_size < 1:
        raise ValueError(f"batch_size is the number of latents per network call, at least 1, got {batch_size}")


def _complete(
    velocity_of: VelocityOf,
    x_F: Float[Tensor, " F *latent"],
    prompt_F: Int[Tensor, " F"],
    steps: Sequence[int],
    schedule: Schedule,
    strides: Sequence[int],
    batch_size: int,
    device: torch.device,
) -> None:
    """Follow the ODE from the products of stochastic steps to sigma 0, once for every stride.

    Stride 1 takes every step of the schedule, others thin it out as G2RPO does, see `windows.thinned_steps`. All
    completions run together, at each step those that are evaluated there. Up to the second evaluation the completions
    of one latent are the same for every stride, so they are evaluated once until then.

    Args:
        x_F: [M * L, *latent] by (latent, stride), at first at `schedule.sigma[steps[i] + 1]`, then at sigma 0.
    """
    evaluated = [thinned_steps(schedule.num_steps, after, stride) for after in steps for stride in strides]
    for step in range(min(steps) + 1, schedule.num_steps):
        alike: dict[int, list[int]] = {}  # those evaluated here, by the first of those that share its latent
        for path in (path for path, own in enumerate(evaluated) if step in own):
            row = path // len(strides)
            first = next(p for p in range(row * len(strides), path + 1) if step in evaluated[p])
            alike.setdefault(first if step <= steps[row] + 2 else path, []).append(path)
        for leaders in torch.tensor(list(alike)).split(batch_size) if alike else ():
            members = [(place, path) for place, first in enumerate(leaders.tolist()) for path in alike[first]]
            begin = members[0][1]  # a chunk's paths stand together; of those between them none is evaluated here
            x = sent(x_F[begin : members[-1][1] + 1], device)
            predicted = velocity_of(prompt_F[leaders])
            velocity = predicted(taken(x, leaders - begin), schedule.sigma[step], schedule.timestep[step])
            places, paths = (sent(torch.tensor(column), device) for column in zip(*members, strict=True))
            following = [next((s for s in evaluated[p] if s > step), schedule.num_steps) for _, p in members]
            x[paths - begin] = euler(
                x[paths - begin], velocity[places], schedule.sigma[step], schedule.sigma[following]
            )
            put(x_F, begin, x)


def sample_branches(
    velocity_of: VelocityOf,
    x: Float[Tensor, " a *latent"],
    prompt_a: Int[Tensor, " a"],
    group_a: Int[Tensor, " a"],
    schedule: Schedule,
    kernel: Kernel,
    noise: NodeNoise,
    *,
    steps: Sequence[int],
    branches: int,
    strides: Sequence[int] = (1,),
    batch_size: int,
    keep_means: bool = False,
    finish_anchors: bool = False,
    device: torch.device | None = None,
) -> Sampled:
    """Branch off ODE trajectories: at chosen steps several stochastic successors, each completed by the ODE.

    TempFlow-GRPO (arXiv 2508.04324): every step but the last, several start noises per prompt. G2RPO (arXiv
    2510.01982): the first half of the steps, one start noise per prompt, every branch completed on several thinned
    schedules. Anchors stop at their last branching, and all branches of a state share its one network evaluation. With
    B branches and one stride an anchor costs `max(steps) + 1 + B sum_j (T - 1 - j)` evaluations.

    Wrap the call in `torch.no_grad()`. Precision is that of `rollout`.

    Args:
        velocity_of: `velocity_of(index)` is the guided velocity of a batch with these prompts, index [b].
        x: [a, *latent] start noise of each anchor, scaled by `schedule.start_scale` here.
        prompt_a: [a] the index that velocity_of gets.
        group_a: [a] prompt group, numbered over all processes.
        kernel: A kernel with noise_level and sigma_max bound.
        noise: `noise(step, nodes) -> [len(nodes), *latent]` standard normal, for these of the step's a * branches
            successors, which are numbered anchor by anchor.
        steps: The steps that branch, in 0 .. T-1.
        branches: Successors of each anchor state.
        strides: L strides of the completions, see `windows.thinned_steps`.
        keep_means: Record the transition means too.
        finish_anchors: Follow the anchors to the end too, for `T - 1 - max(steps)` more evaluations of each.
        device: The network's device; None takes the device of x.

    Returns `M = len(steps) * a * branches` transitions ordered (step, anchor, branch), each the only one of its path,
    and `M * L` finished latents ordered (transition, stride), after the `a` finished anchors if there are any. The pool
    holds the anchor states by (step, anchor), then the products in row order. The columns that identify rows are on the
    host, like prompt_a and group_a. Raises ValueError: a step is out of range, given twice or deterministic; a count is
    below 1; a shape is wrong.
    """
    check_start(x, prompt_a, group_a, batch_size)
    steps = check_steps(steps, schedule.num_steps, "steps")
    if branches < 1 or not strides or min(strides) < 1 or len(set(strides)) != len(strides):
        raise ValueError(f"branches and strides are at least 1, strides distinct, got {branches} and {list(strides)}")
    a, x, device = len(x), start_state(x, schedule), device or x.device
    sources, count, ends = len(steps) * a, len(steps) * a * branches, a * finish_anchors
    states, finished = host_rows(x, sources + count, device), host_rows(x, ends + count * len(strides), device)
    mean, log_probs = host_rows(x, count if keep_means else 0, device), list[Tensor]()
    level = host_rows(x, a, device)  # of the anchors
    for step in range(schedule.num_steps if finish_anchors else steps[-1] + 1):
        for start, own, velocity in chunked_velocities(velocity_of, x, prompt_a, schedule, step, batch_size, device):
            if step in steps:
                place = steps.index(step) * a + start
                moved = draw_successors(kernel, own, start, velocity, schedule, step, noise, branches)
                put(states, place, own)
                put(states, sources + place * branches, moved.x_next)
                put(finished, ends + place * branches * len(strides), moved.x_next.repeat_interleave(len(strides), 0))
                if keep_means:
                    put(mean, place * branches, moved.mean)
                log_probs.append(moved.log_prob)
                del moved
            put(level, start, euler(own, velocity, schedule.sigma[step], schedule.sigma[step + 1]))
            del own, velocity  # the next chunk's network needs the room
        x = level
    put(finished, 0, level[:ends])
    del x, level
    row = torch.arange(count)
    anchor = row // branches % a
    step_M = torch.tensor(steps).repeat_interleave(a * branches)
    group = group_a[anchor]
    prompt = prompt_a[anchor].repeat_interleave(len(strides))
    _complete(velocity_of, finished[ends:], prompt, step_M.tolist(), schedule, strides, batch_size, device)
    settle(device)
    return Sampled(
        states=states,
        source=row // branches,
        produced=sources + row,
        step=step_M,
        sample=row,
        group=group,
        parent=torch.full_like(row, -1),
        log_prob=torch.cat(log_probs),
        mean=mean if keep_means else None,
        finished=finished,
        finished_group=torch.cat([group_a[:ends], group.repeat_interleave(len(strides))]),
        finished_after=torch.cat([row.new_full((ends,), -1), row.repeat_interleave(len(strides))]),
    )
