"""What an iteration records lies on the host, is freed before the next one samples, and is what a plan counts."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_runs import TinyRuns
from torch import Tensor
from toy_pipeline import toy_runs

from flowrl import samplers
from flowrl.config.train import load_config
from flowrl.planning.memory import pinned
from flowrl.runtime import placement
from flowrl.session.preflight import recipe_of
from flowrl.training import paths
from flowrl.trajectory import Sampled, Trajectory

LATENT = 4 * 3 * 2 * 2
"""Bytes of a latent of the toy."""
BRANCHES = ("credit.method=tempflow", "credit.branches=2")
TREE = ("credit.method=tree_grpo", "credit.children=2", "credit.splits=[0,1]")
CASES: dict[str, tuple[str, ...]] = {
    "trajectories": (),
    "means": ("objective.name=guard",),
    "a window": ("sampler.num_steps=4", "sampler.sde_window_size=1"),
    "branches": BRANCHES,
    "a tree": TREE,
    "completions": ("credit.method=dense_grpo",),
    "rounds": ("curriculum.max_rounds=1",),
    "final latents": ("recipe=forward", "sampler.kernel=ode", "times.count=2"),
    "pairs": ("recipe=preference", "sampler.kernel=ode", "times.count=2"),
    "pairs of paths": ("recipe=preference", "objective.name=d3po", "same_latent=true"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRuns]:
    yield from toy_runs(tmp_path_factory.mktemp("record"), num_iterations=3, checkpoint_every=9)


class Watch:
    """What is recorded, by weak references: bytes at the end of each rollout, and what lived when it began."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes, self.before = list[int](), list[int]()
        self.pieces = 0  # of the device that lived together, at most
        self._kept, self._drawn = list[weakref.ref[Tensor]](), list[weakref.ref[Tensor]]()
        rows, draw, on_host, rollout = placement.host_rows, paths.sample, Sampled.on_host, samplers.rollout

        def host_rows(like: Tensor, count: int) -> Tensor:
            made = rows(like, count)
            if made.ndim > 2:  # log-densities are columns
                self._kept.append(weakref.ref(made))
            return made

        def drawn(*arguments: Any) -> Trajectory:
            self.before.append(self._alive())
            found = draw(*arguments)
            self.bytes.append(self._alive())
            return found

        def hosted(sampled: Sampled) -> Sampled:
            found = on_host(sampled)
            latents = [one for one in (found.states, found.finished, found.mean) if one is not None]
            if not self.bytes or self._alive() == 0:  # no trajectories, which are on the host already
                self.bytes.append(sum(one.nbytes for one in latents))
            return found

        def piece(*arguments: Any, **more: Any) -> Trajectory:
            found = rollout(*arguments, **more)
            self._drawn.append(weakref.ref(found.states))
            self.pieces = max(self.pieces, sum(one() is not None for one in self._drawn))
            return found

        monkeypatch.setattr(paths, "host_rows", host_rows)
        monkeypatch.setattr(paths, "rollout", piece)
        monkeypatch.setattr(Sampled, "on_host", hosted)
        for recipe in ("forward", "preference"):
            monkeypatch.setattr(f"flowrl.recipes.{recipe}.sample", drawn)
        monkeypatch.setattr(paths, "sample", drawn)

    def _alive(self) -> int:
        found = [one() for one in self._kept]
        return sum(one.nbytes for one in found if one is not None)


@pytest.mark.parametrize("name", CASES)
def test_the_record_is_what_a_plan_counts_and_is_freed_before_the_next_rollout(
    runs: TinyRuns, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    sizes = ("rollout_batch_size=2", "micro_batch_size=2")
    config = load_config(runs.config, [*sizes, *CASES[name]])
    watch = Watch(monkeypatch)
    runs.train(name.replace(" ", "-"), *sizes, *CASES[name])
    counted = recipe_of(config).counts(config).record()[0] * LATENT
    assert counted > 0
    assert watch.bytes == [counted] * 3
    assert set(watch.before) <= {0}
    if watch.before:  # trajectories, which are drawn in pieces
        assert len(watch.before) == 3
        assert watch.pieces == 1


def test_a_large_record_is_not_pinned_and_a_small_one_takes_a_power_of_two() -> None:
    assert [pinned(size) for size in (0, 1, 3, 2**20, 2**20 + 1)] == [0, 1, 4, 2**20, 2**21]
    assert pinned(placement.PINNED) == placement.PINNED
    assert pinned(placement.PINNED + 1) == placement.PINNED + 1
    assert not placement.host_rows(torch.zeros(1, 3), 4).is_pinned()
