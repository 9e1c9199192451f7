"""Serves a page about runs to browsers on this machine until Ctrl-C; see docs/watching.md."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.pages.live.followed_runs import Followed, Watched
from flowrl.pages.live.run_view import list_row
from flowrl.pages.live.watch_app import make_app
from flowrl.rendering.markup import plural
from flowrl.rewards.serving.own_page import elsewhere, page_server
from flowrl.runtime.scrubbing import say as print

if TYPE_CHECKING:
    import uvicorn

AHEAD = 10.0
"""Seconds of reading before the address is printed."""


def watch(runs: Sequence[str | Path] = ("runs",), *, port: int) -> None:
    """Serves the page until a signal.

    Args:
        runs: run folders, or folders that contain runs.
        port: 0 is a free one.

    Raises ValueError: a folder is not there, the port is taken, or a package is not installed.
    """
    folders = [Path(path).expanduser() for path in runs]
    for path in folders:
        if not path.is_dir():
            raise ValueError(
                f"{path} is not a folder: give run folders, or a folder in which runs lie, such as the runs/ that "
                "flowrl train makes"
            )
    watched = Watched(given=[path.absolute() for path in folders])
    server, address, bound = make_server(watched, port)
    with bound:
        found = watched.look()
        read_ahead(found)
        print(f"Watching {plural(len(found), 'run')}; Ctrl-C stops. The page:\n{address}")
        print(elsewhere(address), flush=True)
        with suppress(KeyboardInterrupt):  # uvicorn has stopped, and hands the signal on
            server.run(sockets=[bound])
    print("Stopped.", flush=True)


def read_ahead(runs: Sequence[Followed]) -> None:
    """Reads runs in advance for up to `AHEAD` seconds; the page reads the others."""
    begun = time.monotonic()
    for followed in runs:
        if time.monotonic() - begun > AHEAD:
            return
        with suppress(ValueError, OSError):  # the page says so in the run's row
            followed.refresh()
            list_row(followed)


def make_server(watched: Watched, port: int) -> tuple[uvicorn.Server, str, socket.socket]:
    """The server, the address of the page with a new token, and the listening socket. Raises ValueError: as `watch`."""
    return page_server(partial(make_app, watched), port, "flowrl watch")
