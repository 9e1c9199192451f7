"""Workers as actors of Ray, for the dispatcher."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from flowrl.runtime.disk_errors import WORDS
from flowrl.training.draws import EvalRequest, Request
from flowrl.workers.actor import Duty, RolloutWorker
from flowrl.workers.dispatch import Answer, PieceDone, PieceFailed, WorkerGone, WorkerReady
from flowrl.workers.parcels import Shard, Version

_GONE: Mapping[str, str] = WORDS["worker_gone"]
"""Why an actor is gone, in few words, by Ray's error."""
_IDLE = 0.02  # seconds to the next look where no answer is awaited


@dataclass(frozen=True, slots=True)
class Order:
    """A piece as it is given to a worker, and the weights that it is drawn under."""

    request: Request | EvalRequest
    version: Version


class RayBackend:
    """A `WorkerBackend` whose workers are actors; Ray is connected."""

    def __init__(self, duty: Duty, *, gpus: float) -> None:
        """`gpus` is the share of one that each worker is given; 0 on a CPU."""
        import ray

        self._ray = ray
        # Tensors travel as plain memory, which processes of one machine share, rather than through pickle.
        ray.util.register_serializer(torch.Tensor, serializer=_bytes_of, deserializer=_tensor_of)
        self._class: Any = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0)(RolloutWorker)
        self._duty = ray.put(duty)
        self._actors: dict[int, Any] = {}
        self._awaited: dict[Any, tuple[int, int | None]] = {}  # reference -> worker, ticket; None is its loading
        self._near = set[int]()  # workers of this machine
        self._sent: WeakKeyDictionary[Version, tuple[Shard, ...]] = WeakKeyDictionary()  # to workers of others

    def now(self) -> float:
        """The time."""
        return time.monotonic()

    def put(self, data: Any) -> Any:
        """Hands bytes to Ray, from which workers fetch them; their reference."""
        return self._ray.put(data)

    def start(self, worker: int) -> None:
        """Starts an actor in the place of the one before."""
        self.stop(worker)
        actor = self._actors[worker] = self._class.remote()
        self._awaited[actor.load.remote(self._duty)] = worker, None

    def stop(self, worker: int) -> None:
        """Ends an actor, if there is one."""
        self._forget(worker)
        if (actor := self._actors.pop(worker, None)) is not None:
            self._ray.kill(actor)

    def submit(self, worker: int, ticket: int, piece: Order) -> None:
        """Asks an actor for a piece."""
        version = piece.version
        parts = self._parts(version) if version.memory is not None and worker not in self._near else version.parts
        reference = self._actors[worker].draw.remote(piece.request, version.number, parts)
        self._awaited[reference] = worker, ticket

    def wait(self, seconds: float) -> list[Answer]:
        """Answers that are there, as soon as there are any, or none when the time is over."""
        awaited = list(self._awaited)
        if not awaited:
            time.sleep(min(seconds, _IDLE))
            return []
        found, _ = self._ray.wait(awaited, num_returns=1, timeout=seconds)
        if found and len(awaited) > 1:
            found, _ = self._ray.wait(awaited, num_returns=len(awaited), timeout=0)
        return [answer for reference in found if (answer := self._answer(reference)) is not None]

    def close(self) -> None:
        """Ends all actors."""
        self._awaited.clear()
        for worker in list(self._actors):
            self.stop(worker)

    def _answer(self, reference: Any) -> Answer | None:
        if reference not in self._awaited:  # of an actor that is gone
            return None
        worker, ticket = self._awaited.pop(reference)
        errors = self._ray.exceptions
        try:
            result = self._ray.get(reference)
        except errors.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            return PieceFailed(worker, ticket, cause)
        except errors.RayError as error:  # the actor, its node, or what it had sent
            self._forget(worker)
            name = type(error).__name__
            return WorkerGone(worker, _GONE.get(name, name))
        if ticket is not None:
            return PieceDone(worker, ticket, result)
        place, near = result
        (self._near.add if near else self._near.discard)(worker)
        return WorkerReady(worker, place)

    def _parts(self, version: Version) -> Sequence[Shard]:
        """A version as workers of other machines get it, also what other learners of this machine hold of it."""
        if version not in self._sent:
            self._sent[version] = tuple(part.by_ray(self.put) for part in version.parts)
        return self._sent[version]

    def _forget(self, worker: int) -> None:
        """Drops what a worker still owes."""
        for reference in [one for one, (owner, _) in list(self._awaited.items()) if owner == worker]:
            self._awaited.pop(reference, None)


def _bytes_of(tensor: Tensor) -> tuple[np.ndarray[Any, Any], torch.dtype, tuple[int, ...]]:
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return flat.numpy(), tensor.dtype, tuple(tensor.shape)


def _tensor_of(sent: tuple[np.ndarray[Any, Any], torch.dtype, tuple[int, ...]]) -> Tensor:
    data, dtype, shape = sent
    return torch.tensor(data).view(dtype).view(shape)  # a copy: the memory that was shared is read-only
