"""Serves a page about runs to browsers on this machine until Ctrl-C; see docs/watching.md.

The server answers only GET and HEAD, below a path that is the token:

    /TOKEN/                         the page
    /TOKEN/page.js                  its script
    /TOKEN/list?since=MARK          rows of all runs
    /TOKEN/run/N?since=MARK         curves, vital signs and commands of run N
    /TOKEN/pair/N/M?since=MARK      of two runs
    /TOKEN/log/N?mark=M             lines of the log after mark M
    /TOKEN/samples/N                which samples there are
    /TOKEN/sample/N/ITERATION/NAME  one of them

MARK is a digest of the page's data; if nothing changed, the answer is an empty 204.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.pages.live.followed_runs import Followed, Watched
from flowrl.pages.live.run_view import (
    command_list,
    commands,
    list_of,
    list_row,
    log_lines,
    page,
    sample_file,
    samples_of,
    traceback_of,
    view,
    view_of_two,
    waiting_row,
)
from flowrl.rendering.markup import plural
from flowrl.rewards.serving.own_page import elsewhere, page_server
from flowrl.runtime.digests import text_digest
from flowrl.runtime.scrubbing import say as print

if TYPE_CHECKING:
    import uvicorn
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp

SCRIPT = Path(__file__).parent / "page.js"
"""The script asks for news every few seconds and inserts them; texts never become HTML."""
FIRST_LINES = 200
"""Rows of the log at the start of a page."""
READING = 0.4
"""Seconds of an answer for runs that were never read; the next answer reads more."""


def make_app(watched: Watched) -> ASGIApp:
    """The application below the token, for `page_server`."""
    from starlette.applications import Starlette
    from starlette.responses import HTMLResponse, Response
    from starlette.routing import Route

    def route(path: str, answer: Callable[[Request], Response]) -> Route:
        def endpoint(request: Request) -> Response:  # not async: Starlette calls it in a thread
            try:
                return answer(request)
            except (ValueError, OSError) as error:  # the folder is gone, or is refused
                return _json({"error": str(error)}, 409)

        return Route(path, endpoint, methods=["GET", "HEAD"])

    answers, number = _Answers(watched), "{number:int}"
    routes = [
        route("/", lambda *_: HTMLResponse(page())),
        route("/page.js", lambda *_: Response(SCRIPT.read_text(encoding="utf-8"), media_type="text/javascript")),
        route("/list", answers.list),
        route(f"/run/{number}", answers.run),
        route(f"/pair/{number}/{{other:int}}", answers.pair),
        route(f"/log/{number}", answers.log),
        route(f"/samples/{number}", answers.samples),
        route(f"/sample/{number}/{{iteration:int}}/{{name}}", answers.sample),
    ]
    return Starlette(routes=routes)


class _Answers:
    """What is answered at each address of a run."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched

    def list(self, request: Request) -> Response:
        runs, rows, names = self._watched.look(), [], {}
        begun, waiting = time.monotonic(), False
        for followed in runs:
            names[str(followed.number)] = followed.name
            if not followed.was_read and time.monotonic() - begun > READING:
                waiting = True
                rows.append(waiting_row(followed, "reading"))
                continue
            try:
                followed.refresh()
                rows.append(list_row(followed))
            except (ValueError, OSError) as error:
                rows.append(waiting_row(followed, f"cannot be read: {error}"))
        newest = max(runs, key=Followed.written, default=None)
        first = "" if newest is None else str(newest.number)
        return _since(request, {"html": list_of(rows), "names": names, "newest": first, "waiting": waiting})

    def run(self, request: Request) -> Response:
        followed = self._of(request)
        followed.refresh()
        with followed.lock:
            return _since(request, {"view": view(followed), "commands": command_list(commands(followed))})

    def pair(self, request: Request) -> Response:
        one, other = (self._of(request, key) for key in ("number", "other"))
        for followed in (one, other):
            followed.refresh()
        marks = (one.version, other.version)
        made = one.kept.get(f"pair {other.number}")
        if made is None or made[0] != marks:
            html = view_of_two(one.run(), other.run(), (one.name, other.name))
            made = one.kept[f"pair {other.number}"] = (marks, html)
        asked = [(f"{run.name}: {words}", command) for run in (one, other) for words, command in commands(run)]
        return _since(request, {"view": made[1], "commands": command_list(asked)})

    def log(self, request: Request) -> Response:
        followed = self._of(request)
        followed.refresh()
        generation, _, seen = request.query_params.get("mark", "").partition("-")
        with followed.lock:
            same = generation == str(followed.generation) and seen.isdecimal() and int(seen) <= len(followed.rows)
            start = int(seen) if same else max(0, len(followed.rows) - FIRST_LINES)
            lines, mark = log_lines(followed.rows[start:]), f"{followed.generation}-{len(followed.rows)}"
        return _json({"lines": lines, "mark": mark, "again": not same, "error": traceback_of(followed)})

    def samples(self, request: Request) -> Response:
        followed = self._of(request)
        followed.refuse_links()
        return _since(request, samples_of(followed.folder))

    def sample(self, request: Request) -> Response:
        from starlette.responses import FileResponse, PlainTextResponse

        followed = self._of(request)
        path = sample_file(followed.folder, request.path_params["iteration"], request.path_params["name"])
        return PlainTextResponse("There is no such sample.\n", 404) if path is None else FileResponse(path)

    def _of(self, request: Request, key: str = "number") -> Followed:
        number = request.path_params[key]
        runs = self._watched.found or self._watched.look()
        if number >= len(runs):
            raise ValueError(f"there is no run {number}: load the page again")
        return runs[number]


def _since(request: Request, content: dict[str, Any]) -> Response:
    from starlette.responses import Response

    mark = text_digest(json.dumps(content))
    if request.query_params.get("since") == mark:
        return Response(status_code=204)
    return _json({**content, "mark": mark})


def _json(content: dict[str, Any], status: int = 200) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse(content, status_code=status)


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
