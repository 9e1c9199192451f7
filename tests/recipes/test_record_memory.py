"""What an iteration records lies on the host, is freed before the next one samples, and is what a plan counts."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from toy_pipeline import QuickRun, toy_config, toy_in_place

from flowrl import samplers
from flowrl.config.train import TrainConfig
from flowrl.planning.memory import pinned
from flowrl.recipes import forward, grpo, preference, visited
from flowrl.runtime import placement
from flowrl.samplers import Transition, branching, tree
from flowrl.session.preflight import recipe_of, resolve
from flowrl.training import paths
from flowrl.training.draws import HOST, Draws
from flowrl.training.parts import read_run_prompts
from flowrl.training.record import Recording
from flowrl.trajectory import Rows, Trajectory

LATENT = 4 * 3 * 2 * 2
"""Bytes of a latent of the toy."""
SIZES = ("rollout_batch_size=2", "micro_batch_size=2", "num_iterations=3")
BRANCHES = ("credit.method=tempflow", "credit.branches=2")
TREE = ("credit.method=tree_grpo", "credit.children=2", "credit.splits=[0,1]")
ODE = ("sampler.kernel=ode", "times.count=2")
TAUGHT = "policy.teachers=[{guidance_scale: 3}]"
CASES: dict[str, tuple[str, ...]] = {
    "trajectories": (),
    "means": ("objective.name=guard",),
    "a window": ("sampler.sde_window_size=1",),
    "branches": BRANCHES,
    "branches and their anchors": ("credit.method=self_opd", "credit.branches=2"),
    "branches on strides, with means": ("credit.method=g2rpo", "credit.strides=[1,2]", "objective.name=guard"),
    "a tree": TREE,
    "a tree with a gap, with means": (
        *TREE,
        "credit.splits=[0,2]",
        "sampler.num_steps=6",
        "objective.name=guard",
        "sampler.sde_window_size=1",
    ),
    "completions": ("credit.method=dense_grpo",),
    "rounds": ("curriculum.max_rounds=1",),
    "final latents": ("recipe=forward", *ODE),
    "pairs": ("recipe=preference", *ODE),
    "pairs of paths": ("recipe=preference", "objective.name=d3po", "same_latent=true"),
    "states of art": ("recipe=visited", "sampler.kernel=ode", "objective.name=art", "objective.options.high_noise=2"),
    "states": ("recipe=visited", "sampler.kernel=ode", TAUGHT),
    "states of stochastic steps": ("recipe=visited", "objective.options.states=1", TAUGHT),
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield from toy_in_place(tmp_path_factory.mktemp("record"))


def trained(config: TrainConfig, folder: Path) -> None:
    run: Any = QuickRun(folder)
    recipe = recipe_of(config)
    recipe.check(config)
    assert recipe.main(resolve(config, read_run_prompts(config.prompts)), run)


class Watch:
    """What is recorded, in bytes that live: when each rollout begins, and the most until it ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most, self.before, self.pieces = list[int](), list[int](), 0  # of the device that lived together, at most
        self._kept, self._drawn = list[tuple[StorageWeakRef, int]](), list[weakref.ref[Tensor]]()
        rows, normals, rollout = placement.host_rows, Draws.normals, samplers.rollout

        def host_rows(like: Tensor, count: int, device: torch.device) -> Tensor:
            made = rows(like, count, device)
            return self._noted(made) if made.ndim > 2 else made  # log-densities are columns

        def host_normals(draws: Draws, *arguments: Any, device: torch.device | None = None) -> Tensor:
            made = normals(draws, *arguments, device=device)
            return self._noted(made) if device is HOST else made

        def piece(*arguments: Any, **more: Any) -> Trajectory:
            found = rollout(*arguments, **more)
            self._drawn.append(weakref.ref(found.states))
            self.pieces = max(self.pieces, sum(one() is not None for one in self._drawn))
            return found

        for room in (paths, branching, tree):
            monkeypatch.setattr(room, "host_rows", host_rows)
        monkeypatch.setattr(Draws, "normals", host_normals)
        monkeypatch.setattr(paths, "rollout", piece)
        for recipe, name in ((grpo, "sample_paths"), (forward, "sample"), (preference, "sample"), (visited, "sample")):
            self._watch(monkeypatch, recipe, name)

    def _watch(self, monkeypatch: pytest.MonkeyPatch, recipe: Any, name: str) -> None:
        draw = getattr(recipe, name)

        def drawn(*arguments: Any) -> Any:
            self.before.append(self._alive())
            self.most.append(0)
            return draw(*arguments)

        monkeypatch.setattr(recipe, name, drawn)

    def _noted(self, made: Tensor) -> Tensor:
        storage = made.untyped_storage()
        self._kept.append((StorageWeakRef(storage), storage.nbytes()))
        self.most[-1] = max(self.most[-1], self._alive())
        return made

    def _alive(self) -> int:
        return sum(size for one, size in self._kept if not one.expired())


@pytest.mark.parametrize("name", CASES)
def test_the_record_is_what_a_plan_counts_and_is_freed_before_the_next_rollout(
    toy: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config = toy_config(toy, *SIZES, *CASES[name])
    watch = Watch(monkeypatch)
    trained(config, toy.parent)
    record = recipe_of(config).counts(config).record()
    assert sum(record.columns) > 0
    assert max(watch.most) == sum(record.columns) * LATENT
    assert watch.before == [0] * 3
    assert watch.pieces <= 1


def test_scoring_again_holds_one_graph_at_a_time(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a turn that is there for the others' sake."""
    graphs, found = list[weakref.ref[Tensor]](), list[int]()
    replay, rescore = Recording.replay, Recording.rescore

    def watched(self: Recording, rows: Rows) -> Transition:
        found.append(sum(one() is not None for one in graphs))
        made = replay(self, rows)
        assert made.mean.requires_grad
        graphs.append(weakref.ref(made.mean))
        return made

    def in_step(self: Recording, rows: Rows, blocks: Sequence[Tensor]) -> Iterator[tuple[Tensor, bool]]:
        for block in blocks:
            yield block, True
            yield block[:1], False

    def scored(self: Recording, *arguments: Any, **more: Any) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Recording, "replay", watched)
            patch.setattr(Recording, "in_step", in_step)
            return rescore(self, *arguments, **more)

    monkeypatch.setattr(Recording, "rescore", scored)
    more = ("objective.name=guard", "updates_per_rollout=2", "micro_batch_size=1", "num_iterations=1")
    trained(toy_config(toy, *SIZES, *more), toy.parent)
    assert found == [0] * (2 * 4 * 3)  # each of four images of the second update, at three steps


def test_a_large_tensor_is_not_pinned_and_a_small_one_takes_a_power_of_two() -> None:
    assert [pinned(size) for size in (0, 1, 3, 2**20, 2**20 + 1)] == [0, 1, 4, 2**20, 2**21]
    assert pinned(placement.PINNED) == placement.PINNED
    assert pinned(placement.PINNED + 1) == placement.PINNED + 1
    assert not placement.host_rows(torch.zeros(1, 3), 4, HOST).is_pinned()
