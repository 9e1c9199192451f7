"""The processes of a run meet before anything loads: each says what it was given, and gets the same verdict.

Process 0 takes the answers and gives the verdict; the others wait for it. They use the launcher's key-value store at
MASTER_ADDR:MASTER_PORT, so process 0 can name a process that never comes by its number:

| key | who writes it | what it is |
|---|---|---|
| `said/RANK` | each | what it was given, or why it cannot take part |
| `verdict` | process 0 | empty, or why nobody goes on |
| `heard/RANK` | each but process 0 | that it has read the verdict, before process 0 may take the store away |
| `ended/RANK` | one that an error stops later | its last words, for the others |
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

from flowrl.runtime.failures import explain
from flowrl.runtime.scrubbing import printable, without_secrets
from flowrl.runtime.scrubbing import say as print
from flowrl.training.processes.launched import Launched, launched

WAIT = "FLOWRL_PROCESS_WAIT"
"""Environment variable: seconds that the processes of a run wait for each other before they end."""
_SECONDS = 300.0  # without it
_QUIET, _EVERY = 15.0, 60.0  # seconds until the first line about waiting, and between later ones
_FAREWELL = 20.0  # seconds that one which cannot take part tries to say so, and that process 0 lets itself be heard
_LOOK = 0.1  # seconds between two looks
_ANSWERS = 20.0  # seconds that a store has to answer once it accepts connections

Said = Mapping[str, Any]
Judge = Callable[[Sequence[Said]], str]
"""What all have said, in the order of their ranks -> why they cannot go on together; empty where they can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """One meeting of the processes of a run, which all of them call in the same order."""

    store: Any
    """A `torch.distributed.Store` that all of them reach."""
    who: Launched
    limit: float
    """Seconds to wait for the others."""
    hosts: bool
    """Whether the store ends with this process."""
    tell: Callable[[str], None]
    """Gets a line that names whom this process waits for."""

    def agree(self, said: Said, judge: Judge) -> None:
        """Says what this process was given; returns when all of them have come and the judge has nothing against it.
        Raises ValueError, on every process: what differs, who could not take part and why, or who never came."""
        try:
            self.store.set(f"said/{self.who.rank}", json.dumps(dict(said)))
            verdict = self._reach_verdict(judge) if self.who.rank == 0 else self._hear_verdict()
        except (RuntimeError, OSError) as error:  # torch's DistError is the former
            raise ValueError(
                f"process 0, which holds the meeting at {_place(self.who)}, ended before all had met: read its "
                "own output, or see whether it was killed from outside"
            ) from error
        if verdict:
            raise ValueError(verdict)

    def leave(self, reason: str) -> None:
        """Tells the others that this process cannot take part; they then end with its reason."""
        self.store.set(f"said/{self.who.rank}", json.dumps({"failed": reason}))
        if self.who.rank == 0:
            self._give(_failed(0, reason))

    def _reach_verdict(self, judge: Judge) -> str:
        """The verdict of process 0, once it has all it needs."""
        said: dict[int, Said] = {}
        waiting = _Waiting(self)
        while len(said) < self.who.world:
            for rank in set(range(self.who.world)) - said.keys():
                if self.store.check([f"said/{rank}"]):
                    said[rank] = json.loads(self.store.get(f"said/{rank}"))
                    if "failed" in said[rank]:
                        return self._give(_failed(rank, said[rank]["failed"]), gone=[rank])
            missing = sorted(set(range(self.who.world)) - said.keys())
            if missing and waiting.over(missing):
                return self._give(_absent(missing, self), gone=missing)
        return self._give(judge([said[rank] for rank in range(self.who.world)]))

    def _give(self, verdict: str, gone: Sequence[int] = ()) -> str:
        """Writes the verdict; after a bad one it waits until the remaining processes have read it."""
        verdict = printable(without_secrets(verdict))  # names of files need not be text, but a store takes only text
        self.store.set("verdict", verdict or "-")
        end = time.monotonic() + _FAREWELL
        left = set(range(1, self.who.world)) - set(gone) if verdict and self.hosts else set[int]()
        while left and time.monotonic() < end:
            time.sleep(_LOOK)
            left = {rank for rank in left if not self.store.check([f"heard/{rank}"])}
        return verdict

    def _hear_verdict(self) -> str:
        """The verdict, as any other process gets it."""
        waiting = _Waiting(replace(self, limit=self.limit + _FAREWELL))  # process 0 tells first who is missing
        while not self.store.check(["verdict"]):
            missing = [0] if not self.store.check(["said/0"]) else []
            if waiting.over(missing):
                return _absent(missing or [0], self)
        verdict = self.store.get("verdict").decode()
        self.store.set(f"heard/{self.who.rank}", "yes")
        return "" if verdict == "-" else verdict


