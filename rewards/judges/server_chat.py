"""A judge behind an OpenAI-compatible server: vLLM, SGLang, llama.cpp, `transformers serve`, or a hosted one.

judge: {server: http://127.0.0.1:8000/v1, model: UnifiedReward}
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch

from flowrl.rewards.judges.answers import by_text
from flowrl.rewards.judges.call_limits import USAGE, AskingPace, CallLimits, EncodedImages
from flowrl.rewards.judges.chat import DEFAULT_FORMAT, NO_TOKENS, Answer, Chat, JudgeImageFormat, Question
from flowrl.rewards.networks.pretrained import look_for_servers
from flowrl.rewards.serving.http_client import DOWN, Body, Lines, ServerLine
from flowrl.rewards.serving.retries import Failure, addresses, await_with_retries, check_calls, check_servers
from flowrl.runtime.randomness import counter_seed

OWN_KEYS = frozenset({
    "model", "messages", "temperature", "logprobs", "top_logprobs", "seed", "n", "stream",
    "max_tokens", "max_completion_tokens",
})  # fmt: skip
"""Keys of a request that are not for `extra_body`."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerChat:
    """A judge that is asked by `POST server/chat/completions`, one request per question."""

    server: str | tuple[str, ...]
    """Address up to /v1; on this machine no proxy of the environment is used. A list where several servers offer the
    same model: each question goes to the one with the fewest on their way, and to another where one does not answer."""
    model: str
    """Name under which the server offers the model. It is what a judge is known by, in manifests and in journals of
    answers, wherever it runs: give two judges two names."""
    api_key_env: str | None = None
    """Environment variable that holds the key, null where none is needed."""
    concurrency: int = 64
    """Requests at a time, over all servers and all rewards of this process with the same judge."""
    timeout: float = 60.0
    """Seconds for one try."""
    deadline: float = 120.0
    """Seconds for all tries of one question."""
    retries: int = 4
    """Tries after the first, see `flowrl.rewards.serving.retries`. An answer that is not a chat completion is asked for
    again, with another seed where answers are sampled."""
    down_after: float | None = 5.0
    """Seconds within which a server that does not answer at all is taken for dead. Its questions then fail at once
    ("server_down") until it answers again; null has each of them wait for its deadline. A slow server has to answer
    `/models` within a sixth of this meanwhile: null for one that handles one request at a time."""
    requests_per_minute: float | None = None
    """Requests a minute at most, evenly spread, over all training processes; null has no limit. Each reward worker
    of Ray and each replica of `flowrl serve` takes the whole."""
    tokens_per_minute: float | None = None
    """Tokens a minute, of questions and answers, likewise; a guess where the server sends no `usage`."""
    max_tokens_total: int | None = None
    """Tokens in all since the start of the command, shared likewise; then the command ends. What is on its way still
    comes; in training, what is not sent any more fails, and the next questions end the command."""
    image_format: JudgeImageFormat = DEFAULT_FORMAT
    """How images travel: `jpeg95`, with halved colour (4:2:0, unlike `jpeg95` of `remote`); or without loss `webp`, of
    about the size of `png` and quicker made, or `png`."""
    structured: bool = False
    """Whether answers that are lists of numbers are asked for as JSON of a fixed form (`response_format`), which vLLM,
    SGLang and hosted models hold to, so that none is lost as "unparsed"."""
    tokens_key: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """What the server calls the length of the answer; some hosted models know the second only."""
    seed: int = 0
    """Seed of the waits between tries."""
    extra_body: Mapping[str, Any] | None = None
    """Further keys of the request, such as {chat_template_kwargs: {enable_thinking: false}}."""

    def __post_init__(self) -> None:
        check_servers("server", self.server, secret="api_key_env", example="http://127.0.0.1:8000/v1")
        if not self.model:
            raise ValueError("model must be the name under which the server offers the model, got an empty text.")
        check_calls(self)
        for name in ("down_after", "requests_per_minute", "tokens_per_minute", "max_tokens_total"):
            limit = getattr(self, name)
            if limit is not None and not (limit > 0 and math.isfinite(limit)):
                raise ValueError(f"{name} must be a positive number, or null for no limit, got {limit}.")
        given = set(self.extra_body or {})
        if taken := sorted(given & (OWN_KEYS | ({"response_format"} if self.structured else set()))):
            raise ValueError(f"extra_body must leave {', '.join(taken)} to the reward: take it out.")
        look_for_servers(self.servers, option="server")

    @property
    def servers(self) -> tuple[str, ...]:
        """All addresses."""
        return addresses(self.server)

    def build(self, device: torch.device) -> Chat:
        """Opens the lines; the model runs elsewhere. Rewards with equal options share them, and their limits. Raises
        ValueError: the environment variable of the key is not set."""
        key = os.environ.get(self.api_key_env) if self.api_key_env else None
        if self.api_key_env and not key:
            raise ValueError(
                f"judge: the environment variable {self.api_key_env} (api_key_env) is not set: put the key there."
            )
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        processes = torch.distributed.get_world_size() if several else 1
        one = (repr(self), key, processes, os.getpid())
        judge = _OPEN.get(one)
        if judge is None:
            limits = CallLimits.shared(
                self.requests_per_minute, self.tokens_per_minute, self.max_tokens_total, by=processes
            )
            lines = Lines(self.servers, api_key=key, down_after=self.down_after)
            _OPEN[one] = judge = ServerJudge(options=self, lines=lines, pace=_PACES.setdefault(one, AskingPace(limits)))
        return judge


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, weakref_slot=True)
class ServerJudge:
    """A judge's servers, with the lines to them."""

    options: ServerChat
    lines: Lines
    pace: AskingPace
    slots: asyncio.Semaphore = field(init=False)
    _told: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        object.__setattr__(self, "slots", asyncio.Semaphore(self.options.concurrency))

    @property
    def version(self) -> str:
        given = self.options
        extra = json.dumps(given.extra_body, sort_keys=True, default=str) if given.extra_body else "none"
        form = ":structured" if given.structured else ""
        return f"server_chat:{given.model}:{given.image_format}{form}:extra-{extra}"

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """Answers in the order of the questions; see `Chat`. Raises ValueError: the judge's tokens are used up."""
        if self.pace.spent:
            raise ValueError(
                f"judge {self.options.model} has used {self.pace.used} tokens"
                f"{'' if self.pace.limits.tokens == self.options.max_tokens_total else ' in this process'}, and "
                f"max_tokens_total is {self.options.max_tokens_total}: raise it, or remove it. What was answered "
                "before is kept, and the same command goes on from there."
            )
        images = EncodedImages(questions, self.options.image_format, self.lines.encoders)

        async def ask_all() -> list[Answer]:
            return list(await asyncio.gather(*(self._one(place, one, images) for place, one in enumerate(questions))))

        return self.lines.wait_for(ask_all())

    async def _one(self, place: int, question: Question, images: EncodedImages) -> Answer:
        async with self.slots:
            if stopped := self._reason_to_stop():
                return self._fail(stopped)
            messages = await messages_of(question, images)
            expected = await self.pace.turn(question, self.lines.pause)
            result = await await_with_retries(
                partial(self._try, question, messages, expected),
                self.lines.pause,
                deadline=self.options.deadline,
                retries=self.options.retries,
                seed=counter_seed(self.options.seed, "judge", place),
            )
        return self._fail(result) if isinstance(result, Failure) else result

    def _reason_to_stop(self) -> Failure | None:
        """Why nothing is to be sent now."""
        if self.pace.spent:
            return Failure(error=NO_TOKENS, again=False)
        if self.lines.dead:
            return Failure(error=DOWN, again=False, message=", ".join(self.options.servers))
        return None

    async def _try(
        self, question: Question, messages: bytes, expected: float, attempt: int, left: float
    ) -> Answer | Failure:
        booked = [] if attempt else [expected]  # by `turn`; every further request books for itself
        result: Answer | Failure | None = self._reason_to_stop()
        if result is None:
            given = self.options
            body: dict[str, Any] = {
                "model": given.model,
                given.tokens_key: question.max_tokens,
                "temperature": question.temperature,
            }
            if question.top_logprobs:
                body |= {"logprobs": True, "top_logprobs": question.top_logprobs}
            if given.structured and question.schema is not None:
                form = {"name": "answer", "schema": dict(question.schema), "strict": True}
                body["response_format"] = {"type": "json_schema", "json_schema": form}
            body |= dict(given.extra_body or {})
            if (seed := question.seed) is not None:
                seed = counter_seed(seed, "again", attempt) if attempt and question.temperature else seed
                body["seed"] = seed % 2**31
            data = json.dumps(body, allow_nan=False).encode()[:-1] + b', "messages": ' + messages + b"}"
            end = time.monotonic() + left
            result = await self.lines.pool.ask_awaited(partial(self._send, question, data, booked, end))
        if booked:
            self.pace.drop(booked.pop())
        return result

    async def _send(
        self, question: Question, body: bytes, booked: list[float], end: float, line: ServerLine
    ) -> Answer | Failure:
        """One request; without one in `booked` it repeats another, be it of this try."""
        begun = time.monotonic()
        timeout = min(self.options.timeout, max(end - begun, 0.001))
        if line.dead:
            failed: Failure = await line.post("", Body(data=body), timeout=timeout)  # which sends nothing
            return failed
        again = not booked
        expected = booked.pop() if booked else self.pace.book(question)
        reply = await line.post("/chat/completions", Body(data=body), timeout=timeout)
        result = reply if isinstance(reply, Failure) else read_reply(reply, question)
        if isinstance(result, Failure):
            tokens = 0 if isinstance(reply, Failure) else tokens_of(reply)  # an answer of no use costs all the same
            USAGE.add(again=again, tokens=tokens)
        else:
            tokens = result.tokens
            USAGE.add(again=again, tokens=tokens, seconds=time.monotonic() - begun)
        if not tokens and not isinstance(result, Failure):  # the server does not say them
            tokens, limits = math.ceil(expected), self.pace.limits
            if "usage" not in self._told and (limits.tokens_per_minute is not None or limits.tokens is not None):
                self._told.add("usage")
                _log.warning(
                    "judge %s does not say how many tokens its answers cost (`usage`): limits of tokens hold for a "
                    "guess",
                    self.options.model,
                )
        self.pace.settle(expected, tokens)
        return result

    def _fail(self, failed: Failure) -> Answer:
        if failed.error not in self._told:  # once per kind: the message says what the short word cannot
            self._told.add(failed.error)
            hint = ""
            if self.options.structured and failed.error in ("status_400", "status_422"):
                hint = " (structured: true sends response_format; leave it out if the server does not know that)"
            names = ", ".join(self.options.servers)
            _log.warning("judge %s at %s: %s %s%s", self.options.model, names, failed.error, failed.message, hint)
        return Answer(error=failed.error)


