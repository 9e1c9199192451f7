"""The server of the page on which people vote, below a path that is the token.

    GET  /TOKEN/               the page
    GET  /TOKEN/page.js        its script
    GET  /TOKEN/state?voter=V  what voter V sees now
    GET  /TOKEN/file/NAME      an image or a clip
    POST /TOKEN/vote           {"question": 7, "voter": V, "answer": "first"}

V is a word of 8 to 64 letters, digits and dashes, which a browser makes for itself. A refusal is a status and
{"error": word, "detail": sentence}.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.rendering.document import document
from flowrl.rewards.serving.own_page import POLICY
from flowrl.rewards.serving.server_requests import refusal
from flowrl.rewards.serving.wire_images import WireError, bad_request
from flowrl.rewards.votes.ballot import Ballot
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


def make_app(ballot: Ballot, files: Path, answers: Sequence[str], facts: Mapping[str, Any]) -> ASGIApp:
    """The handler of everything below the token, for `page_server`.

    Args:
        ballot: takes the answers.
        files: folder of the images and clips.
        answers: the possible answers.
        facts: `ask`, `words` and `iterations`, for the page.
    """
    from starlette.applications import Starlette
    from starlette.responses import FileResponse, HTMLResponse, JSONResponse
    from starlette.routing import Route

    def page(_: Request) -> Response:
        body = (_HERE / "frame.html").read_text(encoding="utf-8").removesuffix("\n")
        return HTMLResponse(document("Vote", body, footer=FOOTER, policy=POLICY))

    def script(_: Request) -> Response:
        return FileResponse(_HERE / "page.js", headers={"cache-control": "no-store"})

    def state(request: Request) -> Response:
        return JSONResponse({**facts, **ballot.state(_voter(request.query_params.get("voter")))})

    def file(request: Request) -> Response:
        path = files / request.path_params["name"]
        if path.parent != files or not path.is_file():
            raise WireError(404, "unknown", "there is no such image, or it is no longer shown.")
        return FileResponse(path, headers={"cache-control": "private, max-age=3600"})

    async def vote(request: Request) -> Response:
        said = await _body(request)
        fields = {"question", "voter", "answer"}
        if not isinstance(said, dict) or {*said} != fields or type(said["question"]) is not int:
            raise bad_request('send {"question": NUMBER, "voter": WORD, "answer": WORD}')
        if said["answer"] not in answers:
            raise bad_request(f"answer must be one of {', '.join(answers)}")
        await asyncio.to_thread(ballot.answer, said["question"], _voter(said["voter"]), said["answer"])
        return JSONResponse({**facts, **ballot.state(said["voter"])})

    routes = [Route("/", page), Route("/page.js", script), Route("/state", state), Route("/file/{name}", file)]
    routes.append(Route("/vote", vote, methods=["POST"]))
    return Starlette(routes=routes, exception_handlers={WireError: lambda _, error: refusal(error)})


def _voter(word: Any) -> str:
    if not isinstance(word, str) or not re.fullmatch(r"[A-Za-z0-9-]{8,64}", word):
        raise bad_request("voter must be a word of 8 to 64 letters, digits and dashes")
    return word


async def _body(request: Request) -> Any:
    """The JSON of a request."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise WireError(415, "content_type", "send application/json.")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > MOST_BYTES:
                    raise WireError(413, "too_large", f"a vote has at most {MOST_BYTES} bytes.")
    except TimeoutError as error:
        raise WireError(408, "slow_body", f"the body did not come within {BODY_SECONDS:.0f} s.") from error
    try:
        return parse_json(body.decode(), "the body")
    except ValueError as error:  # also not UTF-8
        raise bad_request(str(error)) from error
