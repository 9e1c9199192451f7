"""Pieces are given out, asked for again and kept in order; no process and no network takes part."""

from __future__ import annotations

from typing import Any

import pytest
from simulated_workers import Course, course_of

from flowrl.workers.dispatch import Answer, Dispatcher, PieceDone, PieceFailed, WorkerGone, WorkerReady, WorkersLost


class Scripted:
    """A backend that writes down what it is asked; the test answers and moves the clock."""

    def __init__(self) -> None:
        self.clock, self.started, self.given = 0.0, list[int](), list[tuple[int, int, Any]]()
        self.stopped = list[int]()

    def now(self) -> float:
        return self.clock

    def start(self, worker: int) -> None:
        self.started.append(worker)

    def stop(self, worker: int) -> None:
        self.stopped.append(worker)

    def submit(self, worker: int, ticket: int, piece: Any) -> None:
        self.given.append((worker, ticket, piece))

    def new(self) -> list[tuple[int, int, Any]]:
        given, self.given = self.given, []
        return given


def dispatcher_of(workers: int, *, here: int | None = None) -> tuple[Dispatcher, Scripted, list[str]]:
    """A dispatcher, its backend and what it tells; `here` of its workers have loaded, all by default."""
    backend, told = Scripted(), list[str]()
    dispatcher = Dispatcher(backend, workers=workers, tell=told.append, patience=100.0)
    dispatcher.handle([WorkerReady(worker) for worker in range(workers if here is None else here)])
    return dispatcher, backend, told


def answered(dispatcher: Dispatcher, backend: Scripted, seconds: float, *answers: Answer) -> list[tuple[int, int, Any]]:
    """What is given out when the answers come so much later."""
    backend.clock += seconds
    dispatcher.handle(answers)
    return backend.new()


@pytest.mark.parametrize("workers", [1, 7, 60])
def test_every_piece_comes_once_and_in_order_whoever_dies(workers: int) -> None:
    found = course_of(workers, 3, 5, Course(deaths=0.05, slow=0.02))  # asserts each piece
    assert found["deaths"] > 0
    assert found["restarts"] >= found["deaths"] - workers  # those at the end may still be away
    # One message there and one back for each piece and copy, and those of the dead.
    assert found["messages"] <= 2 * found["pieces"] + found["copies_of_slow_pieces"] + found["deaths"] * 4


def test_messages_grow_with_the_pieces_alone() -> None:
    few, many = (course_of(workers, 1, 4, Course(deaths=0, slow=0)) for workers in (10, 200))
    assert few["messages"] == 2 * 40
    assert many["messages"] == 2 * 800


def test_the_least_loaded_worker_comes_first_and_only_many_pieces_wait_at_workers() -> None:
    dispatcher, backend, _ = dispatcher_of(3)
    dispatcher.add("abcdefgh")
    # Three idle ones, then one each ahead while more wait than there are workers.
    assert backend.new() == [(0, 0, "a"), (1, 1, "b"), (2, 2, "c"), (0, 3, "d"), (1, 4, "e")]
    assert answered(dispatcher, backend, 1, PieceDone(2, 2, "C")) == [(2, 5, "f")]
    assert answered(dispatcher, backend, 1, PieceDone(0, 0, "A")) == []  # it holds one, and two wait
    assert answered(dispatcher, backend, 1, PieceDone(0, 3, "D")) == [(0, 6, "g")]
    assert [dispatcher.holds(ticket) for ticket in range(4)] == [True, False, True, True]
    assert dispatcher.take(2) == "C"
    with pytest.raises(KeyError):
        dispatcher.take(2)


def test_pieces_of_a_dead_worker_come_before_all_others() -> None:
    dispatcher, backend, told = dispatcher_of(2)
    dispatcher.add("abcde")
    assert backend.new() == [(0, 0, "a"), (1, 1, "b"), (0, 2, "c")]
    assert answered(dispatcher, backend, 1, WorkerGone(0, "its process ended")) == [(1, 0, "a")]
    assert "worker 0 was lost (its process ended), 2 of its pieces go to others; it starts again in 1 s" in told
    assert answered(dispatcher, backend, 1, PieceDone(1, 1, "B")) == [(1, 2, "c")]
    assert backend.started == [0, 1, 0]
    assert answered(dispatcher, backend, 1, WorkerReady(0, "node-7")) == [(0, 3, "d")]
    assert told[-1] == "worker 0 is there again, on node-7"


