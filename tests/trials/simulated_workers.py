"""What it costs to give out pieces to 10, 100 and 1,000 workers that exist on paper, some of which die or are slow.

    python tests/trials/simulated_workers.py --out docs/research/trials/simulated_workers.json

The dispatcher is the one of real runs; its backend keeps a clock of its own and answers without drawing. Times of
pieces, deaths and slow pieces follow from counters. An iteration has a number of pieces for each worker. What is
measured is the CPU time of the dispatcher alone.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from origin import origin

from flowrl.runtime.randomness import counter_integers
from flowrl.workers.dispatch import Answer, Dispatcher, PieceDone, WorkerGone, WorkerReady

_PARTS = 10_000  # a share is drawn as an integer below it
_LONGEST = 100_000.0  # seconds on the workers' clock that an iteration may take


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """How workers do.

    Attributes:
        seconds: of a piece, from 0.8 to 1.4 times as many.
        deaths: share of pieces that end their worker midway.
        slow: share of pieces that take twenty times as long.
        hangs: share of pieces that their worker never answers, nor any after them.
        loading: seconds until a worker that was started is there.
        seed: of the counters.
    """

    seconds: float = 10.0
    deaths: float = 0.01
    slow: float = 0.005
    hangs: float = 0.0
    loading: float = 30.0
    seed: int = 0


@dataclass
class SimulatedBackend:
    """Workers that answer when their time has come; a piece becomes the number that it is."""

    course: Course
    clock: float = 0.0
    events: list[tuple[float, int, int, Answer]] = field(default_factory=list)  # time, order, incarnation, answer
    incarnation: dict[int, int] = field(default_factory=dict)
    free_at: dict[int, float] = field(default_factory=dict)
    submitted: int = 0
    deaths: int = 0

    def now(self) -> float:
        return self.clock

    def start(self, worker: int) -> None:
        self.incarnation[worker] = self.incarnation.get(worker, 0) + 1
        self.free_at[worker] = self.clock + self.course.loading
        self._at(self.free_at[worker], worker, WorkerReady(worker))

    def stop(self, worker: int) -> None:
        self.incarnation[worker] += 1  # what it would still answer is not heard

    def submit(self, worker: int, ticket: int, piece: Any) -> None:
        course, number = self.course, self.submitted
        self.submitted += 1
        took = course.seconds * (0.8 + 0.6 * self._share("time", number))
        if self._share("slow", number) < course.slow:
            took *= 20
        begun = max(self.clock, self.free_at[worker])
        if begun == math.inf or self._share("hangs", number) < course.hangs:
            self.free_at[worker] = math.inf
            return
        if self._share("death", number) < course.deaths:
            self._at(begun + took / 2, worker, WorkerGone(worker, "it died"))
        self.free_at[worker] = begun + took
        self._at(begun + took, worker, PieceDone(worker, ticket, piece))

    def wait(self, seconds: float) -> list[Answer]:
        """The next answer, or none where it comes later than that; the clock moves there."""
        if not self.events or self.events[0][0] > self.clock + seconds:
            self.clock += seconds
            return []
        self.clock, _, incarnation, answer = heapq.heappop(self.events)
        if incarnation != self.incarnation[answer.worker]:
            return []  # of a worker that died before
        if isinstance(answer, WorkerGone):
            self.deaths += 1
            self.incarnation[answer.worker] += 1
        return [answer]

    def _at(self, moment: float, worker: int, answer: Answer) -> None:
        heapq.heappush(
            self.events, (moment, len(self.events) + self.submitted * 1000, self.incarnation[worker], answer)
        )

    def _share(self, *parts: int | str) -> float:
        return counter_integers(0, _PARTS, self.course.seed, *parts) / _PARTS


@dataclass(frozen=True, slots=True)
class Cost:
    """What an iteration took: messages to and from workers, CPU time of the dispatcher, time on the workers' clock,
    and that of workers which never rest, die or wait."""

    messages: float
    cpu_milliseconds: float
    seconds: float
    busy_seconds: float


def course_of(
    workers: int, iterations: int, pieces_each: int, course: Course, resizes: Mapping[int, int] | None = None
) -> dict[str, Any]:
    """Runs iterations; checks that every piece comes once and in order. `resizes` are other numbers of workers from the
    fifth message of an iteration on."""
    backend, told = SimulatedBackend(course), list[str]()
    dispatcher = Dispatcher(backend, workers=workers, tell=told.append)
    cpu, costs = 0.0, list[Cost]()
    while dispatcher.alive < workers:
        dispatcher.handle(backend.wait(1.0))
    for iteration in range(iterations):
        begun, messages, cpu = backend.clock, dispatcher.messages, 0.0
        pieces = [(iteration, number) for number in range(workers * pieces_each)]
        mark = time.thread_time()
        tickets = dispatcher.add(pieces)
        cpu += time.thread_time() - mark
        missing = 0  # the first ticket without a result
        while missing < len(tickets):
            answers = backend.wait(0.5)
            if resizes and dispatcher.messages >= messages + 5:
                dispatcher.resize(resizes.get(iteration, dispatcher.wanted))
            assert backend.clock < begun + _LONGEST, "nobody answers, and nobody says so"
            mark = time.thread_time()
            dispatcher.handle(answers)
            while missing < len(tickets) and dispatcher.holds(tickets[missing]):
                assert dispatcher.take(tickets[missing]) == pieces[missing]
                missing += 1
            cpu += time.thread_time() - mark
        costs.append(Cost(dispatcher.messages - messages, 1000 * cpu, backend.clock - begun,
                          1.1 * course.seconds * pieces_each))  # fmt: skip
    mean = {name: sum(getattr(cost, name) for cost in costs) / iterations for name in Cost.__slots__}
    return {
        "workers": workers, "pieces": workers * pieces_each, **{name: round(value, 3) for name, value in mean.items()},
        "cpu_microseconds_per_message": round(1000 * mean["cpu_milliseconds"] / mean["messages"], 2),
        "deaths": backend.deaths, "restarts": dispatcher.restarts, "copies_of_slow_pieces": dispatcher.copies,
        "alive": dispatcher.alive,
    }  # fmt: skip


def main() -> None:
    """Writes what courses of 10, 100 and 1,000 workers cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--pieces", type=int, default=8, help="of an iteration, for each worker")
    asked = parser.parse_args()
    found = [course_of(workers, asked.iterations, asked.pieces, Course()) for workers in (10, 100, 1000)]
    growth = found[-1]["cpu_milliseconds"] / found[0]["cpu_milliseconds"]
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(
        json.dumps({"origin": origin(), "iterations": asked.iterations, "courses": found,
                    "cpu_of_1000_workers_over_10": round(growth, 1)}, indent=1) + "\n", encoding="utf-8",
    )  # fmt: skip


if __name__ == "__main__":
    main()
