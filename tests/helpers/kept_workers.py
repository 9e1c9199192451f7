"""Workers on Ray whose processes serve one run after another: what they import takes seconds each time."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from flowrl.pipelines import PIPELINES
from flowrl.workers.dispatch import Answer
from flowrl.workers.ray_backend import Order, RayBackend

_FAMILY = PIPELINES["sd3"]


def with_toy(_: Any) -> None:
    """Puts the toy into the place of a family, in a worker's process."""
    PIPELINES["sd3"] = "toy_pipeline"


def without_toy(_: Any) -> None:
    """Puts the family back."""
    PIPELINES["sd3"] = _FAMILY


def forget(worker: Any) -> None:
    """Takes from a worker the version of another run's weights, whose numbers this run counts again."""
    worker._version = 0


def die(_: Any) -> None:
    """Ends a worker's process without a word."""
    os._exit(1)


class Kept(RayBackend):
    """Actors that are not ended with a run but take the next one's duty: they have imported already.

    Attributes:
        idle: those of earlier runs.
        dies_at: the ticket at which a worker dies in the place of drawing.
        family: what a worker does before it loads.
        answers: of the run.
    """

    idle: ClassVar[list[Any]] = []
    dies_at: ClassVar[int | None] = None
    family: ClassVar[Any] = staticmethod(with_toy)
    answers: ClassVar[list[Answer]] = []

    def start(self, worker: int) -> None:
        self._forget(worker)
        if (gone := self._actors.pop(worker, None)) is not None:
            self._ray.kill(gone)
        actor = self._actors[worker] = Kept.idle.pop() if Kept.idle else self._class.remote()
        actor.__ray_call__.remote(Kept.family)
        actor.__ray_call__.remote(forget)
        self._awaited[actor.load.remote(self._duty)] = worker, None

    def submit(self, worker: int, ticket: int, piece: Order) -> None:
        if ticket != Kept.dies_at:
            super().submit(worker, ticket, piece)
            return
        Kept.dies_at = None
        self._awaited[self._actors[worker].__ray_call__.remote(die)] = worker, ticket

    def wait(self, seconds: float) -> list[Answer]:
        found = super().wait(seconds)
        Kept.answers += found
        return found

    def close(self) -> None:
        self._awaited.clear()
        Kept.idle += self._actors.values()
        self._actors.clear()
