"""Sampling of one iteration's stochastic paths: trajectories, branches of an ODE anchor, or trees."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import torch
from torch import Tensor

from flowrl.config.train import SamplerConfig, TrainConfig
from flowrl.credit import Method
from flowrl.randomness import counter_integers, sample_normals
from flowrl.samplers import Kernel, Velocity, rollout
from flowrl.samplers.branching import sample_branches
from flowrl.samplers.completion import complete, sample_trajectories
from flowrl.samplers.tree import sample_tree, sibling_noise, window_law, window_start
from flowrl.samplers.windows import flash_tail, mixgrpo_window
from flowrl.training.loop import Batch, Loop
from flowrl.training.parts import sampler_of
from flowrl.training.scoring import Scoring
from flowrl.trajectory import Sampled, Schedule, Trajectory

_TREE_WINDOW_RATIO = 0.5  # TreeGRPO's law of where the splits lie


def sampler_at(loop: Loop, iteration: int) -> tuple[Kernel, Schedule, tuple[int, ...]]:
    """Kernel, schedule and stochastic steps of an iteration."""
    settings = loop.config.sampler
    kernel, schedule = sampler_of(settings, loop.pipeline)
    steps = stochastic_steps(settings, loop.config.seed, iteration)
    if settings.flash_tail is not None and steps:
        schedule = flash_tail(settings.num_steps, max(steps), settings.flash_tail, shift=_shift(schedule))
    return kernel, schedule, steps


def _shift(schedule: Schedule) -> float:
    """Shift of an evenly spaced grid, read off its second sigma: `sigma = k u / (1 + (k - 1) u)` at `u = 1 - 1 / T`."""
    even, sigma = 1 - 1 / schedule.num_steps, float(schedule.sigma[1])
    return sigma * (1 - even) / (even * (1 - sigma))


def stochastic_steps(settings: SamplerConfig, seed: int, iteration: int) -> tuple[int, ...]:
    """Stochastic steps of an iteration: the whole range, or a window whose place follows from (seed, iteration)."""
    low, high = settings.stochastic_range
    size = settings.sde_window_size or high - low
    if settings.sde_window == "uniform":
        start = counter_integers(low, high - size + 1, seed, "window", iteration)
        return tuple(range(start, start + size))
    return mixgrpo_window(
        iteration, settings.num_steps, size, strategy=settings.sde_window, interval=settings.sde_window_interval,
        stride=settings.sde_window_stride, seed=seed, published_off_by_one=settings.published_window,
    )  # fmt: skip


def sample_paths(
    loop: Loop, batch: Batch, method: Method, kernel: Kernel, schedule: Schedule, steps: tuple[int, ...],
    scoring: Scoring, *, keep_means: bool,
) -> Sampled:  # fmt: skip
    """Samples what a credit method asks for, with the weights of now, and hands finished latents to `scoring`.

    Call it without gradient.
    """
    if method.plan == "branches":
        return _scored(scoring, _branches(loop, batch, kernel, schedule, steps, keep_means=keep_means))
    if method.plan == "tree":
        return _scored(scoring, _trees(loop, batch, kernel, schedule, steps, keep_means=keep_means))
    config, size = loop.config, loop.geometry.rollout_batch_size
    parts = []
    for start in range(0, len(batch.own), size):
        images = batch.own[start : start + size]
        cond = batch.cond[batch.local(batch.group[start : start + size])]
        parts.append(rollout(
            loop.velocity(cond), loop.start_noise(batch, images), schedule, kernel, _step_noise(loop, batch, images),
            stochastic=steps, keep_means=keep_means, keep_velocity=method.values, solver=config.sampler.solver,
        ))  # fmt: skip
        if not method.values:  # else images are finished from every step, below
            scoring.add(parts[-1].final, batch.group[start : start + size], images)
    trajectory = Trajectory.cat(parts)
    completed = None
    if method.values:
        mode = config.credit.completion or method.completion
        with loop.network.counting("completion"):
            completed = complete(
                lambda index: loop.velocity(batch.cond[batch.local(batch.group[index.cpu()])]),
                trajectory, schedule, mode=mode, batch_size=size,
            )  # fmt: skip
    sampled = sample_trajectories(trajectory, batch.group.to(trajectory.final.device), completed)
    return _scored(scoring, sampled) if method.values else sampled


def _scored(scoring: Scoring, sampled: Sampled) -> Sampled:
    """Asks for the rewards of all finished latents at once, which may be more than the images."""
    own, count = scoring.batch.own, len(sampled.finished)
    first = own.start // len(own) * count
    scoring.add(sampled.finished, sampled.finished_group, range(first, first + count))
    return sampled


def _step_noise(loop: Loop, batch: Batch, images: range) -> Callable[[int], Tensor]:
    """Step noise of some images: a function of (seed, iteration, group, image in the group, step)."""
    size, seed = loop.config.group_size, loop.config.seed

    def noise(step: int) -> Tensor:
        keys = [(seed, "step", batch.iteration, i // size, i % size, step) for i in images]
        return sample_normals(loop.pipeline.latent_shape, keys).to(loop.run.device)

    return noise


def _branches(
    loop: Loop, batch: Batch, kernel: Kernel, schedule: Schedule, steps: tuple[int, ...], *, keep_means: bool
) -> Sampled:
    config, shape = loop.config, loop.pipeline.latent_shape
    branches = config.credit.branches or config.group_size
    seeds = config.group_size // branches
    anchors = [(int(group), k) for group in batch.groups for k in range(seeds)]
    keys = [(config.seed, "start", batch.iteration, group, 0 if config.same_latent else k) for group, k in anchors]

    def noise(step: int) -> Tensor:
        each = [(config.seed, "branch", batch.iteration, group, k, number, step)
                for group, k in anchors for number in range(branches)]  # fmt: skip
        return sample_normals(shape, each).to(loop.run.device)

    return sample_branches(
        _velocity_of(loop, batch), sample_normals(shape, keys).to(loop.run.device),
        torch.arange(len(batch.groups)).repeat_interleave(seeds), batch.groups.repeat_interleave(seeds),
        schedule, kernel, noise, steps=steps, branches=branches, strides=config.credit.strides,
        batch_size=loop.geometry.rollout_batch_size, keep_means=keep_means,
    )  # fmt: skip


def tree_steps(
    config: TrainConfig, num_steps: int, iteration: int, steps: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where an iteration's trees split, and which of its steps are stochastic; `steps` are the sampler's."""
    credit = config.credit
    if credit.splits is not None:
        return credit.splits, tuple(sorted({*steps, *credit.splits}))
    depth = tree_depth(config.group_size, credit.children)
    first = window_start(num_steps, depth, _TREE_WINDOW_RATIO, config.seed, iteration)
    splits = tuple(range(first, first + depth))
    return splits, splits


