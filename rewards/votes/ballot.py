"""Questions to people, their answers, and the journal that keeps the answers in the run folder.

An entry is one answer. It is on the disk before the page confirms it:

    key: [iteration, group, samples, prompt, voter]      row: {looks, answer, time}

An answer of null by voter null closes the question: the time was up. A resumed run uses the journal's answers for
images that look the same: at 8 x 8 pixels each level is within `ALIKE` of 255, because GPU kernels round differently.

The page lies below a path that is the token:

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
import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.rendering.document import document
from flowrl.rewards.serving.own_page import POLICY
from flowrl.rewards.serving.server_requests import refusal
from flowrl.rewards.serving.wire_images import WireError, bad_request
from flowrl.runtime.disk_errors import disk_words
from flowrl.runtime.files import parse_json
from flowrl.runtime.journal import Journal, Row

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp


VALUES = {"first": 1.0, "second": 0.0, "tie": 0.5, "good": 1.0, "bad": 0.0}
"""The value of an answer for the first image, or for the only one; `skip` has none."""
ALIKE = 3


@dataclass(kw_only=True, slots=True, eq=False)
class VoteQuestion:
    """A question about samples of one prompt."""

    about: tuple[int, int, list[int], str]
    """Its key in the journal: iteration, group, samples, prompt."""
    looks: Sequence[bytes]
    """[8 * 8 * 3] levels of each sample."""
    page: Mapping[str, Any]
    """What the page receives: `shown`, `candidates` and `sources` are numbers of files."""
    answers: dict[str | None, str | None] = field(default_factory=dict)
    """By voter; None if the time was up."""

    @property
    def value(self) -> float:
        """The mean over voters; NaN without any."""
        known = [VALUES[said] for said in self.answers.values() if said in VALUES]
        return sum(known) / len(known) if known else math.nan

    def is_about(self, row: Row) -> bool:
        """Whether a row of the journal is about images that look the same."""
        found = [*map(bytes.fromhex, row["looks"])]
        pairs = zip(self.looks, found, strict=False)
        alike = all(abs(x - y) <= ALIKE for pair in pairs for x, y in zip(*pair, strict=False))
        return alike and [*map(len, self.looks)] == [*map(len, found)]


class Ballot:
    """The questions of a run. One thread asks and waits; a server's threads bring the answers."""

    def __init__(self, folder: Path, identity: Mapping[str, Any], *, voters: int, timeout: float | None) -> None:
        """Opens the journal. Raises ValueError: it holds something that is not an answer."""
        self.voters, self.timeout, self.changed = voters, timeout, threading.Condition()
        self.journal = Journal(folder, identity)
        self._kept: dict[str, list[tuple[str | None, Row]]] = {}
        try:
            for key, row in self.journal.rows.items():
                *about, voter = json.loads(key)
                _ = [*map(bytes.fromhex, row["looks"])], VALUES.get(row["answer"])
                self._kept.setdefault(json.dumps(about), []).append((voter, row))
        except (ValueError, KeyError, TypeError) as error:
            self.journal.__exit__()
            raise ValueError(f"{self.journal.path} holds no vote at key {key}: remove that line") from error
        self._asked: list[VoteQuestion] = []  # by number
        self._open: dict[int, VoteQuestion] = {}
        self._deadline = math.inf
        self._fault = ""
        self._first = 0  # number of this iteration's first question

    def put(self, asked: Sequence[VoteQuestion]) -> None:
        """Asks the questions that the journal does not answer."""
        with self.changed:
            self._deadline = math.inf
            for ask in asked:
                if self._asked and self._asked[-1].about[0] != ask.about[0]:
                    self._first = len(self._asked)
                rows = self._kept.get(json.dumps(ask.about), ())
                ask.answers.update((voter, row["answer"]) for voter, row in rows if ask.is_about(row))
                self._open[len(self._asked)] = ask
                self._asked.append(ask)

    def wait(self, asked: Sequence[VoteQuestion], tell: Callable[[int, float], None]) -> None:
        """Waits until questions are answered or the time is up, and closes them. Time counts from the first wait after
        questions were asked; by then all images of an iteration are drawn.

        Raises:
            ValueError: an answer could not be written.
        """
        with self.changed:
            if self._left(asked) and self._deadline == math.inf:
                self._deadline = time.monotonic() + (self.timeout or math.inf)
                tell(len(self._left(self._open.values())), self._deadline)
            while (left := self._left(asked)) and not self._fault and time.monotonic() < self._deadline:
                self.changed.wait(min(0.5, max(0.0, self._deadline - time.monotonic())))
            for ask in left:
                self._keep(ask, None, None)
            if self._fault:
                raise ValueError(self._fault)
            self._open = {number: ask for number, ask in self._open.items() if ask not in asked}

    def answer(self, number: int, voter: str, said: str) -> None:
        """Takes an answer. Raises WireError: no such question, too late, answered already, or no room on the disk."""
        with self.changed:
            if not 0 <= number < len(self._asked):
                raise WireError(404, "unknown", f"there is no question {number}: load the page again.")
            if number not in self._open or time.monotonic() >= self._deadline:
                raise WireError(409, "late", "this answer came too late: training went on without it.")
            if voter in self._open[number].answers:
                raise WireError(409, "twice", "you have answered this question already: your first answer counts.")
            self._keep(self._open[number], voter, said)
            self.changed.notify_all()
            if self._fault:
                raise WireError(507, "not_kept", f"this answer is not counted, and the run ends: {self._fault}")

    def state(self, voter: str) -> dict[str, Any]:
        """The state that the page shows a voter: the open question with the fewest answers, and the progress of all."""
        with self.changed:
            left, now = self._left(self._open.values()), self._asked[self._first :]
            mine = sorted((one for one in left if voter not in one.answers), key=lambda one: len(one.answers))
            found: dict[str, Any] = {
                "iteration": now[0].about[0] if now else -1,
                "all": len(now),
                "done": len(now) - len(left),
            }
            found["missing"] = sum(math.isnan(one.value) for one in now)
            found["stage"] = "vote" if mine else "wait" if left else "train"
            if left and self._deadline < math.inf:
                found["seconds"] = max(0.0, self._deadline - time.monotonic())
            if mine:
                found["question"] = {"number": self._asked.index(mine[0], self._first), "prompt": mine[0].about[3]}
                found["question"] |= mine[0].page
                found["next"] = [image for one in mine[1:2] for image in one.page["shown"]]
            return found

    def _left(self, asked: Iterable[VoteQuestion]) -> list[VoteQuestion]:
        return [one for one in asked if None not in one.answers and len(one.answers) < self.voters]

    def _keep(self, ask: VoteQuestion, voter: str | None, said: str | None) -> None:
        row = {"looks": [look.hex() for look in ask.looks], "answer": said, "time": time.strftime("%Y-%m-%dT%H:%M:%S")}
        try:
            if not self._fault:
                self.journal.add(json.dumps([*ask.about, voter]), row, durable=True)
                ask.answers[voter] = said
        except OSError as error:
            self._fault = f"{self.journal.path}: votes cannot be written: {disk_words(error)}"


# ---- the page --------------------------------------------------------------------------------------------------------


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
