"""Who draws which piece: pieces in, results out in their order, whatever workers do meanwhile.

    dispatcher = Dispatcher(backend, workers=8, tell=print)
    tickets = dispatcher.add(pieces)
    while not all(dispatcher.holds(ticket) for ticket in tickets):
        dispatcher.handle(answers_of_workers)      # and gives them what comes next
    results = [dispatcher.take(ticket) for ticket in tickets]

It knows pieces by number alone and reaches workers through a `WorkerBackend`, so that it can be run without any. Of n
workers and m messages it takes time of order m log m; all n are looked at once every `_LOOK_EVERY` seconds. A free
worker gets the waiting piece that comes first, and a second one ahead while many wait. docs/workers.md says what
happens where workers die, are slow, come or go.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

_LOOK_EVERY = 1.0  # seconds between looks for slow workers
_SLOW = 5.0  # times the usual time of a piece
_SLOW_SECONDS = 10.0  # below which no piece is slow
_LONGEST_PAUSE = 60.0  # before a worker is started again
_HANGS = 20.0  # times the usual time of a piece, below which no worker hangs
_MOST_LOSSES = 5  # of one piece
_USUAL_OVER = 32  # pieces that the usual time is taken over


class WorkersLost(ValueError):
    """There is nobody left to draw, or a piece that nobody survives."""


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker has loaded and waits for pieces; `place` says in words where it runs."""

    worker: int
    place: str = ""


@dataclass(frozen=True, slots=True)
class PieceDone:
    """A worker has drawn a piece."""

    worker: int
    ticket: int
    result: Any


@dataclass(frozen=True, slots=True)
class PieceFailed:
    """Drawing a piece, or loading where `ticket` is None, raised an error; the worker is still there."""

    worker: int
    ticket: int | None
    error: BaseException


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """A worker is gone, with all that it was given."""

    worker: int
    reason: str


Answer = WorkerReady | PieceDone | PieceFailed | WorkerGone


class WorkerBackend(Protocol):
    """What workers are reached through."""

    def start(self, worker: int) -> None:
        """Starts a worker, in the place of what is left of an earlier one; an answer without a ticket follows."""

    def stop(self, worker: int) -> None:
        """Ends a worker; no answer of it follows."""

    def submit(self, worker: int, ticket: int, piece: Any) -> None:
        """Gives a worker a piece, after those that it has; an answer follows."""

    def now(self) -> float:
        """The time in seconds, from any start."""


@dataclass(slots=True)
class Worker:
    """What is known of a worker."""

    state: str = "loading"
    """"loading", "here", "away" until it is started again, or "left" where it is not wanted."""
    holds: deque[int] = field(default_factory=deque)
    """Tickets that it was given, in order; it works on the first."""
    since: float = 0.0
    """When it began with that one."""
    drawn: int = 0
    """Pieces so far."""
    seconds: float = 0.0
    """Of its last piece."""
    losses: int = 0
    """Since it last drew something."""
    starts_again: float = 0.0
    """When, where it is away."""
    place: str = ""
    """Where it runs, in words."""