def test_a_worker_that_dies_again_waits_twice_as_long() -> None:
    dispatcher, backend, _ = dispatcher_of(2)
    waits = []
    for _ in range(9):
        answered(dispatcher, backend, 0, WorkerGone(0, "x"))
        started, before = len(backend.started), backend.clock
        while len(backend.started) == started:
            answered(dispatcher, backend, 0.5)
        waits.append(backend.clock - before)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_a_slow_piece_is_drawn_by_another_and_the_first_answer_counts() -> None:
    dispatcher, backend, told = dispatcher_of(2)
    dispatcher.add("ab")
    backend.new()
    answered(dispatcher, backend, 2, PieceDone(0, 0, "A"))
    assert answered(dispatcher, backend, 7) == []  # 9 s: below ten no piece is slow
    assert answered(dispatcher, backend, 2) == [(0, 1, "b")]
    assert "takes 11 s for a piece, usual are 2.0 s" in told[-1]
    assert answered(dispatcher, backend, 20) == []  # it is asked for twice, not more often
    answered(dispatcher, backend, 1, PieceDone(0, 1, "B"))
    assert dispatcher.take(1) == "B"
    answered(dispatcher, backend, 1, PieceDone(1, 1, "late"))
    assert not dispatcher.holds(1)
    dispatcher.add("c")
    assert len(backend.new()) == 1  # both are free again


def test_a_worker_that_never_answers_is_taken_for_lost() -> None:
    dispatcher, backend, told = dispatcher_of(1)
    dispatcher.add("ab")
    assert backend.new() == [(0, 0, "a")]
    answered(dispatcher, backend, 99)
    assert dispatcher.workers[0].state == "here"
    answered(dispatcher, backend, 2)
    assert "worker 0 was lost (no answer for 2 minutes), 1 of its pieces go to others; it starts again in 1 s" in told
    answered(dispatcher, backend, 1)
    assert backend.started == [0, 0]
    answered(dispatcher, backend, 0, PieceDone(0, 0, "too late"))  # what the process before had sent
    assert not dispatcher.holds(0)
    assert answered(dispatcher, backend, 1, WorkerReady(0)) == [(0, 0, "a")]


def test_pieces_that_take_long_anyway_are_waited_for() -> None:
    dispatcher, backend, _ = dispatcher_of(1)
    dispatcher.add("ab")
    answered(dispatcher, backend, 50, PieceDone(0, 0, "A"))
    answered(dispatcher, backend, 999)
    assert dispatcher.workers[0].state == "here"
    answered(dispatcher, backend, 2)
    assert dispatcher.workers[0].state == "away"


def test_workers_that_hang_are_started_again_until_nothing_else_happens() -> None:
    found = course_of(4, 3, 20, Course(deaths=0, slow=0, hangs=0.05))  # asserts each piece
    assert found["restarts"] > 0
    with pytest.raises(WorkersLost, match=r"lost 5 times, .*no answer for 30 minutes.*memory or time"):
        course_of(3, 1, 2, Course(deaths=0, slow=0, hangs=1))


def test_without_a_worker_the_run_pauses_and_goes_on() -> None:
    dispatcher, backend, told = dispatcher_of(1)
    dispatcher.add("a")
    answered(dispatcher, backend, 0, WorkerGone(0, "its machine is gone"))
    answered(dispatcher, backend, 0, WorkerGone(0, "again"))
    for _ in range(60):
        answered(dispatcher, backend, 1)
        if backend.started[-1:] == [0] and dispatcher.workers[0].state == "loading":
            break
    assert answered(dispatcher, backend, 1, WorkerReady(0)) == [(0, 0, "a")]
    dispatcher.add("bcd")
    for ticket in range(4):  # as long as somebody answers nobody is impatient
        answered(dispatcher, backend, 60, PieceDone(0, ticket, "x"))
    assert not any("minutes" in line for line in told[2:])


def test_without_a_worker_for_too_long_the_run_ends_in_words() -> None:
    dispatcher, backend, told = dispatcher_of(2)
    dispatcher.add("a")
    answered(dispatcher, backend, 0, WorkerGone(0, "x"), WorkerGone(1, "x"))
    backend.clock += 0.9
    for worker in (0, 1):
        dispatcher.workers[worker].starts_again += 500  # the cluster has nothing to give
    dispatcher._again = [(backend.clock + 500, 0), (backend.clock + 500, 1)]
    answered(dispatcher, backend, 50)
    assert any("the run pauses until the cluster gives one again" in line for line in told)
    with pytest.raises(WorkersLost, match=r"no worker was there for 2 minutes: .*workers\.rollouts=0"):
        answered(dispatcher, backend, 60)


