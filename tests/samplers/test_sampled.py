"""The table of transitions and finished latents that every way of sampling ends in."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl.runtime.randomness import counter_normal
from flowrl.samplers import KERNELS, Velocity, build_schedule
from flowrl.samplers.branching import sample_branches
from flowrl.samplers.completion import complete, sample_trajectories
from flowrl.samplers.rollout import rollout
from flowrl.samplers.tree import sample_tree
from flowrl.trajectory import Sampled

SCHEDULE = build_schedule({"shift": 2.0}, 4)
KERNEL = KERNELS["dance_sde"]
SHAPE = (3, 2)


def velocity(x: Tensor, sigma: Tensor, timestep: Tensor) -> Tensor:
    return torch.tanh(x)


def velocity_of(index: Tensor) -> Velocity:
    return velocity


def trajectories(seed: int, b: int = 2, *, values: bool = False, means: bool = False) -> Sampled:
    """Stochastic at steps 0 and 2."""
    shape = (b, *SHAPE)
    done = rollout(
        velocity, counter_normal(shape, seed, "x"), SCHEDULE, KERNEL, lambda step: counter_normal(shape, seed, step),
        stochastic=(0, 2), keep_means=means, keep_velocity=True,
    )  # fmt: skip
    completed = complete(velocity_of, done, SCHEDULE, mode="full", batch_size=8) if values else None
    return sample_trajectories(done, torch.arange(b) + 10 * seed, completed)


def branches(seed: int, strides: tuple[int, ...] = (1,)) -> Sampled:
    """Three branches at each of two steps of two anchors."""
    return sample_branches(
        velocity_of, counter_normal((2, *SHAPE), seed, "x"), torch.zeros(2, dtype=torch.long),
        torch.arange(2) + 10 * seed, SCHEDULE, KERNEL, lambda step, nodes: counter_normal((6, *SHAPE), seed, step),
        steps=(0, 1), branches=3, strides=strides, batch_size=8,
    )  # fmt: skip


def tree(seed: int) -> Sampled:
    """Two trees that split at steps 0 and 2; step 1 is an ODE step."""
    return sample_tree(
        velocity_of, counter_normal((2, *SHAPE), seed, "x"), torch.zeros(2, dtype=torch.long),
        torch.arange(2) + 10 * seed, SCHEDULE, KERNEL,
        lambda step, nodes: counter_normal((len(nodes), *SHAPE), seed, step),
        splits=(0, 2), children=2, stochastic=(0, 2), batch_size=8,
    )  # fmt: skip


def story(sampled: Sampled) -> list[dict[str, Any]]:
    """What the table says of each finished latent, without numbers of rows: its path as latents, back to front."""
    told = []
    for end, after in enumerate(sampled.finished_after.tolist()):
        path = []
        while after >= 0:
            path.append({
                "from": sampled.states[sampled.source[after]].tolist(), "step": int(sampled.step[after]),
                "to": sampled.states[sampled.produced[after]].tolist(), "group": int(sampled.group[after]),
                "log_prob": float(sampled.log_prob[after]), "shared": int(sampled.sample[after]) < 0,
                "mean": None if sampled.mean is None else sampled.mean[after].tolist(),
            })  # fmt: skip
            after = int(sampled.parent[after])
        told.append({
            "latent": sampled.finished[end].tolist(), "group": int(sampled.finished_group[end]), "path": path,
            "end": bool(sampled.ends[end]),
        })  # fmt: skip
    return told


KINDS: dict[str, Any] = {
    "trajectories": trajectories,
    "with values": lambda seed: trajectories(seed, values=True),
    "with means": lambda seed: trajectories(seed, b=seed + 1, means=True),
    "branches": branches,
    "two strides": lambda seed: branches(seed, strides=(1, 2)),
    "trees": tree,
}


@pytest.mark.parametrize("kind", KINDS)
def test_joined_tables_tell_the_same_stories(kind: str) -> None:
    parts = [KINDS[kind](seed) for seed in range(3)]
    joined = Sampled.cat(parts)
    assert story(joined) == [end for part in parts for end in story(part)]
    assert len(joined) == sum(len(part) for part in parts)
    assert len(joined.states) == sum(len(part.states) for part in parts)
    one = Sampled.cat(parts[:1])
    assert all(_equal(getattr(one, f.name), getattr(parts[0], f.name)) for f in fields(Sampled))


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_joined_samples_stay_apart(kind: str) -> None:
    parts = [KINDS[kind](seed) for seed in range(3)]
    joined = Sampled.cat(parts)
    alone = [{int(number) for number in part.sample if number >= 0} for part in parts]
    assert len({int(number) for number in joined.sample if number >= 0}) == sum(len(numbers) for numbers in alone)
    assert int((joined.sample < 0).sum()) == sum(int((part.sample < 0).sum()) for part in parts)
    assert torch.equal(joined.parent < 0, torch.cat([part.parent for part in parts]) < 0)


def test_joining_in_steps_is_joining_at_once() -> None:
    parts = [trajectories(seed, values=True) for seed in range(3)]
    at_once, in_steps = Sampled.cat(parts), Sampled.cat([Sampled.cat(parts[:2]), parts[2]])
    assert all(_equal(getattr(at_once, f.name), getattr(in_steps, f.name)) for f in fields(Sampled))


def test_ends_are_the_images_that_no_stochastic_step_follows() -> None:
    assert trajectories(0).ends.tolist() == [True, True]
    # Value k stands before stochastic step k; the last is the rollout's own image.
    assert trajectories(0, values=True).ends.tolist() == [False, False, True] * 2
    assert branches(0).ends.tolist() == [True] * 12
    assert branches(0, strides=(1, 2)).ends.tolist() == [True] * 24
    assert tree(0).ends.tolist() == [True] * 8
    joined = Sampled.cat([trajectories(0, values=True), trajectories(1, b=1, values=True)])
    assert joined.ends.tolist() == [False, False, True] * 3


def test_an_image_of_the_ode_alone_is_no_end() -> None:
    """-1 marks the start noise, and must not be taken for the last transition."""
    sampled = trajectories(0, b=1)
    beside = replace(sampled, finished_after=torch.tensor([-1]))
    assert beside.ends.tolist() == [False]
    only = replace(sampled, parent=torch.tensor([-1, -1]), finished=sampled.finished.repeat(2, 1, 1),
                   finished_group=torch.tensor([0, 0]), finished_after=torch.tensor([0, 1]))  # fmt: skip
    assert only.ends.tolist() == [True, True]


def test_tables_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="all or none recorded means"):
        Sampled.cat([trajectories(0, means=True), trajectories(1)])
    with pytest.raises(ValueError, match="when there is one"):
        Sampled.cat([])
    sampled = trajectories(0)
    for change in ({"parent": sampled.parent[:1]}, {"finished_group": sampled.group}):
        with pytest.raises(ValueError, match="equal lengths"):
            replace(sampled, **change)