def _trees(
    loop: Loop, batch: Batch, kernel: Kernel, schedule: Schedule, steps: tuple[int, ...], *, keep_means: bool
) -> Sampled:
    config, shape, credit = loop.config, loop.pipeline.latent_shape, loop.config.credit
    groups = [int(group) for group in batch.groups]
    splits, stochastic = tree_steps(config, schedule.num_steps, batch.iteration, steps)

    def drawn(tag: str) -> Callable[[int, int], Tensor]:
        def noise(step: int, nodes: int) -> Tensor:
            each = nodes // len(groups)
            keys = [(config.seed, tag, batch.iteration, g, number, step) for g in groups for number in range(each)]
            return sample_normals(shape, keys).to(loop.run.device)

        return noise

    own = drawn("node")
    if credit.split_noise is not None:
        own = sibling_noise(
            own, drawn("siblings"), splits=splits, children=credit.children, scale=credit.split_noise
        )  # fmt: skip
    start = sample_normals(shape, [(config.seed, "start", batch.iteration, group, 0) for group in groups])
    return sample_tree(
        _velocity_of(loop, batch), start.to(loop.run.device), torch.arange(len(groups)), batch.groups, schedule, kernel,
        own, splits=splits, children=credit.children, stochastic=stochastic,
        batch_size=loop.geometry.rollout_batch_size, keep_means=keep_means,
    )  # fmt: skip


def _velocity_of(loop: Loop, batch: Batch) -> Callable[[Tensor], Velocity]:
    def velocity_of(index: Tensor) -> Velocity:
        return loop.velocity(batch.cond[index.cpu()])

    return velocity_of