def test_a_piece_that_ends_every_worker_ends_the_run() -> None:
    dispatcher, backend, _ = dispatcher_of(1)
    dispatcher.add("a")
    for _ in range(4):
        answered(dispatcher, backend, 0, WorkerGone(0, "it ran out of memory"))
        while dispatcher.workers[0].state == "away":
            answered(dispatcher, backend, 1)
        answered(dispatcher, backend, 0, WorkerReady(0))
    with pytest.raises(WorkersLost, match=r"lost 5 times, so it would end any worker.*out of memory"):
        answered(dispatcher, backend, 0, WorkerGone(0, "it ran out of memory"))


def test_an_error_of_drawing_or_of_the_first_load_is_the_runs() -> None:
    dispatcher, backend, _ = dispatcher_of(2, here=1)
    dispatcher.add("a")
    with pytest.raises(ZeroDivisionError):
        answered(dispatcher, backend, 1, PieceFailed(0, 0, ZeroDivisionError()))
    with pytest.raises(FileNotFoundError):
        answered(dispatcher, backend, 1, PieceFailed(1, None, FileNotFoundError("no such model")))


def test_a_piece_that_another_has_drawn_may_fail() -> None:
    dispatcher, backend, _ = dispatcher_of(2)
    dispatcher.add("ab")
    answered(dispatcher, backend, 2, PieceDone(0, 0, "A"))
    answered(dispatcher, backend, 11)  # the other one draws it too
    answered(dispatcher, backend, 1, PieceDone(0, 1, "B"))
    answered(dispatcher, backend, 1, PieceFailed(1, 1, OSError("its weights are gone")))
    assert dispatcher.take(1) == "B"
    dispatcher.add("cd")
    assert [worker for worker, _, _ in backend.new()][-2:] == [0, 1]


def test_a_worker_that_cannot_load_where_it_starts_again_is_only_away() -> None:
    dispatcher, backend, told = dispatcher_of(2)
    answered(dispatcher, backend, 0, WorkerGone(0, "its machine is gone"))
    answered(dispatcher, backend, 1)
    answered(dispatcher, backend, 1, PieceFailed(0, None, FileNotFoundError("no such model")))
    assert "worker 0 was lost (it could not load: no such model); it starts again in 2 s" in told
    assert dispatcher.alive == 1


@pytest.mark.parametrize("numbers", [{0: 12, 1: 3}, {1: 1, 2: 9}, {0: 2, 1: 5, 2: 1}])
def test_every_piece_comes_once_and_in_order_however_many_workers_there_are(numbers: dict[int, int]) -> None:
    for course in (Course(deaths=0, slow=0), Course(deaths=0.05, slow=0.02)):
        found = course_of(6, 4, 10, course, {0: 6, **numbers})  # asserts each piece
        assert found["alive"] == (list(numbers.values())[-1] if not course.deaths else found["alive"])
        assert found["alive"] <= max(6, *numbers.values())


def test_a_worker_that_comes_gets_pieces_and_one_that_goes_answers_first() -> None:
    dispatcher, backend, told = dispatcher_of(2)
    dispatcher.add("abcdefgh")
    assert backend.new() == [(0, 0, "a"), (1, 1, "b"), (0, 2, "c"), (1, 3, "d")]
    dispatcher.resize(3)
    assert backend.started == [0, 1, 2]
    assert answered(dispatcher, backend, 1, WorkerReady(2)) == [(2, 4, "e")]
    dispatcher.resize(1)
    assert backend.stopped == []
    assert answered(dispatcher, backend, 1, PieceDone(2, 4, "E")) == []
    assert backend.stopped == [2]
    assert answered(dispatcher, backend, 1, PieceDone(1, 1, "B")) == []
    assert backend.stopped == [2]  # it holds another
    assert answered(dispatcher, backend, 1, WorkerGone(1, "its machine is gone")) == []
    assert told[-1] == "worker 1 was lost (its machine is gone), 1 of its pieces go to others; it was to end"
    assert (backend.stopped, dispatcher.alive) == ([2, 1], 1)
    assert answered(dispatcher, backend, 99, PieceDone(0, 0, "A")) == [(0, 3, "d")]
    assert backend.started == [0, 1, 2]  # nobody starts it again
    dispatcher.resize(2)
    assert backend.started == [0, 1, 2, 1]


def test_an_added_worker_that_cannot_load_is_only_away() -> None:
    dispatcher, backend, told = dispatcher_of(1)
    dispatcher.add("ab")
    answered(dispatcher, backend, 1, PieceDone(0, 0, "A"))
    dispatcher.resize(2)
    answered(dispatcher, backend, 1, PieceFailed(1, None, FileNotFoundError("no such model")))
    assert "worker 1 was lost (it could not load: no such model); it starts again in 1 s" in told
