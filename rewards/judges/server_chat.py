"""A judge behind an OpenAI-compatible server: vLLM, SGLang, llama.cpp, `transformers serve`, or a hosted one.

judge: {server: http://127.0.0.1:8000/v1, model: UnifiedReward}
"""

from __future__ import annotations

import base64
import io
import json
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np
import requests
import torch
from PIL import Image

from flowrl.randomness import counter_seed
from flowrl.rewards.judges.answers import by_text
from flowrl.rewards.judges.chat import Answer, Chat, Question
from flowrl.rewards.serving.retries import (
    Failed,
    call_with_retries,
    check_calls,
    check_server,
    open_session,
    post_json,
)

OWN_KEYS = frozenset({
    "model", "messages", "temperature", "logprobs", "top_logprobs", "seed", "n", "stream",
    "max_tokens", "max_completion_tokens",
})  # fmt: skip
"""Keys of a request that are not for `extra_body`."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerChat:
    """A judge that is asked by `POST server/chat/completions`, one request per question."""

    server: str
    """Address up to /v1. On this machine no proxy of the environment is used."""
    model: str
    """Name under which the server offers the model."""
    api_key_env: str | None = None
    """Environment variable that holds the key, null where none is needed."""
    concurrency: int = 16
    """Requests at a time."""
    timeout: float = 60.0
    """Seconds for one try."""
    deadline: float = 120.0
    """Seconds for all tries of one question."""
    retries: int = 4
    """Tries after the first, see `flowrl.rewards.serving.retries`. An answer that is not a chat completion is asked for
    again, with another seed where answers are sampled."""
    image_format: Literal["png", "jpeg95"] = "png"
    """How images travel: `png`, without loss, or `jpeg95`, smaller."""
    tokens_key: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """What the server calls the length of the answer; some hosted models know the second only."""
    seed: int = 0
    """Seed of the waits between tries."""
    extra_body: Mapping[str, Any] | None = None
    """Further keys of the request, such as {chat_template_kwargs: {enable_thinking: false}}."""

    def __post_init__(self) -> None:
        check_server("server", self.server, secret="api_key_env", example="http://127.0.0.1:8000/v1")
        if not self.model:
            raise ValueError("model must be the name under which the server offers the model, got an empty text.")
        check_calls(self.concurrency, self.retries, timeout=self.timeout, deadline=self.deadline)
        if taken := sorted(set(self.extra_body or {}) & OWN_KEYS):
            raise ValueError(f"extra_body must leave {', '.join(taken)} to the reward: take it out.")

    def build(self, device: torch.device) -> Chat:
        """Opens the connection; the model runs elsewhere.

        Raises:
            ValueError: the environment variable of the key is not set.
        """
        key = os.environ.get(self.api_key_env) if self.api_key_env else None
        if self.api_key_env and not key:
            raise ValueError(
                f"judge: the environment variable {self.api_key_env} (api_key_env) is not set: put the key there."
            )
        return ServerJudge(options=self, session=open_session(self.server, api_key=key, connections=self.concurrency))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ServerJudge:
    """A server with its connection."""

    options: ServerChat
    session: requests.Session
    _told: set[str] = field(default_factory=set)

    @property
    def url(self) -> str:
        """Where questions are sent."""
        return self.options.server.rstrip("/") + "/chat/completions"

    @property
    def version(self) -> str:
        given = self.options
        extra = json.dumps(given.extra_body, sort_keys=True, default=str) if given.extra_body else "none"
        return f"server_chat:{given.model}@{urlsplit(self.url).netloc}:{given.image_format}:extra-{extra}"

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """Answers in the order of the questions; see `Chat`."""
        encoded: dict[int, str] = {}  # an image that is part of many questions is encoded once

        def one(place: int) -> Answer:
            body = self._body(questions[place], encoded)
            result = call_with_retries(
                partial(self._try, questions[place], body),
                deadline=self.options.deadline,
                retries=self.options.retries,
                seed=counter_seed(self.options.seed, "judge", place),
            )
            return self._failed(result) if isinstance(result, Failed) else result

        with ThreadPoolExecutor(max_workers=min(self.options.concurrency, max(len(questions), 1))) as pool:
            return list(pool.map(one, range(len(questions))))

    def _body(self, question: Question, encoded: dict[int, str]) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        for part in question.parts:
            if isinstance(part, str):
                content.append({"type": "text", "text": part})
                continue
            if id(part) not in encoded:
                encoded[id(part)] = data_url(part, self.options.image_format)
            content.append({"type": "image_url", "image_url": {"url": encoded[id(part)]}})
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if question.system is not None:
            messages.insert(0, {"role": "system", "content": question.system})
        body: dict[str, Any] = {
            "model": self.options.model,
            "messages": messages,
            self.options.tokens_key: question.max_tokens,
            "temperature": question.temperature,
        }
        if question.top_logprobs:
            body |= {"logprobs": True, "top_logprobs": question.top_logprobs}
        return body | dict(self.options.extra_body or {})

    def _try(self, question: Question, body: dict[str, Any], attempt: int, left: float) -> Answer | Failed:
        if question.seed is not None:
            seed = counter_seed(question.seed, "again", attempt) if attempt and question.temperature else question.seed
            body = body | {"seed": seed % 2**31}
        reply = post_json(self.session, self.url, body, timeout=min(self.options.timeout, left))
        return reply if isinstance(reply, Failed) else read_reply(reply, question)

    def _failed(self, failed: Failed) -> Answer:
        if failed.error not in self._told:  # once per kind: the message says what the short word cannot
            self._told.add(failed.error)
            _log.warning("judge %s: %s %s", self.url, failed.error, failed.message)
        return Answer(error=failed.error)


def data_url(image: np.ndarray, image_format: str) -> str:
    """An 8-bit image [H, W, 3] as the data URL of a file."""
    file = io.BytesIO()
    if image_format == "png":
        Image.fromarray(image).save(file, format="PNG", compress_level=1)  # the pixels are the same at every level
    else:
        Image.fromarray(image).save(file, format="JPEG", quality=95)
    kind = "png" if image_format == "png" else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def read_reply(reply: Any, question: Question) -> Answer | Failed:
    """The answer in a chat completion.

    "garbage" is a reply of another form, which is worth another try. "no_logprobs" is a server that does not give them.
    "truncated" is an answer, text included, that reached `max_tokens` before its end; see `Question.is_text`.
    """
    try:
        (choice,) = reply["choices"]
        text = choice["message"].get("content")
        positions = (choice.get("logprobs") or {}).get("content") or []
        logprobs = tuple(_candidates(position) for position in positions)
        usage = reply.get("usage") or {}
        tokens = int(usage.get("total_tokens") or 0)
        cut = choice.get("finish_reason") == "length"
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        return Failed(error="garbage", message=f"{type(error).__name__} in {str(reply)[:200]}")
    if not isinstance(text, str) and not (text is None and logprobs):
        return Failed(error="garbage", message=f"no text in {str(reply)[:200]}")
    if question.top_logprobs and not logprobs:
        return Answer(text=text or "", error="no_logprobs", tokens=tokens)
    word = "truncated" if question.is_text and cut else None
    return Answer(text=text or "", logprobs=logprobs, error=word, tokens=tokens)


def _candidates(position: Mapping[str, Any]) -> dict[str, float]:
    """Log-probabilities by text of one answered token: its candidates, and itself where it is not among them."""
    top = position.get("top_logprobs") or []
    found = by_text((str(candidate["token"]), _logprob(candidate["logprob"])) for candidate in top)
    return {str(position["token"]): _logprob(position["logprob"])} | found


def _logprob(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value <= 1e-3:
        raise ValueError(f"{value!r} is not a log-probability")  # NaN, a text, or clearly positive
    return float(value)
