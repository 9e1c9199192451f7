"""A judge behind an OpenAI-compatible server: vLLM, SGLang, llama.cpp, `transformers serve`, or a hosted one.

judge: {server: http://127.0.0.1:8000/v1, model: UnifiedReward}
"""

from __future__ import annotations

import base64
import io
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np
import requests
from PIL import Image

from flowrl.randomness import counter_seed
from flowrl.rewards.judges.answers import logsumexp
from flowrl.rewards.judges.chat import Answer, Chat, Question
from flowrl.rewards.serving.retries import Failed, call_with_retries, open_session, post_json

ImageFormat = Literal["png", "jpeg95"]
TokensKey = Literal["max_tokens", "max_completion_tokens"]

OWN_KEYS = frozenset({"model", "messages", "temperature", "logprobs", "top_logprobs", "seed", "n", "stream"})
"""Keys of a request that are not for `extra_body`, besides the two of the answer's length."""

_log = logging.getLogger(__name__)


def check(
    *,
    server: str,
    model: str,
    api_key_env: str | None = None,
    concurrency: int = 16,
    timeout: float = 60.0,
    deadline: float = 120.0,
    retries: int = 4,
    image_format: ImageFormat = "png",
    tokens_key: TokensKey = "max_tokens",
    seed: int = 0,
    extra_body: Mapping[str, Any] | None = None,
) -> None:
    """Refuses option values that are wrong, without calling the server."""
    parts = urlsplit(server)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"judge: server must be an address such as http://127.0.0.1:8000/v1, got {server!r}.")
    if parts.username or parts.password:
        raise ValueError("judge: server must hold no user name or password: put the key in a variable of the "
                         "environment and name that in api_key_env.")  # fmt: skip
    if not model:
        raise ValueError("judge: model must be the name under which the server offers the model, got an empty text.")
    if concurrency < 1:
        raise ValueError(f"judge: concurrency must be 1 or more requests at a time, got {concurrency}.")
    if retries < 0:
        raise ValueError(f"judge: retries must be 0 or more, got {retries}.")
    for name, seconds in (("timeout", timeout), ("deadline", deadline)):
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"judge: {name} must be a positive number of seconds, got {seconds}.")
    if extra_body is not None and not isinstance(extra_body, Mapping):
        raise ValueError(f"judge: extra_body must be a mapping, got {extra_body!r}.")
    if taken := sorted(set(extra_body or {}) & (OWN_KEYS | {"max_tokens", "max_completion_tokens"})):
        raise ValueError(f"judge: extra_body must leave {', '.join(taken)} to the reward: take it out.")