def tree_depth(leaves: int, children: int) -> int:
    """Splits of a tree with so many leaves; 0 where no number of splits gives them."""
    depth = round(math.log(leaves, children))
    return depth if children**depth == leaves else 0


def shared_sources(config: TrainConfig, method: Method) -> int:
    """Most latents that the transitions of one step start at, on one process of this run."""
    images = config.num_images // int(os.environ.get("WORLD_SIZE", "1"))
    if method.plan == "branches":
        return images // (config.credit.branches or config.group_size)
    return images // config.credit.children if method.plan == "tree" else images


def check_plan(config: TrainConfig, method: Method) -> None:
    """Refuses credit settings that the method's way of sampling does not read, or that do not fit the group.

    Raises:
        ValueError: names the setting and what to change.
    """
    credit, name, sampler = config.credit, config.credit.method, config.sampler
    steps_read = method.plan != "tree" or credit.splits is not None  # else a tree draws its own steps
    given = {
        "credit.completion": (credit.completion is not None, method.values),
        "credit.branches": (credit.branches is not None, method.plan == "branches"),
        "credit.strides": (credit.strides != (1,), method.plan == "branches"),
        "credit.splits": (credit.splits is not None, method.plan == "tree"),
        "credit.split_noise": (credit.split_noise is not None, method.plan == "tree"),
        "credit.children": (credit.children != 2, method.plan == "tree"),
        "best_of": (config.best_of is not None, method.plan == "trajectories"),
        "sampler.solver": (sampler.solver != "euler", method.plan == "trajectories" and not method.values),
        "sampler.trained_fraction": (sampler.trained_fraction != 1, method.plan == "trajectories"),
        "sampler.sde_window_size": (sampler.sde_window_size != 0, steps_read),
        "sampler.sde_window_range": (sampler.sde_window_range is not None, steps_read),
        "sampler.flash_tail": (sampler.flash_tail is not None, method.plan != "tree"),
    }
    for key, (set_, read) in given.items():
        if set_ and not read:
            raise ValueError(f"{key} is set, but credit method {name} does not read it: remove it")
    steps = stochastic_steps(sampler, config.seed, 0)  # refuses a window that does not fit
    if sampler.trained_fraction != 1 and int(len(steps) * sampler.trained_fraction) < 1:
        raise ValueError(
            f"sampler.trained_fraction ({sampler.trained_fraction:g}) of {len(steps)} stochastic steps is none: raise "
            f"it to at least {1 / len(steps):.2g}"
        )
    if sampler.flash_tail is not None and sampler.grid != "linspace":
        raise ValueError("sampler.flash_tail thins out an evenly spaced grid: set sampler.grid=linspace")
    if sampler.flash_tail is not None:
        flash_tail(sampler.num_steps, max(sampler.stochastic_range[1] - 1, *steps), sampler.flash_tail)
    if len(set(credit.strides)) != len(credit.strides):
        raise ValueError(f"credit.strides {list(credit.strides)} names a stride twice: give each once")
    size, world = config.group_size, int(os.environ.get("WORLD_SIZE", "1"))
    if method.plan != "trajectories" and config.prompts_per_step % world:
        raise ValueError(
            f"credit method {name} samples a group as a whole on one process, so prompts_per_step "
            f"({config.prompts_per_step}) must divide by the {world} processes"
        )
    if method.plan == "branches" and size % (credit.branches or size):
        raise ValueError(
            f"group_size ({size}) must be start noises times credit.branches ({credit.branches}): change one of them"
        )
    if method.plan == "tree":
        splits = len(credit.splits) if credit.splits is not None else tree_depth(size, credit.children)
        if splits < 1 or credit.children**splits != size:
            raise ValueError(
                f"a tree of {credit.children} children a split has {credit.children}^splits leaves, and group_size "
                f"is {size}: choose credit.splits, credit.children and group_size so that they agree"
            )
        if credit.splits is None:
            window_law(sampler.num_steps, splits, _TREE_WINDOW_RATIO)
        given_splits = credit.splits or ()
        outside = [step for step in given_splits if not 0 <= step < sampler.num_steps - 1]
        if outside or len(set(given_splits)) != len(given_splits):
            raise ValueError(
                f"credit.splits {list(given_splits)} must be distinct and lie in 0 .. {sampler.num_steps - 2}: the "
                "last step adds no noise"
            )
