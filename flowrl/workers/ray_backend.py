"""Workers as actors of Ray, for the dispatcher.

With `workers.shard` a worker is several actors that Ray starts together on one machine. Each draws a piece of its own,
and all make the same network calls. They end together: where one is gone, the others would wait for it in a gathering.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
_GRACE = 30.0
"""Seconds for which an error of one process waits for news of the others: perhaps one of them has died."""


@dataclass(frozen=True, slots=True)
class Order:
    """Pieces as they are given to a worker, at most one for each of its processes, and their weights."""

    requests: Sequence[Request | EvalRequest]
    version: Version


def bundled(requests: Sequence[Request | EvalRequest], most: int) -> Iterator[Sequence[Request | EvalRequest]]:
    """Requests in their order, at most so many at once, of which each takes as many network calls."""
    start = 0
    for end in range(1, len(requests) + 1):
        same = end < len(requests) and requests[end].calls == requests[start].calls
        if not same or end - start == most:
            yield requests[start:end]
            start = end


@dataclass(slots=True)
class _Group:
    """The processes of a worker, and what they still owe."""

    actors: Sequence[Any]
    room: Any = None
    """Ray's placement group, where there are several."""
    found: dict[int | None, dict[int, Any]] = field(default_factory=dict)
    """What some of them have answered, by ticket and process."""
    failed: tuple[float, PieceFailed] | None = None
    """The first error, and when it came."""


class RayBackend:
    """A `WorkerBackend` whose workers are actors; Ray is connected."""

    def __init__(self, duty: Duty, *, gpus: float) -> None:
        """`gpus` is the share of one that each process of a worker is given; 0 on a CPU."""
        import ray

        self._ray = ray
        # Tensors travel as plain memory, which processes of one machine share, rather than through pickle.
        ray.util.register_serializer(torch.Tensor, serializer=_bytes_of, deserializer=_tensor_of)
        self._class: Any = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0)(RolloutWorker)
        self._duty, self._gpus, self._shard = ray.put(duty), gpus, duty.config.workers.shard
        self._groups: dict[int, _Group] = {}
        self._awaited: dict[Any, tuple[int, int | None, int]] = {}
        """Reference -> worker, ticket (None is its loading), process of the worker."""
        self._near = set[int]()  # workers of this machine
        self._sent: WeakKeyDictionary[Version, tuple[Shard, ...]] = WeakKeyDictionary()  # to workers of others

    def now(self) -> float:
        """The time."""
        return time.monotonic()

    def put(self, data: Any) -> Any:
        """Hands bytes to Ray, from which workers fetch them; their reference."""
        return self._ray.put(data)

    def start(self, worker: int) -> None:
        """Starts the actors of a worker in the place of those before, as soon as one machine has room for all."""
        self.stop(worker)
        group = self._groups[worker] = self._make()
        several = len(group.actors) > 1
        meeting = (group.actors[0].meet.remote(),) if several else ()
        for rank, actor in enumerate(group.actors):
            given = (rank, *meeting) if several else ()
            self._awaited[actor.load.remote(self._duty, *given)] = worker, None, rank

    def _make(self) -> _Group:
        if self._shard == 1:
            return _Group((self._class.remote(),))
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Place

        each = {"CPU": 1.0} | ({"GPU": self._gpus} if self._gpus else {})
        room = self._ray.util.placement_group([each] * self._shard, strategy="STRICT_PACK")
        places = (Place(room, placement_group_bundle_index=rank) for rank in range(self._shard))
        return _Group([self._class.options(scheduling_strategy=place).remote() for place in places], room)

    def stop(self, worker: int) -> None:
        """Ends the actors of a worker, if there are any."""
        for reference in [one for one, (owner, *_) in list(self._awaited.items()) if owner == worker]:
            self._awaited.pop(reference, None)
        if (group := self._groups.pop(worker, None)) is not None:
            for actor in group.actors:
                self._ray.kill(actor)
            if group.room is not None:
                self._ray.util.remove_placement_group(group.room)

    def submit(self, worker: int, ticket: int, piece: Order) -> None:
        """Asks for an order's pieces, each of another process; one without a piece makes the calls of the first."""
        version, requests = piece.version, piece.requests
        parts = self._parts(version) if version.memory is not None and worker not in self._near else version.parts
        for rank, actor in enumerate(self._groups[worker].actors):
            idle = rank >= len(requests)
            reference = actor.draw.remote(requests[0 if idle else rank], version.number, parts, idle=idle)
            self._awaited[reference] = worker, ticket, rank

    def wait(self, seconds: float) -> list[Answer]:
        """Answers that are there, as soon as there are any, or none when the time is over."""
        awaited = list(self._awaited)
        if not awaited:
            time.sleep(min(seconds, _IDLE))
            return []
        found, _ = self._ray.wait(awaited, num_returns=1, timeout=seconds)
        if found and len(awaited) > 1:
            found, _ = self._ray.wait(awaited, num_returns=len(awaited), timeout=0)
        answers = [answer for reference in found if (answer := self._answer(reference)) is not None]
        for worker, (begun, failed) in [(one, group.failed) for one, group in self._groups.items() if group.failed]:
            owed = any((owner, ticket) == (worker, failed.ticket) for owner, ticket, _ in self._awaited.values())
            if not owed or self.now() - begun > _GRACE:  # of several processes none can go on
                self.stop(worker)
                answers += [failed, WorkerGone(worker, f"one of its processes failed: {failed.error}")]
        return answers

    def close(self) -> None:
        """Ends all actors."""
        self._awaited.clear()
        for worker in list(self._groups):
            self.stop(worker)

    def _answer(self, reference: Any) -> Answer | None:
        if reference not in self._awaited:  # of an actor that is gone
            return None
        worker, ticket, rank = self._awaited.pop(reference)
        errors, group = self._ray.exceptions, self._groups[worker]
        try:
            result = self._ray.get(reference)
        except errors.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            failed = PieceFailed(worker, ticket, cause)
            if len(group.actors) == 1:
                return failed
            group.failed = group.failed or (self.now(), failed)
            return None
        except errors.RayError as error:  # an actor, its node, or what it had sent
            self.stop(worker)
            name = type(error).__name__
            return WorkerGone(worker, _GONE.get(name, name))
        found = group.found.setdefault(ticket, {})
        found[rank] = result
        if len(found) < len(group.actors):
            return None
        results = [result for _, result in sorted(group.found.pop(ticket).items())]
        if ticket is not None:
            return PieceDone(worker, ticket, [result for result in results if result is not None])
        (self._near.add if all(near for _, near in results) else self._near.discard)(worker)
        return WorkerReady(worker, results[0][0])

    def _parts(self, version: Version) -> Sequence[Shard]:
        """A version as workers of other machines get it, also what other learners of this machine hold of it."""
        if version not in self._sent:
            self._sent[version] = tuple(part.by_ray(self.put) for part in version.parts)
        return self._sent[version]


def _bytes_of(tensor: Tensor) -> tuple[np.ndarray[Any, Any], torch.dtype, tuple[int, ...]]:
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return flat.numpy(), tensor.dtype, tuple(tensor.shape)


def _tensor_of(sent: tuple[np.ndarray[Any, Any], torch.dtype, tuple[int, ...]]) -> Tensor:
    data, dtype, shape = sent
    return torch.tensor(data).view(dtype).view(shape)  # a copy: the memory that was shared is read-only
