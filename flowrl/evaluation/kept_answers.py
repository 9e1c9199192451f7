"""Asks questions until their answers can be read, and keeps the answers in a journal.

A judge may be busy, refuse an image, or not answer the question. If an answer cannot be read, the question is asked
again, at a higher temperature and with another seed, up to a number of tries; then it is kept as failed, like an answer
that was cut off. If the server failed, nothing is kept: the next run asks again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.evaluation.named_judges import check_alive, check_tokens
from flowrl.rewards.judges.asking import UNPARSED, ask_all
from flowrl.rewards.judges.chat import NO_TOKENS, Answer, Chat, Question
from flowrl.runtime.journal import Journal, Row
from flowrl.runtime.progress import progress

AT_ONCE = 64  # questions asked together; at most that many answers are lost when a run is cut short
MANY = 8  # questions that all failed, after others were answered: the judge is gone
READABLE_ERRORS = (None, "truncated")  # the judge answered, if not to the end
KEPT_ERRORS = (*READABLE_ERRORS, UNPARSED)
RETRY_TEMPERATURE = 0.7  # of tries after the first: a greedy answer would come out the same again

Build = Callable[[int, int, float], Question]
"""Maps (place, number of the try, temperature) to the question."""
Read = Callable[[int, Answer], tuple[str | None, Row]]
"""Maps (place, answer) to why it cannot be read (None if it can), and what to keep in addition to its text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asking:
    """Settings for asking."""

    attempts: int = 1
    """Tries for a question whose answer cannot be read; each after the first has another seed."""
    max_tokens: int = 1024
    """Length of an answer."""
    temperature: float = 0.0
    """Temperature of the first try; 0 is greedy. Later tries have at least `RETRY_TEMPERATURE`."""
    seed: int = 0
    """Seed of sampled answers."""

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.max_tokens < 1:
            raise ValueError(f"attempts and max_tokens must be at least 1, got {self.attempts} and {self.max_tokens}.")
        if not 0 <= self.temperature <= 10:
            raise ValueError(f"temperature must be 0 (greedy) to 10, got {self.temperature:g}.")

    def heat(self, attempt: int) -> float:
        """The temperature of a try, counted from 0."""
        return self.temperature if attempt == 0 else max(self.temperature, RETRY_TEMPERATURE)

    @property
    def facts(self) -> dict[str, Any]:
        """The settings as a result states them."""
        return {"temperature": self.temperature, "tries": self.attempts, "max_tokens": self.max_tokens}


def ask_kept(
    chat: Chat, keys: Sequence[str], build: Build, read: Read, journal: Journal, asking: Asking, *, label: str,
    lost: str = "without scores", kept: Sequence[str | None] = KEPT_ERRORS,
) -> list[Row]:  # fmt: skip
    """The judge's answers to questions, in order; questions with an answer in the journal are not asked again.

    A row holds `output` (the last reply), `attempts`, `error` (None, or why it cannot be read), `tokens`, `seconds`
    (its share of the time), and what `read` adds.

    Args:
        build: makes a question; called for every try.
        asking: number of tries and temperature.
        label: the judged subject, for the progress.
        lost: name of failed questions, for the progress.
        kept: note on the kept answers.

    Raises ValueError: the judge is not there, refuses, or has used all its tokens. Earlier answers are kept.
    """
    missing = [place for place, key in enumerate(keys) if key not in journal.rows]
    batches = [missing[first : first + AT_ONCE] for first in range(0, len(missing), AT_ONCE)]
    failed: dict[str, Row] = {}
    done = len(keys) - len(missing)
    skipped = sum(journal.rows[key].get("error") is not None for key in keys if key in journal.rows)
    heard = done > 0
    with progress(f"judging {label}", len(keys), done) as advance:
        for batch in batches:
            # A single question may be refused for what it shows; many at once, or the very first, mean the judge.
            rows = _ask(chat, batch, build, read, asking, stop_at=MANY if heard else 1, kept=kept)
            heard = heard or any(row["error"] in kept for row in rows)
            for place, row in zip(batch, rows, strict=True):
                if row["error"] in kept:
                    journal.add(keys[place], row)
                else:
                    failed[keys[place]] = row
                skipped += row["error"] is not None
                advance(f"{skipped} {lost}" if skipped else "")
            check_tokens(row["error"] for row in rows)
    return [journal.rows.get(key) or failed[key] for key in keys]


def _ask(
    chat: Chat, batch: Sequence[int], build: Build, read: Read, asking: Asking, *, stop_at: int,
    kept: Sequence[str | None],
) -> list[Row]:  # fmt: skip
    start = time.monotonic()
    rows: list[Row] = [{} for _ in batch]
    tokens = [0] * len(batch)
    waiting = list(range(len(batch)))
    for attempt in range(asking.attempts):
        if not waiting:
            break
        answers = ask_all(chat, [build(batch[k], attempt, asking.heat(attempt)) for k in waiting])
        if attempt == 0 and len(answers) >= stop_at:
            check_alive(answers, [error for error in READABLE_ERRORS if error in kept])
        for k, answer in zip(waiting, answers, strict=True):
            tokens[k] += answer.tokens
            error, found = (answer.error, {}) if answer.error not in READABLE_ERRORS else read(batch[k], answer)
            rows[k] = {"output": answer.text, "attempts": attempt + 1, "error": error, "tokens": tokens[k], **found}
        waiting = [k for k in waiting if rows[k]["error"] is not None]
        if any(rows[k]["error"] == NO_TOKENS for k in waiting):
            break
    share = round((time.monotonic() - start) / len(batch), 3)
    return [{**row, "seconds": share} for row in rows]