class Dispatcher:
    """Gives pieces to workers; see the module. One thread at a time may call it."""

    def __init__(
        self,
        backend: WorkerBackend,
        *,
        workers: int,
        tell: Callable[[str], None],
        patience: float = 1800.0,
        who: str = "worker",
    ) -> None:
        """Starts the workers.

        Args:
            tell: is told in a line what a user wants to know of.
            patience: seconds that pieces wait for any worker before the run ends, and that a worker has for a piece
                before it is taken for lost (or twenty times the usual, where that is longer).
            who: what a worker is called in such lines.
        """
        self.backend, self.tell, self.patience, self.who = backend, tell, patience, who
        self.workers, self.wanted = list[Worker](), 0  # those that were ever there; the first so many are wanted
        self.alive = 0  # workers that are there
        self.restarts = self.copies = self.messages = 0
        self._next = 0
        self._pieces: dict[int, Any] = {}  # of tickets without a result
        self._results: dict[int, Any] = {}
        self._waiting: list[int] = []  # heap: the first comes first
        self._holders: dict[int, list[int]] = {}
        self._lost: dict[int, list[str]] = {}  # reasons by ticket
        self._free: tuple[dict[int, None], dict[int, None]] = ({}, {})  # workers that hold no piece, or one
        self._again: list[tuple[float, int]] = []  # heap of workers that are away
        self._times: deque[float] = deque(maxlen=_USUAL_OVER)
        self._looked = self._nobody_since = backend.now()
        self._said_nobody = False
        self.resize(workers)

    def resize(self, workers: int) -> None:
        """Wants another number of workers, at least 1; see the module."""
        self.wanted = workers
        self.workers += [Worker(state="left") for _ in range(workers - len(self.workers))]
        for number, worker in enumerate(self.workers):
            if number < workers and worker.state == "left":
                worker.state = "loading"
                self.backend.start(number)
            self._settle(number)

    # ---- pieces --------------------------------------------------------------------------------------------------

    def add(self, pieces: Iterable[Any]) -> list[int]:
        """Takes pieces to be drawn; returns their tickets, which ascend."""
        tickets = []
        if not self._pieces:
            self._nobody_since = self.backend.now()
        for piece in pieces:
            self._pieces[self._next] = piece
            heapq.heappush(self._waiting, self._next)
            tickets.append(self._next)
            self._next += 1
        self._give()
        return tickets

    def holds(self, ticket: int) -> bool:
        """Whether a ticket's result is there."""
        return ticket in self._results

    def take(self, ticket: int) -> Any:
        """A ticket's result, once. Raises KeyError: it is not there, or was taken."""
        return self._results.pop(ticket)

    # ---- answers -------------------------------------------------------------------------------------------------

    def handle(self, answers: Sequence[Answer]) -> None:
        """Takes answers, starts workers again whose time has come, and gives out what waits. Raises WorkersLost: nobody
        has been there for too long, or one piece was lost too often; BaseException: what drawing raised, or loading
        before anything was drawn."""
        now = self.backend.now()
        for answer in answers:
            self.messages += 1
            if isinstance(answer, PieceDone):
                self._done(answer, now)
            elif isinstance(answer, WorkerReady):
                self._ready(answer, now)
            elif isinstance(answer, WorkerGone):
                self._gone(answer.worker, answer.reason, now)
            else:
                self._error(answer, now)
        while self._again and self._again[0][0] <= now:
            _, number = heapq.heappop(self._again)
            if (worker := self.workers[number]).state == "away" and worker.starts_again <= now:
                worker.state = "loading"
                self.restarts += 1
                self.backend.start(number)
        if now - self._looked >= _LOOK_EVERY:
            self._looked = now
            self._look_for_silent(now)
            self._look_for_slow(now)
            self._look_for_anybody(now)
        self._give()

    def _done(self, answer: PieceDone, now: float) -> None:
        worker = self.workers[answer.worker]
        if answer.ticket not in worker.holds:
            return  # an answer of before it was lost
        worker.seconds = now - worker.since
        self._times.append(worker.seconds)
        worker.holds.remove(answer.ticket)
        worker.since, worker.drawn, worker.losses = now, worker.drawn + 1, 0
        self._settle(answer.worker)
        if answer.ticket in self._pieces:  # else another worker was faster
            del self._pieces[answer.ticket]
            self._results[answer.ticket] = answer.result
            self._lost.pop(answer.ticket, None)
        self._let_go(answer.worker, answer.ticket)

    def _error(self, answer: PieceFailed, now: float) -> None:
        if answer.ticket is None and (self.workers[answer.worker].losses or self._times):
            # Others have drawn, so it is this worker that lacks something.
            self._gone(answer.worker, f"it could not load: {answer.error}", now)
        elif answer.ticket is None or answer.ticket in self._pieces:
            raise answer.error
        else:  # another worker was faster, and the weights may be gone by now
            self._done(PieceDone(answer.worker, answer.ticket, None), now)

    def _ready(self, answer: WorkerReady, now: float) -> None:
        worker = self.workers[answer.worker]
        if worker.losses:
            self.tell(f"{self.who} {answer.worker} is there again{f', on {answer.place}' if answer.place else ''}")
        self.alive += worker.state != "here"
        worker.state, worker.place, worker.since = "here", answer.place, now
        self._settle(answer.worker)

    def _gone(self, number: int, reason: str, now: float) -> None:
        worker = self.workers[number]
        if worker.state in ("away", "left"):
            return
        pause = min(_LONGEST_PAUSE, 2.0**worker.losses)
        held = [ticket for ticket in worker.holds if ticket in self._pieces]
        others = f", {len(held)} of its pieces go to others" if held else ""
        after = f"it starts again in {pause:g} s" if number < self.wanted else "it was to end"
        self.tell(f"{self.who} {number} was lost ({reason}){others}; {after}")
        first = worker.holds[0] if worker.holds else None
        for ticket in worker.holds:
            self._let_go(number, ticket)
            if ticket in self._pieces and ticket not in self._holders:
                heapq.heappush(self._waiting, ticket)
        worker.holds.clear()
        self.alive -= worker.state == "here"
        worker.state, worker.losses, worker.starts_again = "away", worker.losses + 1, now + pause
        heapq.heappush(self._again, (worker.starts_again, number))
        self._settle(number)
        if self.alive == 0:
            self._nobody_since = now
        if first in self._pieces and first is not None:  # the one that it was at
            reasons = self._lost.setdefault(first, [])
            reasons.append(f"{self.who} {number}: {reason}")
            if len(reasons) >= _MOST_LOSSES:
                raise WorkersLost(
                    f"one piece of the rollout was lost {len(reasons)} times, so it would end any worker "
                    f"({'; '.join(reasons[-2:])}): lower rollout_batch_size if it was memory or time"
                )

    def _let_go(self, number: int, ticket: int) -> None:
        holders = self._holders.get(ticket, [])
        if number in holders:
            holders.remove(number)
        if not holders:
            self._holders.pop(ticket, None)

    # ---- giving out ----------------------------------------------------------------------------------------------

    def _settle(self, number: int) -> None:
        """Notes how much a worker holds; ends one that is not wanted and holds nothing."""
        worker, wanted = self.workers[number], number < self.wanted
        if not wanted and not worker.holds and worker.state != "left":
            self.alive -= worker.state == "here"
            worker.state = "left"
            self.backend.stop(number)
        for load, free in enumerate(self._free):
            if wanted and worker.state == "here" and len(worker.holds) == load:
                free[number] = None
            else:
                free.pop(number, None)

    def _give(self) -> None:
        while self._waiting:
            ticket = self._waiting[0]
            if ticket not in self._pieces:  # a copy whose first has come
                heapq.heappop(self._waiting)
                continue
            idle, busy = self._free
            # One ahead hides the way to a worker; towards the end it would keep a piece from those that become free.
            free = idle or (busy if len(self._waiting) > self.wanted else {})
            holders = self._holders.get(ticket, ())
            number = next((one for one in free if one not in holders), None)
            if number is None:
                return
            heapq.heappop(self._waiting)
            worker = self.workers[number]
            if not worker.holds:
                worker.since = self.backend.now()
            worker.holds.append(ticket)
            self._holders.setdefault(ticket, []).append(number)
            self._settle(number)
            self.messages += 1
            self.backend.submit(number, ticket, self._pieces[ticket])

    def _usual(self) -> float | None:
        """The usual seconds of a piece; None before there is any."""
        return sorted(self._times)[len(self._times) // 2] if self._times else None

    def _look_for_silent(self, now: float) -> None:
        """Takes workers for lost that are there and do not answer: they would keep their pieces for ever."""
        limit = max(self.patience, _HANGS * (self._usual() or 0.0))
        for number, worker in enumerate(self.workers):
            if worker.holds and now - worker.since >= limit:
                self._gone(number, f"no answer for {(now - worker.since) / 60:.0f} minutes", now)

    def _look_for_slow(self, now: float) -> None:
        usual = self._usual()
        if usual is None:
            return
        limit = max(_SLOW_SECONDS, _SLOW * usual)
        for number, worker in enumerate(self.workers):
            if not worker.holds or now - worker.since < limit:
                continue
            for ticket in worker.holds:
                if ticket in self._pieces and self._holders[ticket] == [number] and ticket not in self._waiting:
                    self.copies += 1
                    heapq.heappush(self._waiting, ticket)
                    self.tell(
                        f"{self.who} {number} takes {now - worker.since:.0f} s for a piece, usual are {usual:.1f} s: "
                        "another draws it too"
                    )

    def _look_for_anybody(self, now: float) -> None:
        if not self._pieces or self.alive:
            self._nobody_since, self._said_nobody = now, False
            return
        waited = now - self._nobody_since
        away = all(worker.state in ("away", "left") for worker in self.workers)
        if waited >= self.patience:
            raise WorkersLost(
                f"no {self.who} was there for {waited / 60:.0f} minutes: see that the cluster has as many CPUs and "
                "GPUs free as `workers.*` ask for, those of one worker on one machine ('ray status'), then continue "
                "the run; or set `workers.rollouts=0`"
            )
        if away and not self._said_nobody:
            self._said_nobody = True
            self.tell(
                f"no {self.who} is left: the run pauses until the cluster gives one again, for "
                f"{self.patience / 60:.0f} minutes at most; Ctrl-C twice stops it at once"
            )
