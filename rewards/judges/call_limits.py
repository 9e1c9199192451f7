"""Requests to a judge: how many there may be, how images travel in them, and what they cost.

    images = EncodedImages(questions, "jpeg95", threads)
    part = await images.part(image)          # the JSON of the image's part of a message

What each format costs is in docs/serving.md. A hosted judge counts for a key, not for a process: each of N training
processes takes an N-th of every limit. Ray's reward workers and the replicas of `flowrl serve` know nothing of each
other: each takes the whole.
"""

from __future__ import annotations

import asyncio
import base64
import io
import math
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from flowrl.rewards.judges.chat import JudgeImageFormat, Question

_IMAGE_TOKENS, _LETTERS_PER_TOKEN = 1000, 4  # a guess, until the first answer says how many tokens there are


@dataclass(frozen=True, kw_only=True, slots=True)
class CallLimits:
    """Of one process; None where there is none."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    tokens: float | None = None

    @classmethod
    def shared(cls, requests: float | None, minute_tokens: float | None, tokens: float | None, by: int) -> CallLimits:
        """An equal part of limits that `by` processes share."""
        parts = (None if limit is None else limit / by for limit in (requests, minute_tokens, tokens))
        return cls(**dict(zip(("requests_per_minute", "tokens_per_minute", "tokens"), parts, strict=True)))


class AskingPace:
    """Spreads requests evenly over time, as limits a minute ask for; used by one event loop. Each request moves each
    limit's next time by 60 s / limit for each thing it costs; tokens not yet known count as earlier ones."""

    def __init__(self, limits: CallLimits) -> None:
        self.limits = limits
        self.used = 0
        """Tokens so far."""
        self._answers = 0
        self._next = {"requests": -math.inf, "tokens": -math.inf}

    @property
    def spent(self) -> bool:
        """Whether all tokens there are have been used."""
        return self.limits.tokens is not None and self.used >= self.limits.tokens

    async def turn(self, question: Question, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> float:
        """Waits until a question may be asked; counts it, and returns the tokens that it is expected to cost. `pause`
        waits so many seconds; it may end before, where waiting makes no sense any more."""
        now = time.monotonic()
        wait = max(self._next.values()) - now
        expected = self.book(question)
        if wait > 0:
            await pause(wait)
        return expected

    def book(self, question: Question) -> float:
        """`turn` of a request that does not wait: later ones wait for it."""
        now = time.monotonic()
        if self._answers:
            expected = self.used / self._answers
        else:
            letters = sum(len(part) for part in (question.system, *question.parts) if isinstance(part, str))
            images = sum(not isinstance(part, str) for part in question.parts)
            expected = letters / _LETTERS_PER_TOKEN + _IMAGE_TOKENS * images + question.max_tokens
        self._move("requests", self.limits.requests_per_minute, 1.0, now)
        self._move("tokens", self.limits.tokens_per_minute, expected, now)
        return expected

    def settle(self, expected: float, tokens: int) -> None:
        """Puts the tokens of a request, 0 where it failed, in the place of those that were expected."""
        self._move("tokens", self.limits.tokens_per_minute, tokens - expected, -math.inf)
        self.used += tokens
        self._answers += tokens > 0

    def drop(self, expected: float) -> None:
        """Takes back a request that was booked and not sent."""
        self._move("requests", self.limits.requests_per_minute, -1.0, -math.inf)
        self.settle(expected, 0)

    def _move(self, kind: str, limit: float | None, cost: float, now: float) -> None:
        if limit is not None:
            self._next[kind] = max(self._next[kind], now) + 60.0 / limit * cost


_COARSE = 16  # every so many pixels of a side are looked at before two images are compared in full


class EncodedImages:
    """The images of some questions, which are encoded in threads from the moment on that this is made."""

    def __init__(self, questions: Iterable[Question], image_format: JudgeImageFormat, threads: Executor) -> None:
        self._parts: dict[int, Future[bytes]] = {}  # by identity of the array, which the questions keep alive
        alike: dict[tuple[object, ...], list[np.ndarray]] = {}
        for question in questions:
            for image in question.parts:
                if isinstance(image, str) or id(image) in self._parts:
                    continue
                # Who reads an image again for each question gives arrays of one content. A digest of all of it would
                # cost as much as the encoder: few images look alike on a coarse grid, and those are compared.
                others = alike.setdefault((image.shape, image[::_COARSE, ::_COARSE].tobytes()), [])
                same = next((other for other in others if np.array_equal(other, image)), None)
                if same is None:
                    others.append(image)
                    self._parts[id(image)] = threads.submit(image_part, image, image_format)
                else:
                    self._parts[id(image)] = self._parts[id(same)]

    async def part(self, image: np.ndarray) -> bytes:
        """The JSON of an image's part of a message, once it is there."""
        part = self._parts[id(image)]
        return part.result() if part.done() else await asyncio.wrap_future(part)


def image_part(image: np.ndarray, image_format: JudgeImageFormat) -> bytes:
    """An 8-bit image [H, W, 3] as JSON of a message's part, which holds the file in base64."""
    # What else is to be done to an image before it is sent, such as another size, belongs here.
    file = io.BytesIO()
    shown = Image.fromarray(image)
    if image_format == "png":
        shown.save(file, format="PNG", compress_level=1)  # the pixels are the same at every level
    elif image_format == "webp":
        shown.save(file, format="WEBP", lossless=True, method=0, quality=0)
    else:
        shown.save(file, format="JPEG", quality=95)
    kind = "jpeg" if image_format == "jpeg95" else image_format
    return b"".join(
        (
            b'{"type": "image_url", "image_url": {"url": "data:image/',
            kind.encode(),
            b";base64,",
            base64.b64encode(file.getbuffer()),
            b'"}}',
        )
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class UsageCount:
    """Some requests: how many, how many of them were repeated tries, their tokens, and seconds of those answered."""

    requests: int = 0
    retries: int = 0
    tokens: int = 0
    seconds: tuple[float, ...] = ()


class Usage:
    """A count that any thread may add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used, self._seconds = UsageCount(), list[float]()

    def add(self, *, again: bool = False, tokens: int = 0, seconds: float | None = None) -> None:
        """One request; `again` says that it repeats one, `seconds` is None where it was not answered."""
        with self._lock:
            used = self._used
            self._used = replace(
                used, requests=used.requests + 1, retries=used.retries + again, tokens=used.tokens + tokens
            )
            if seconds is not None:
                self._seconds.append(seconds)

    def take(self) -> UsageCount:
        """All since the last time."""
        with self._lock:
            used, seconds = self._used, tuple(self._seconds)
            self._used, self._seconds = UsageCount(), []
        return replace(used, seconds=seconds)


USAGE = Usage()
"""Of this process: all judges of a run stand in one row of its log."""


def usage_row(parts: Iterable[UsageCount]) -> dict[str, float]:
    """Numbers for the log of what some processes used; nothing where no judge was asked. `judge/requests`,
    `judge/retries` and `judge/tokens` are sums; `judge/seconds` is the median of a request that was answered,
    `judge/seconds_p95` what one in twenty exceeds."""
    parts = list(parts)
    requests = sum(part.requests for part in parts)
    if not requests:
        return {}
    row: dict[str, float] = {
        "judge/requests": requests,
        "judge/retries": sum(part.retries for part in parts),
        "judge/tokens": sum(part.tokens for part in parts),
    }
    seconds = [second for part in parts for second in part.seconds]
    if seconds:
        median, late = np.quantile(seconds, (0.5, 0.95))
        row |= {"judge/seconds": round(float(median), 4), "judge/seconds_p95": round(float(late), 4)}
    return row
