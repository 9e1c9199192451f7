"""How much a judge is asked: requests and tokens a minute, and tokens in all.

A hosted judge counts for a key, not for a process: each of N training processes takes an N-th of every limit. Ray's
reward workers and the replicas of `flowrl serve` know nothing of each other: each takes the whole.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from flowrl.rewards.judges.chat import Question

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