async def messages_of(question: Question, images: EncodedImages) -> bytes:
    """A question's messages as JSON. Images are put in as they are: to go through an encoder of JSON again would cost
    as much as to encode them."""
    parts = [
        json.dumps({"type": "text", "text": part}).encode() if isinstance(part, str) else await images.part(part)
        for part in question.parts
    ]
    system = b""
    if question.system is not None:
        system = json.dumps({"role": "system", "content": question.system}).encode() + b", "
    return b"[" + system + b'{"role": "user", "content": [' + b", ".join(parts) + b"]}]"


_OPEN: WeakValueDictionary[tuple[str, str | None, int, int], ServerJudge] = WeakValueDictionary()
"""Judges in use, by options, key, number of processes and process."""
_PACES: dict[tuple[str, str | None, int, int], AskingPace] = {}
"""What each has been asked, by the same; it outlives them, since limits hold for the whole command."""


def read_reply(reply: Any, question: Question) -> Answer | Failure:
    """The answer in a chat completion. "garbage" is a reply of another form, which is worth another try. "no_logprobs"
    is a server that does not give them. "truncated" is an answer, text included, that reached `max_tokens` before its
    end; see `Question.is_text`."""
    try:
        (choice,) = reply["choices"]
        text = choice["message"].get("content")
        positions = (choice.get("logprobs") or {}).get("content") or []
        logprobs = tuple(_candidates(position) for position in positions)
        usage = reply.get("usage") or {}
        tokens = int(usage.get("total_tokens") or 0)
        cut = choice.get("finish_reason") == "length"
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        return Failure(error="garbage", message=f"{type(error).__name__} in {str(reply)[:200]}")
    if text is None and logprobs:
        text = ""
    if not isinstance(text, str):
        return Failure(error="garbage", message=f"no text in {str(reply)[:200]}")
    if question.top_logprobs and not logprobs:
        return Answer(text=text, error="no_logprobs", tokens=tokens)
    return Answer(text=text, logprobs=logprobs, error="truncated" if question.is_text and cut else None, tokens=tokens)


def tokens_of(reply: Any) -> int:
    """What a reply of any form says that it cost; 0 where it does not."""
    try:
        return max(int(reply["usage"]["total_tokens"]), 0)
    except (TypeError, ValueError, KeyError, IndexError, OverflowError):
        return 0


def _candidates(position: Mapping[str, Any]) -> dict[str, float]:
    """Log-probabilities by text of one answered token: its candidates, and itself where it is not among them."""
    top = position.get("top_logprobs") or []
    found = by_text((str(candidate["token"]), _logprob(candidate["logprob"])) for candidate in top)
    return {str(position["token"]): _logprob(position["logprob"])} | found


def _logprob(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value <= 1e-3:
        raise ValueError(f"{value!r} is not a log-probability")  # NaN, a text, or clearly positive
    return float(value)
