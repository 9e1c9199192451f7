"""A page over runs for the browser of this machine, until Ctrl-C; see docs/watching.md."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.pages.live.followed_runs import Followed, Watched
from flowrl.pages.live.run_view import list_row
from flowrl.rendering.markup import plural
from flowrl.rewards.serving.server import check_extra, open_socket
from flowrl.runtime.scrubbing import say as print

if TYPE_CHECKING:
    import uvicorn

ADDRESS = "127.0.0.1"
"""The page is for this machine; others come through ssh -L, which asks who they are."""
HEADER_SECONDS = 10.0
AHEAD = 10.0
"""Seconds that are spent on reading before the address is said."""


def watch(runs: Sequence[str | Path] = ("runs",), *, port: int) -> None:
    """Serves the page until a signal.

    Args:
        runs: run folders, or folders that contain runs.
        port: 0 is a free one.

    Raises:
        ValueError: a folder is not there, the port is taken, or a package is not installed.
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
        port = bound.getsockname()[1]
        found = watched.look()
        read_ahead(found)
        print(f"Watching {plural(len(found), 'run')}; Ctrl-C stops. The page:\n{address}")
        print(
            f"From another machine: ssh -L {port}:{ADDRESS}:{port} {socket.gethostname()}, then the same address.",
            flush=True,
        )
        with suppress(KeyboardInterrupt):  # uvicorn has stopped, and hands the signal on
            server.run(sockets=[bound])
    print("Stopped.", flush=True)


def read_ahead(runs: Sequence[Followed]) -> None:
    """Reads runs before anybody asks, as far as that goes in `AHEAD` seconds; the page reads the others."""
    begun = time.monotonic()
    for followed in runs:
        if time.monotonic() - begun > AHEAD:
            return
        with suppress(ValueError, OSError):  # the page says so in the run's row
            followed.refresh()
            list_row(followed)


def make_server(watched: Watched, port: int) -> tuple[uvicorn.Server, str, socket.socket]:
    """The server, the address of the page with a token that was just made, and the socket that listens already.

    Raises:
        ValueError: as `watch`.
    """
    check_extra("flowrl watch", ("starlette", "uvicorn"))
    import uvicorn

    from flowrl.pages.live.watch_app import make_app
    from flowrl.rewards.serving.connections import MOST_HEADER_BYTES, limited_protocol

    token = secrets.token_urlsafe(18)
    bound = open_socket(ADDRESS, port, has_token=True)
    bound.listen(128)
    server = uvicorn.Server(
        uvicorn.Config(
            make_app(watched, token), log_level="warning", access_log=False, lifespan="off", ws="none",
            timeout_keep_alive=30, timeout_graceful_shutdown=1, server_header=False,
            http=limited_protocol(HEADER_SECONDS), h11_max_incomplete_event_size=MOST_HEADER_BYTES,
        )
    )  # fmt: skip
    return server, f"http://{ADDRESS}:{bound.getsockname()[1]}/{token}/", bound
