"""The server of the page on which people vote, below a path that is the token.

    GET  /TOKEN/               the page
    GET  /TOKEN/page.js        its script
    GET  /TOKEN/state?voter=V  what voter V sees now
    GET  /TOKEN/image/N        an image or a clip
    POST /TOKEN/vote           {"question": 7, "voter": V, "answer": "first"}

V is a word of 8 to 64 letters, digits and dashes, which a browser makes for itself. A refusal is a status and
{"error": words}.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.rendering.document import document
from flowrl.rewards.serving.own_page import POLICY
from flowrl.rewards.votes.ballot import Ballot, Refused
from flowrl.runtime.files import parse_json

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp

MOST_BYTES, BODY_SECONDS = 4096, 10.0
FOOTER = (
    "Served by the run to this machine only. Your answers, with the time and a random word for this browser, are kept "
    "in the run folder and go nowhere else."
)
_HERE = Path(__file__).parent


def make_app(
    ballot: Ballot, file: Callable[[int], Path | None], answers: Sequence[str], facts: Mapping[str, Any]
) -> ASGIApp:
    """What answers below the token, for `page_server`.

    Args:
        ballot: takes the answers.
        file: of an image, by its number.
        answers: that there are.
        facts: `ask`, `words` and `iterations`, for the page.
    """
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.responses import FileResponse, HTMLResponse, JSONResponse
    from starlette.responses import Response as Plain
    from starlette.routing import Route

    def page(_: Request) -> Response:
        body = (_HERE / "frame.html").read_text(encoding="utf-8").removesuffix("\n")
        return HTMLResponse(document("Vote", body, footer=FOOTER, policy=POLICY))

    def script(_: Request) -> Response:
        return Plain((_HERE / "page.js").read_text(encoding="utf-8"), media_type="text/javascript")

    def state(request: Request) -> Response:
        return JSONResponse({**facts, **ballot.state(_voter(request.query_params.get("voter")))})

    def image(request: Request) -> Response:
        path = file(request.path_params["number"])
        if path is None:
            raise Refused(404, "there is no such image, or it is shown no more.")
        return FileResponse(path, headers={"cache-control": "private, max-age=3600"})

    async def vote(request: Request) -> Response:
        said = await _body(request)
        if not isinstance(said, dict) or {*said} != {"question", "voter", "answer"}:
            raise Refused(422, 'send {"question": NUMBER, "voter": WORD, "answer": WORD}.')
        if type(said["question"]) is not int:
            raise Refused(422, "question must be a whole number.")
        if said["answer"] not in answers:
            raise Refused(422, f"answer must be one of {', '.join(answers)}.")
        voter = _voter(said["voter"])
        await asyncio.to_thread(ballot.answer, said["question"], voter, said["answer"])
        return JSONResponse({**facts, **ballot.state(voter)})

    def refused(_: Request, error: Exception) -> Response:
        status = (
            error.status
            if isinstance(error, Refused)
            else error.status_code
            if isinstance(error, HTTPException)
            else 500
        )
        words = "this page has no such address." if isinstance(error, HTTPException) else str(error)
        headers = {"Connection": "close"} if status in (408, 413) else None
        return JSONResponse({"error": words}, status, headers)

    routes = [
        Route("/", page), Route("/page.js", script), Route("/state", state), Route("/image/{number:int}", image),
        Route("/vote", vote, methods=["POST"]),
    ]  # fmt: skip
    return Starlette(routes=routes, exception_handlers={kind: refused for kind in (Refused, HTTPException, OSError)})


def _voter(word: Any) -> str:
    if not isinstance(word, str) or not re.fullmatch(r"[A-Za-z0-9-]{8,64}", word):
        raise Refused(422, "voter must be a word of 8 to 64 letters, digits and dashes.")
    return word


async def _body(request: Request) -> Any:
    """The JSON of a request."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refused(415, "send application/json.")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > MOST_BYTES:
                    raise Refused(413, f"a vote has at most {MOST_BYTES} bytes.")
    except TimeoutError as error:
        raise Refused(408, f"the body did not come within {BODY_SECONDS:.0f} s.") from error
    try:
        return parse_json(body.decode(), "the body")
    except ValueError as error:  # no UTF-8 either
        raise Refused(422, f"{error}.") from error
