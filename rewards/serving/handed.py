"""Connections that another process accepted: how one of several servers behind one port gets and counts them.

The process that listens (`flowrl.serving.replicas`) sends an open socket with each byte on a Unix socket. Back
go lines of JSON: what is served, once it is, and null for each connection that has ended, so that it knows how many are
open.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import uvicorn


class Handed:
    """The end of a server; `ready` is what it says once it takes connections."""

    def __init__(self, channel: socket.socket, ready: Any) -> None:
        self.channel, self.ready = channel, ready
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, server: uvicorn.Server, gone: Callable[[], None]) -> None:
        """Takes connections from now on, in the running loop; `gone` is called when nobody listens any more."""
        loop = asyncio.get_running_loop()

        def protocol() -> Any:
            kind: Any = server.config.http_protocol_class
            return kind(config=server.config, server_state=server.server_state, app_state=server.lifespan.state)

        def take() -> None:
            try:
                message, sockets, _, _ = socket.recv_fds(self.channel, 1, 1)
            except OSError:
                message, sockets = b"", []
            for number in sockets:
                task = loop.create_task(loop.connect_accepted_socket(protocol, socket.socket(fileno=number)))
                self._tasks.add(task)
                task.add_done_callback(self._taken)
            if not message:
                loop.remove_reader(self.channel)
                gone()

        loop.add_reader(self.channel, take)
        self._say(self.ready)

    def closed(self) -> None:
        """Says that a connection has ended."""
        self._say(None)

    def _taken(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.closed()

    def _say(self, what: Any) -> None:
        with suppress(OSError):  # nobody is there to be told
            self.channel.sendall(json.dumps(what).encode() + b"\n")