class _Waiting:
    """After a look without news: pauses, sometimes prints who is missing, and notices when the wait was too long."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting, self.begun, self.tells = meeting, time.monotonic(), _QUIET

    def over(self, missing: Sequence[int]) -> bool:
        waited = time.monotonic() - self.begun
        if missing and waited >= self.tells:
            self.tells = waited + _EVERY
            self.meeting.tell(
                f"Waiting for {process_words(missing)} of {self.meeting.who.world} for {waited:.0f} s, for "
                f"{self.meeting.limit:.0f} s at most ({WAIT})."
            )
        time.sleep(_LOOK)
        return waited >= self.meeting.limit


# ---- this process ----------------------------------------------------------------------------------------------------

_opened: list[Any] = []  # the store, which ends with the process that hosts it
_met = [0]  # meetings so far: each has keys of its own


def meet(said: Said, judge: Judge, *, patience: float = 0.0) -> None:
    """`Meeting.agree` with the processes that were launched beside this one; nothing for a process on its own.

    It waits for the others for at least `patience` seconds.

    Raises ValueError: as `Meeting.agree`; process 0 is not reached; the launcher's variables make no sense.
    """
    if (who := launched()) is None:
        return
    text = os.environ.get(WAIT, "").strip()
    try:
        seconds = float(text) if text else _SECONDS
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e7:
        raise ValueError(f"{WAIT}={text!r} is not a number of seconds: give one above 0, or none for {_SECONDS:g}")
    _meeting(who, max(seconds, patience)).agree(said, judge)


@contextmanager
def telling_others() -> Iterator[None]:
    """Tells an error inside to the processes launched beside this one, if they can be reached. Before the meeting they
    end with it; later they read it when they notice that this process is gone."""
    met = _met[0]
    try:
        yield
    except Exception as error:
        with suppress(ValueError, RuntimeError, OSError):  # else they learn it from their launcher, or wait in vain
            if (who := launched()) is not None:
                if _met[0] == met:
                    _meeting(who, _FAREWELL, tell=lambda line: None).leave(explain(error))
                else:
                    _keys(_opened[0], _met[0]).set(f"ended/{who.rank}", explain(error))
        raise


def words_left(seconds: float = 2.0) -> dict[int, str]:
    """The last words of other processes that an error ended, by rank; waits a moment for the first."""
    found: dict[int, str] = {}
    if not _opened or (who := launched()) is None:
        return found
    store, end = _keys(_opened[0], _met[0]), time.monotonic() + seconds
    with suppress(RuntimeError, OSError):
        while not found and time.monotonic() < end:
            others = (rank for rank in range(who.world) if rank != who.rank)
            found = {rank: store.get(f"ended/{rank}").decode() for rank in others if store.check([f"ended/{rank}"])}
            time.sleep(0 if found else _LOOK)
    return found


def _meeting(who: Launched, limit: float, tell: Callable[[str], None] | None = None) -> Meeting:
    tell = tell or partial(print, file=sys.stderr, flush=True)
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun hosts it, and outlives its processes
    hosts = who.rank == 0 and not agent
    if not _opened:
        _opened.append(_store(who, limit, tell, hosts=hosts))
    _met[0] += 1
    return Meeting(store=_keys(_opened[0], _met[0]), who=who, limit=limit, hosts=hosts, tell=tell)


def _keys(store: Any, number: int) -> Any:
    """The keys of one meeting; torchrun's store outlives processes that it starts again."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"flowrl/{attempt}/{number}", store)


def _store(who: Launched, limit: float, tell: Callable[[str], None], *, hosts: bool) -> Any:
    """The launcher's store; that of process 0 where none hosts one."""
    if not hosts:
        _reach(who, limit, tell)
    made: list[Any] = []

    def make() -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        try:
            made.append(TCPStore(
                who.address, who.port, who.world, hosts, timeout=timedelta(seconds=_ANSWERS), wait_for_workers=False,
                multi_tenant=True,
            ))  # fmt: skip
        except (RuntimeError, OSError, ValueError) as error:
            made.append(error)

    # Torch waits without an end for the answer of another program's server.
    thread = threading.Thread(target=make, name="meeting", daemon=True)
    thread.start()
    thread.join(2 * _ANSWERS)
    if made and not isinstance(made[0], Exception):
        return made[0]
    cause = made[0] if made else None
    if hosts:
        first = str(cause).strip().partition("\n")[0]
        taken = "EADDRINUSE" in first or "address already in use" in first
        why = "another program, or a second process with RANK=0, listens at this port" if taken else first
        raise ValueError(
            f"process 0 cannot listen at {_place(who)}: {why}. Choose another MASTER_PORT (PORT= with the scripts of "
            "launch/, --master-port with torchrun), the same for all processes"
        ) from cause
    raise ValueError(
        f"the program at {_place(who)} is not a process of this run: another program listens there. Choose another "
        "MASTER_PORT, the same for all processes"
    ) from cause


def _reach(who: Launched, limit: float, tell: Callable[[str], None]) -> None:
    """Waits until something listens at the address of process 0; refuses after the limit."""
    begun, tells = time.monotonic(), _QUIET
    while True:
        try:
            socket.create_connection((who.address, who.port), timeout=5).close()
            return
        except (OSError, UnicodeError) as error:
            waited, why = time.monotonic() - begun, error
        if waited >= limit:
            raise ValueError(
                f"process 0 cannot be reached at {_place(who)} ({why}) after {waited:.0f} s ({WAIT}): see whether it "
                "was started and what its own output says, whether MASTER_ADDR is a name or number of its machine, "
                "and whether a firewall is between"
            ) from why
        if waited >= tells:
            tells = waited + _EVERY
            tell(
                f"Waiting for process 0 of {who.world} at {_place(who)} for {waited:.0f} s, for {limit:.0f} s at most."
            )
        time.sleep(min(1.0, limit / 10))


def _place(who: Launched) -> str:
    return f"MASTER_ADDR:MASTER_PORT = {who.address}:{who.port}"


def process_words(ranks: Sequence[int], most: int = 8) -> str:
    """Processes by their numbers, of which `most` are named."""
    shown = ", ".join(map(str, ranks[:most])) + (f" and {len(ranks) - most} more" if len(ranks) > most else "")
    return f"process{'es' if len(ranks) > 1 else ''} {shown}"


def _absent(missing: Sequence[int], meeting: Meeting) -> str:
    return (
        f"{process_words(missing)} of {meeting.who.world} did not arrive within {meeting.limit:.0f} s, so none trains: "
        f"see whether it was started and what its own output says; if machines need longer, set {WAIT} to more seconds"
    )


def _failed(rank: int, reason: str) -> str:
    return f"process {rank} cannot take part, so none trains. It says: {reason}"
