"""Workers on Ray whose processes serve one run after another, and are forks of one that has imported everything: what
they import takes seconds each time. And workers in the test's own process, without Ray."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any, ClassVar

import pytest
import torch

from flowrl.pipelines import PIPELINES
from flowrl.training.processes.mesh import device_mesh
from flowrl.workers.actor import Duty, RolloutWorker
from flowrl.workers.dispatch import Answer, PieceDone, WorkerGone, WorkerReady
from flowrl.workers.ray_backend import Order, RayBackend

_FAMILY = PIPELINES["sd3"]


def start_warm(patch: pytest.MonkeyPatch, python: str) -> None:
    """Has Ray start its workers by `warm_interpreter` where this process connects to it from now on."""
    import ray

    patch.setattr(ray, "init", partial(ray.init, runtime_env={"py_executable": python}))


def with_toy(_: Any) -> None:
    """Puts the toy into the place of a family, in a worker's process."""
    PIPELINES["sd3"] = "toy_pipeline"


def without_toy(_: Any) -> None:
    """Puts the family back."""
    PIPELINES["sd3"] = _FAMILY


def forget(worker: Any) -> None:
    """Takes from a worker the version of another run's weights, whose numbers this run counts again, and its group."""
    worker._version = 0
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        device_mesh.cache_clear()


def die(_: Any) -> None:
    """Ends a worker's process without a word."""
    os._exit(1)


class Kept(RayBackend):
    """Actors that are not ended with a run but take the next one's duty: they have imported already.

    Attributes:
        idle: those of earlier runs.
        dies_at: the ticket at which a worker, or the last process of one, dies in the place of drawing.
        family: what a worker does before it loads.
        answers: of the run.
        far: whether no worker is taken for one of this machine.
    """

    idle: ClassVar[list[Any]] = []
    dies_at: ClassVar[int | None] = None
    family: ClassVar[Any] = staticmethod(with_toy)
    answers: ClassVar[list[Answer]] = []
    far: ClassVar[bool] = False

    def _make(self) -> Any:
        if Kept.idle:
            group = Kept.idle.pop()
            group.found.clear()
        else:
            group = super()._make()
        for actor in group.actors:
            actor.__ray_call__.remote(Kept.family)
            actor.__ray_call__.remote(forget)
        return group

    def submit(self, worker: int, ticket: int, piece: Order) -> None:
        if Kept.far:
            self._near.clear()
        if ticket == Kept.dies_at:
            Kept.dies_at = None
            self._groups[worker].actors[-1].__ray_call__.remote(die)
        super().submit(worker, ticket, piece)

    def wait(self, seconds: float) -> list[Answer]:
        found = super().wait(seconds)
        Kept.answers += found
        return found

    def close(self) -> None:
        self._awaited.clear()
        Kept.idle += self._groups.values()
        self._groups.clear()


class Inside:
    """A backend whose workers are real and live in this process: one after another draws, in the dispatcher's thread.

    Attributes:
        asked: the iteration of each piece, -1 of evaluations, and the number of its weights, as they were drawn.
        drew: numbers of the workers that drew any.
        dies_at: the ticket at which a worker dies in the place of drawing.
    """

    asked: ClassVar[list[tuple[int, int]]] = []
    drew: ClassVar[set[int]] = set()
    dies_at: ClassVar[int | None] = None

    def __init__(self, duty: Duty, *, gpus: float) -> None:
        self._duty, self._workers = duty, dict[int, RolloutWorker]()
        self._given, self._answers = list[tuple[int, int, Order]](), list[Answer]()

    def now(self) -> float:
        return time.monotonic()

    def put(self, data: Any) -> Any:
        raise AssertionError("weights come by memory")

    def start(self, worker: int) -> None:
        self._workers[worker] = made = RolloutWorker()
        place, near = made.load(self._duty)
        assert near
        self._answers.append(WorkerReady(worker, place))

    def stop(self, worker: int) -> None:
        self._workers.pop(worker, None)

    def submit(self, worker: int, ticket: int, piece: Order) -> None:
        self._given.append((worker, ticket, piece))

    def wait(self, seconds: float) -> list[Answer]:
        found, self._answers = self._answers, []
        if self._given and self._given[0][1] == Inside.dies_at:
            number, _, _ = self._given.pop(0)
            Inside.dies_at = None
            self._given = [given for given in self._given if given[0] != number]
            found.append(WorkerGone(number, "its process ended"))
        elif self._given:
            number, ticket, piece = self._given.pop(0)
            Inside.drew.add(number)
            (request,), version = piece.requests, piece.version
            Inside.asked.append((getattr(request, "iteration", -1), version.number))
            drawn = self._workers[number].draw(request, version.number, version.parts)
            found.append(PieceDone(number, ticket, [drawn]))
        elif not found:
            time.sleep(0.001)
        return found

    def close(self) -> None:
        self._workers.clear()