def server_chat(
    *,
    device: Any = None,
    server: str,
    model: str,
    api_key_env: str | None = None,
    concurrency: int = 16,
    timeout: float = 60.0,
    deadline: float = 120.0,
    retries: int = 4,
    image_format: ImageFormat = "png",
    tokens_key: TokensKey = "max_tokens",
    seed: int = 0,
    extra_body: Mapping[str, Any] | None = None,
) -> Chat:
    """A judge that is asked by `POST server/chat/completions`, one request a question.

    Args:
        device: not used; the model runs elsewhere.
        server: the address up to /v1. On this machine no proxy of the environment is used.
        model: the name under which the server offers the model.
        api_key_env: name of the environment variable that holds the key, null where none is needed.
        concurrency: requests at a time.
        timeout: seconds for one try.
        deadline: seconds for all tries of one question.
        retries: tries after the first, see `flowrl.rewards.serving.retries`. An answer that is no chat completion is
            asked for again, with another seed where answers are sampled.
        image_format: how images travel: `png`, without loss, or `jpeg95`, smaller.
        tokens_key: what the server calls the length of the answer; some hosted models know the second only.
        seed: of the waits between tries.
        extra_body: further keys of the request, such as {chat_template_kwargs: {enable_thinking: false}}.

    Raises:
        ValueError: for a bad value, or an environment variable that is not set.
    """
    check(
        server=server,
        model=model,
        api_key_env=api_key_env,
        concurrency=concurrency,
        timeout=timeout,
        deadline=deadline,
        retries=retries,
        image_format=image_format,
        tokens_key=tokens_key,
        seed=seed,
        extra_body=extra_body,
    )
    api_key = os.environ.get(api_key_env) if api_key_env else None
    if api_key_env and not api_key:
        raise ValueError(f"judge: the environment variable {api_key_env} (api_key_env) is not set: put the key there.")
    return ServerChat(
        url=server.rstrip("/") + "/chat/completions",
        model=model,
        session=open_session(server, api_key=api_key, connections=concurrency),
        concurrency=concurrency,
        timeout=timeout,
        deadline=deadline,
        retries=retries,
        image_format=image_format,
        tokens_key=tokens_key,
        seed=seed,
        extra_body=dict(extra_body or {}),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ServerChat:
    """See `server_chat`; `clock` and `sleep` are there for tests."""

    url: str
    model: str
    session: requests.Session
    concurrency: int
    timeout: float
    deadline: float
    retries: int
    image_format: ImageFormat
    tokens_key: TokensKey
    seed: int
    extra_body: Mapping[str, Any]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _told: set[str] = field(default_factory=set)

    @property
    def version(self) -> str:
        extra = json.dumps(self.extra_body, sort_keys=True, default=str) if self.extra_body else "none"
        return f"server_chat:{self.model}@{urlsplit(self.url).netloc}:{self.image_format}:extra-{extra}"

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """Answers in the order of the questions; see `Chat`."""
        encoded: dict[int, str] = {}  # an image that is part of many questions is encoded once

        def one(place: int) -> Answer:
            body = self._body(questions[place], encoded)
            result = call_with_retries(
                partial(self._try, questions[place], body),
                deadline=self.deadline,
                retries=self.retries,
                seed=counter_seed(self.seed, "judge", place),
                clock=self.clock,
                sleep=self.sleep,
            )
            return self._failed(result) if isinstance(result, Failed) else result

        with ThreadPoolExecutor(max_workers=min(self.concurrency, max(len(questions), 1))) as pool:
            return list(pool.map(one, range(len(questions))))

    def _body(self, question: Question, encoded: dict[int, str]) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        for part in question.parts:
            if isinstance(part, str):
                content.append({"type": "text", "text": part})
                continue
            if id(part) not in encoded:
                encoded[id(part)] = data_url(part, self.image_format)
            content.append({"type": "image_url", "image_url": {"url": encoded[id(part)]}})
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if question.system is not None:
            messages.insert(0, {"role": "system", "content": question.system})
        body: dict[str, Any] = {"model": self.model, "messages": messages, self.tokens_key: question.max_tokens}
        body["temperature"] = question.temperature
        if question.top_logprobs:
            body |= {"logprobs": True, "top_logprobs": question.top_logprobs}
        return body | dict(self.extra_body)

    def _try(self, question: Question, body: dict[str, Any], attempt: int, left: float) -> Answer | Failed:
        if question.seed is not None:
            seed = counter_seed(question.seed, "again", attempt) if attempt and question.temperature else question.seed
            body = body | {"seed": seed % 2**31}
        reply = post_json(self.session, self.url, body, timeout=min(self.timeout, left), clock=self.clock)
        return reply if isinstance(reply, Failed) else read_reply(reply, question)

    def _failed(self, failed: Failed) -> Answer:
        if failed.error not in self._told:  # once a kind: the message says what the short word cannot
            self._told.add(failed.error)
            _log.warning("judge %s: %s %s", self.url, failed.error, failed.message)
        return Answer(error=failed.error)


def data_url(image: np.ndarray, image_format: ImageFormat) -> str:
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
    "truncated" is an answer, text included, that is to be read as text and reached `max_tokens` before its end.
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
    truncated = cut and question.max_tokens > 1 and not question.top_logprobs
    return Answer(text=text or "", logprobs=logprobs, error="truncated" if truncated else None, tokens=tokens)


def _candidates(position: Mapping[str, Any]) -> dict[str, float]:
    """Log-probabilities by text of one answered token: its candidates, and itself where it is not among them."""
    found: dict[str, list[float]] = {}
    for candidate in position.get("top_logprobs") or []:
        found.setdefault(str(candidate["token"]), []).append(_logprob(candidate["logprob"]))
    found.setdefault(str(position["token"]), [_logprob(position["logprob"])])
    return {text: logsumexp(values) for text, values in found.items()}  # two tokens may be written alike


def _logprob(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value <= 1e-3:
        raise ValueError(f"{value!r} is no log-probability")  # NaN, a text, or clearly positive
    return float(value)
