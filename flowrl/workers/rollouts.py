"""The rollout workers of a learner process: started before its own models load, asked, watched and ended."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from typing import Any

import torch

from flowrl.config.bounds import PROCESSES
from flowrl.config.train import TrainConfig
from flowrl.pipelines.weights.loading_choices import Split
from flowrl.pipelines.weights.trained_weights import Held
from flowrl.runtime.cluster import RayEnded, refuse_ended
from flowrl.runtime.scrubbing import say as print
from flowrl.training.draws import Drawn, EvalRequest, Request
from flowrl.training.processes.mesh import shards_of
from flowrl.training.run import Run
from flowrl.workers.actor import Duty
from flowrl.workers.dispatch import Dispatcher
from flowrl.workers.layout import join_cluster
from flowrl.workers.parcels import SharedBytes, Version, lay_down, reachable
from flowrl.workers.ray_backend import Order, RayBackend, bundled

_LOOK = 0.05  # seconds between looks of the thread that gives out pieces
_LOOK_AT_FILE = 1.0  # seconds between looks at `ASKED`
_LINES = 8  # of workers on a terminal
ASKED = "rollouts"
"""The file of a run's folder that another number of workers is written into while the run goes on."""


class Rollouts:
    """Workers that draw for this process until `close`. A thread serves them,
    so that they go on while the learner decodes, scores and updates."""

    def __init__(self, config: TrainConfig, run: Run) -> None:
        """Connects to Ray and starts this process's share of the workers, which load meanwhile. Raises ValueError: no
        cluster answers, this machine has too few GPUs, or learners of shared weights do not reach each other."""
        settings, kind = config.workers, run.device.type
        gpus = settings.rollout_gpus if kind == "cuda" else 0.0
        mark = torch.frombuffer(bytearray(os.urandom(16)), dtype=torch.uint8)  # that no other machine has
        probe = Held(values=mark, dtype=mark.dtype, shape=tuple(mark.shape))
        part, self._probe = lay_down({"probe": probe}, [], str)
        split = shards_of(run.layout, run.device) if config.policy.train == "full" else None
        if split is not None and any(split.any_needs([not all(map(reachable, split.gather(part)))])):
            raise ValueError(
                "learners that hold all weights between them (policy.train=full, parallel.shard) lay them down for "
                "workers in memory of one machine, and these do not reach each other's: launch as many processes a "
                f"machine as parallel.shard ({config.parallel.shard}) divides, on Linux, not each in a container of "
                "its own; or set workers.rollouts=0"
            )
        address = join_cluster(config, run)
        threads, folder = torch.get_num_threads(), os.getcwd()
        self._spare = list[SharedBytes]()
        self._by_memory = self._probe is not None  # which only Linux has
        duty = Duty(config=config, learners=run.world, device=kind, threads=threads, folder=folder, probe=part)
        self._say, self._world, self._file = run.main, run.world, run.folder / ASKED
        self._asked, self._looked = self._written(), 0.0  # what the file said before the run is over
        self.backend = RayBackend(duty, gpus=gpus)
        share, self._together = settings.rollouts // run.world, settings.shard
        self.dispatcher = Dispatcher(self.backend, workers=share, tell=self._tell, who="rollout worker")
        self.layout: dict[str, Any] = {"rollouts": settings.rollouts, "staleness": settings.staleness}
        self.layout |= {"shard": settings.shard} if settings.shard > 1 else {}
        self.layout |= {"gpus_each": gpus, "address": address, "own_instance": settings.address is None}
        self._versions = 0
        self._waited = 0.0
        self._told = 0  # restarts that are in the log
        self._lock = threading.Condition()
        self._failed: BaseException | None = None
        self._ended = False
        self._thread = threading.Thread(target=copy_context().run, args=(self._work,), name="rollouts", daemon=True)
        self._thread.start()

    def send(self, weights: Mapping[str, Held], split: Split | None) -> Version:
        """Lays weights down for workers; see `DrawsElsewhere`. Raises ValueError: one of the learners that hold them
        between them has no memory for its part."""
        refuse_ended()
        self._versions += 1
        mine, memory = lay_down(weights, self._spare, self.backend.put)
        if memory is None and self._by_memory:
            self._by_memory = False
            self._tell("weights go to workers through Ray from now on: there is no room in memory that processes share")
        parts = (mine,) if split is None else tuple(split.gather(mine))
        if len(parts) > 1 and any(part.memory < 0 for part in parts):
            raise ValueError(
                "a learner that holds a part of all weights found no memory to lay it down for workers: free some, or "
                "set workers.rollouts=0"
            )
        made = Version(number=self._versions, parts=parts, memory=memory)
        if memory is not None:
            weakref.finalize(made, self._spare.append, memory)
        return made

    def submit(self, requests: Sequence[Request | EvalRequest], version: Version) -> list[int]:
        """Asks for pieces under weights that were sent; returns tickets. Each is for as many as a worker has
        processes, whose network calls are equally many."""
        refuse_ended()
        with self._lock:
            return self.dispatcher.add(Order(some, version) for some in bundled(requests, self._together))

    def collect(self, tickets: Sequence[int]) -> Iterator[Drawn]:
        """The pieces in order, those of a ticket once they are there. Raises what drawing raised, or `WorkersLost`."""
        for ticket in tickets:
            begun = time.perf_counter()
            with self._lock:
                while not self.dispatcher.holds(ticket):
                    if self._failed is not None:
                        raise self._failed
                    self._lock.wait(0.5)  # a signal is answered meanwhile
                found: Sequence[Drawn] = self.dispatcher.take(ticket)
            self._waited += time.perf_counter() - begun
            yield from found

    def row(self) -> dict[str, float]:
        """Workers that are there, restarts and seconds waited for pieces since the last call."""
        with self._lock:
            restarts, self._told = self.dispatcher.restarts - self._told, self.dispatcher.restarts
            alive = self.dispatcher.alive
        waited, self._waited = self._waited, 0.0
        return {"alive": alive, "restarts": restarts, "wait_seconds": round(waited, 4)}

    def lines(self) -> list[str]:
        """What each worker does, in 80 columns; of many those first that are not there."""
        with self._lock:
            now, found = self.backend.now(), list[tuple[bool, int, str]]()
            for number, worker in enumerate(self.dispatcher.workers):
                if worker.state == "left":
                    continue
                what = worker.state if worker.state != "here" else "drawing" if worker.holds else "idle"
                if worker.state == "away":
                    what = f"away for {max(0.0, worker.starts_again - now):.0f} s"
                took = f"{worker.seconds:8.2f} s/piece" if worker.drawn else ""
                line = f"  worker {number:<5} {what:<16} {worker.drawn:>6} pieces {took}  {worker.place[:14]}"
                found.append((worker.state != "here", number, line.rstrip()))
        if len(found) <= _LINES:
            return [line for _, _, line in found]
        shown = sorted(found, key=lambda one: (not one[0], one[1]))[: _LINES - 1]
        return [*(line for _, _, line in shown), f"  and {len(found) - len(shown)} more, {self.dispatcher.alive} there"]

    def close(self) -> None:
        """Ends the workers; the connection to Ray stays."""
        self._ended = True
        self._thread.join(timeout=10)
        with suppress(RayEnded):  # then they have ended with it
            refuse_ended()
            self.backend.close()

    def _tell(self, line: str) -> None:
        if self._say:
            print(line[0].upper() + line[1:] + ".", file=sys.stderr, flush=True)

    def _written(self) -> str:
        with suppress(OSError):  # mostly there is no such file
            return self._file.read_text(encoding="utf-8", errors="replace").strip()
        return ""

    def _resize(self) -> None:
        """Takes up another number of workers from the run's folder."""
        self._looked, asked = self.backend.now(), self._written()
        if asked in ("", self._asked):
            return
        self._asked = asked
        number = int(short) if asked.isdecimal() and 0 < len(short := asked.lstrip("0")) < 7 else 0
        if not 0 < number <= PROCESSES or number % self._world:
            self._tell(
                f"{self._file} says {asked[:20]!r}, and a number of workers is from 1 to {PROCESSES:,}"
                f"{f' and a multiple of {self._world}' if self._world > 1 else ''}: the run keeps those it has"
            )
            return
        self._tell(f"the run goes on with {number} rollout workers, as {self._file} says")
        with self._lock:
            self.dispatcher.resize(number // self._world)

    def _work(self) -> None:
        try:
            while not self._ended:
                refuse_ended()
                if self.backend.now() - self._looked >= _LOOK_AT_FILE:
                    self._resize()
                answers = self.backend.wait(_LOOK)
                with self._lock:
                    self.dispatcher.handle(answers)
                    if answers:
                        self._lock.notify_all()
        except BaseException as error:  # the learner raises it
            if not self._ended:
                with self._lock:
                    self._failed = error
                    self._lock.notify_all()
