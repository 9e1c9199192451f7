"""Several processes behind one port, each with a copy of the rewards: `flowrl serve --replicas N`.

This process listens and loads nothing. It hands each connection, as an open socket, to the replica with the fewest,
which answers it until it ends. A replica that dies is restarted; until it is ready, the others get new connections. A
client loses the requests at the dead replica and sends them again.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.context import SpawnProcess
from typing import Any

import torch

from flowrl.rewards.serving import server
from flowrl.rewards.serving.handed import Handed
from flowrl.rewards.serving.server_metrics import DIRECTORY
from flowrl.runtime.failures import explain
from flowrl.runtime.scrubbing import say as print
from flowrl.runtime.temporary import TemporaryFolder
from flowrl.serving.served import Rows, ServerSettings, count_death, load_app, threads_of


@dataclass(kw_only=True, slots=True, eq=False)
class _Replica:
    """One process; `connections` are its open ones, `deaths` counts those in a row."""

    number: int
    process: SpawnProcess | None = None
    channel: socket.socket | None = None
    started: float = 0.0
    rows: Rows | None = None
    connections: int = 0
    deaths: int = 0
    again: float | None = None
    heard: bytearray = field(default_factory=bytearray)


class Replicas:
    """The processes and the port; a context manager that ends all processes, whatever happens. `bound` is the port's
    socket, which listens by the time `serve` is called; clients send `token`."""

    def __init__(
        self,
        bound: socket.socket,
        asked: ServerSettings,
        specs: Sequence[Mapping[str, Any]],
        devices: Sequence[torch.device],
        token: str | None,
    ) -> None:
        self.bound, self.asked, self.specs, self.token = bound, asked, specs, token
        self.devices = [str(device) for device in devices]
        self.folder = TemporaryFolder("flowrl-serve-")
        self.replicas = [_Replica(number=number) for number in range(len(devices))]
        self.selector = selectors.DefaultSelector()
        self.signals = 0
        self.serving = False

    def __enter__(self) -> Replicas:
        self._handlers = {one: signal.signal(one, self._on_signal) for one in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for one, handler in self._handlers.items():
            signal.signal(one, handler)
        for replica in self.replicas:
            if replica.process is not None:
                replica.process.kill()
                replica.process.join()
        self.selector.close()
        self.folder.cleanup()

    def start(self) -> Rows:
        """Starts all replicas, waits until all have loaded, and returns what they serve. Raises ValueError: one could
        not load. Raises KeyboardInterrupt: a signal came."""
        for replica in self.replicas:
            self._start(replica)
        while not all(replica.rows for replica in self.replicas):
            self._attend()
            if self.signals:
                raise KeyboardInterrupt
            if any(replica.process is None for replica in self.replicas):
                raise ValueError("a replica could not load the rewards; its output is above.")
        rows = self.replicas[0].rows
        assert rows is not None
        return rows

    def serve(self) -> None:
        """Hands out connections until a signal, then finishes the accepted ones."""
        self.serving = True
        self.bound.setblocking(False)
        self.selector.register(self.bound, selectors.EVENT_READ)
        while not self.signals:
            self._attend()
        self.selector.unregister(self.bound)
        self.bound.close()
        for replica in self.replicas:
            replica.again = None
            if replica.process is not None:
                replica.process.terminate()  # as a Ctrl-C: it refuses what is new and answers what it has
        end = time.monotonic() + self.asked.grace + 10.0
        while any(replica.process is not None for replica in self.replicas):
            self._attend()
            if self.signals > 1 or time.monotonic() > end:
                break

    def _on_signal(self, number: int, frame: Any) -> None:
        self.signals += 1

    def _attend(self) -> None:
        """One round: connections, messages of replicas, deaths, restarts."""
        ready = self.selector.select(timeout=0.1)
        # What has ended first, so that nothing is handed to the dead.
        for key, _ in ready:
            if key.data is not None:
                self._hear(key.data)
        for replica in self.replicas:
            if replica.process is not None and not replica.process.is_alive():
                self._bury(replica)
            if replica.again is not None and time.monotonic() >= replica.again and not self.signals:
                self._start(replica)
        if any(key.data is None for key, _ in ready) and not self.signals:
            self._accept()

    def _accept(self) -> None:
        while open_now := [one for one in self.replicas if one.rows is not None]:
            try:
                connection, _ = self.bound.accept()
            except OSError:  # none waits, or it has gone again
                return
            with connection:
                for replica in sorted(open_now, key=lambda one: (one.connections, one.number)):
                    assert replica.channel is not None
                    with suppress(OSError):
                        socket.send_fds(replica.channel, [b"c"], [connection.fileno()])
                        replica.connections += 1
                        break
        time.sleep(0.05)  # nobody is there: the connection waits in the queue of the port

    def _start(self, replica: _Replica) -> None:
        ours, theirs = socket.socketpair()
        context = multiprocessing.get_context("spawn")  # a fork would share locks and what torch has set up
        process = context.Process(
            target=_serve_one, name=f"replica-{replica.number}",
            args=(theirs, self.asked, self.specs, self.devices[replica.number], self.token, replica.number,
                  self.folder.name),
        )  # fmt: skip
        process.start()
        theirs.close()
        replica.process, replica.channel, replica.started = process, ours, time.monotonic()
        replica.rows, replica.connections, replica.again = None, 0, None
        replica.heard.clear()
        self.selector.register(ours, selectors.EVENT_READ, replica)

    def _hear(self, replica: _Replica) -> None:
        assert replica.channel is not None
        try:
            said = replica.channel.recv(2**16)
        except OSError:
            said = b""
        if not said:  # it is about to end, and `is_alive` will say so
            self.selector.unregister(replica.channel)
            replica.rows = None
            return
        replica.heard += said
        *lines, rest = replica.heard.split(b"\n")
        replica.heard = rest
        for line in map(json.loads, lines):
            if line is None:
                replica.connections -= 1
            else:
                replica.rows = line

    def _bury(self, replica: _Replica) -> None:
        process, channel = replica.process, replica.channel
        assert process is not None
        assert channel is not None
        process.join()
        if channel in self.selector.get_map():
            self.selector.unregister(channel)
        channel.close()
        from prometheus_client.multiprocess import mark_process_dead

        mark_process_dead(process.pid, self.folder.name)  # type: ignore[no-untyped-call]
        replica.deaths, wait = count_death(replica.deaths, time.monotonic() - replica.started)
        replica.process = replica.channel = replica.rows = None
        if self.serving and not self.signals:
            replica.again = time.monotonic() + wait
            print(
                f"Replica {replica.number} ended (code {process.exitcode}); it is started again in {wait:g} s.",
                file=sys.stderr,
                flush=True,
            )


def _serve_one(
    channel: socket.socket, asked: ServerSettings, specs: Sequence[Mapping[str, Any]], device: str,
    token: str | None, number: int, folder: str,
) -> None:  # fmt: skip
    """Runs a replica from start to end; its end of the channel closes with the process."""
    os.setsid()  # a Ctrl-C in the terminal goes to the process that listens, which says when to stop
    os.environ[DIRECTORY] = folder  # before prometheus_client is imported
    try:
        torch.set_num_threads(threads_of(asked))
        app, rows = load_app(asked, specs, torch.device(device), token, number)
        handed = Handed(channel, rows)
        server.make_server(app, grace=asked.grace, handed=handed).run(sockets=[])
    except ValueError as error:
        print(f"flowrl: replica {number}: {explain(error)}", file=sys.stderr, flush=True)
        sys.exit(1)
