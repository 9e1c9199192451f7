"""`flowrl watch`: a page over runs for the browser of this machine, until Ctrl-C; see docs/watching.md."""

from __future__ import annotations

import argparse
import importlib
import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.commands.watch.followed_runs import Watched
from flowrl.html.markup import plural
from flowrl.rewards.serving.server import open_socket

if TYPE_CHECKING:
    import uvicorn

ADDRESS = "127.0.0.1"
"""The page is for this machine; others come through ssh -L, which asks who they are."""
HEADER_SECONDS = 10.0


def run(parsed: argparse.Namespace) -> int:
    """Serves the page until a signal; returns 0.

    Args:
        parsed: `runs`, folders; `port`.

    Raises:
        ValueError: a folder is not there, the port is taken, or a package is not installed.
    """
    watched = Watched(given=[_folder(path) for path in parsed.runs])
    server, address, bound = make_server(watched, parsed.port)
    with bound:
        port = bound.getsockname()[1]
        print(f"Watching {plural(len(watched.look()), 'run')} at {address}; Ctrl-C stops.")
        print(f"From another machine: ssh -L {port}:{ADDRESS}:{port} {socket.gethostname()}, then the same address.",
              flush=True)  # fmt: skip
        try:
            server.run(sockets=[bound])
        except KeyboardInterrupt:  # uvicorn has stopped, and hands the signal on
            pass
    print("Stopped.", flush=True)
    return 0


def make_server(watched: Watched, port: int) -> tuple[uvicorn.Server, str, socket.socket]:
    """The server, the address of the page with a token that was just made, and the socket that listens already.

    Raises:
        ValueError: as `run`.
    """
    for package in ("starlette", "uvicorn"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ValueError(
                f"flowrl watch needs {package} ({error}): in flowrl's folder, pip install -e '.[serve]'."
            ) from error
    import uvicorn

    from flowrl.commands.watch.watch_app import make_app
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


def _folder(path: Path) -> Path:
    path = path.expanduser()
    if not path.is_dir():
        raise ValueError(
            f"{path} is not a folder: give run folders, or a folder in which runs lie, such as the runs/ that "
            "flowrl train makes"
        )
    return path.absolute()
