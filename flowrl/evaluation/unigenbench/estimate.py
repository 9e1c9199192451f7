"""What an evaluation by a judge will take: calls, tokens and time, before anything is drawn or asked.

Where the journal already holds answers of this judge, their means are used; else rough constants, which are told.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from flowrl.benchmarks.unigenbench.items import Item
from flowrl.evaluation.benchmark import Result
from flowrl.evaluation.unigenbench.wording import Wording
from flowrl.generation.subject import Settings
from flowrl.media.reading import image_size
from flowrl.rendering.markup import duration, plural
from flowrl.rendering.terminal_text import Table
from flowrl.runtime.journal import Journal, Row

PIXELS_PER_TOKEN = 28 * 28  # of the vision towers of Qwen2.5-VL; others are near
SIDE = 1024  # of an image whose size is not known
ANSWER_BASE, ANSWER_PER_POINT = 60, 45  # tokens besides the repeated text
SECONDS = 10.0  # of one answer, where none was measured
CONCURRENCY = 64  # requests at a time where the judge does not say, as in `flowrl.rewards.judges.server_chat`


def estimate_of(settings: Settings, plan: Any) -> Result:
    """The estimate as a result without scores."""
    subjects, items = settings.subjects, plan.items
    answered = [_answered(subject.folder, plan.identity) for subject in subjects]
    rows = [row for part in answered for row in part]
    calls = sum(max(len(items) * settings.samples - len(part), 0) for part in answered)
    pixels = _pixels(settings)
    at_once = int(plan.judge.get("concurrency", CONCURRENCY)) if "server" in plan.judge else 1
    measured = [row["tokens"] for row in rows if row["tokens"]]
    tokens = fmean(measured or [_tokens_of(item, plan.wording, pixels, plan.asking.max_tokens) for item in items])
    seconds = calls * fmean(row["seconds"] for row in rows) if rows else SECONDS * math.ceil(calls / at_once)
    how = (
        f"measured on {plural(len(rows), 'answer')} in the journal"
        if rows
        else f"guessed: {SECONDS:g} s per answer, as many at a time as the judge takes, images of "
        f"{pixels / 1e6:.2g} million pixels at {PIXELS_PER_TOKEN} per token, {ANSWER_PER_POINT} tokens per test point"
    )
    total = calls * tokens
    table = Table(
        title="Estimate",
        head=("", "number"),
        rows=(
            ("prompts", str(len(items))),
            ("images", str(len(items) * settings.samples * len(subjects))),
            ("test points", str(sum(len(item.points) for item in items) * settings.samples * len(subjects))),
            ("calls to come", str(calls)),
            ("tokens, thousands", f"{total / 1000:.0f}"),
            ("time of the judge", duration(seconds)),
        ),
        note=f"Tokens and seconds of a call are {how}. Repeated tries and the drawing of images are not counted.",
    )
    return Result(
        headline=f"A dry run: {plural(calls, 'call')} to {plan.judge['model']}, about {total / 1e6:.2g} million tokens "
        f"and {duration(seconds)}. Nothing was drawn or asked.",
        rows=(),
        metrics={f"eval/{settings.benchmark}/calls": float(calls)},
        tables=(table,),
        notes=(*plan.file.repairs, *plan.file.differences),
        facts={"calls": calls, "tokens_per_call": round(tokens, 1), "seconds": round(seconds, 3)},
    )


def _tokens_of(item: Item, wording: Wording, pixels: float, max_tokens: int) -> float:
    """A guess of the tokens of a question and its answer."""
    blank = np.zeros((1, 1, 3), dtype=np.uint8)
    question = wording.question(item, blank, max_tokens=1, temperature=0.0, seed=0)
    asked = sum(_text_tokens(part) for part in (question.system, *question.parts) if isinstance(part, str))
    repeated = _text_tokens(item.prompt) + _text_tokens(str(list(item.points)))
    answered = ANSWER_BASE + repeated + ANSWER_PER_POINT * len(item.points)
    return asked + pixels / PIXELS_PER_TOKEN + min(answered, max_tokens)


def _text_tokens(text: str) -> float:
    """A guess of a text's tokens: a quarter of its Latin characters, and two thirds of the others."""
    latin = sum(character.isascii() for character in text)
    return latin / 4 + (len(text) - latin) * 2 / 3


def _answered(folder: Path, identity: Mapping[str, Any]) -> list[Row]:
    """Rows of the journal that is there; a dry run starts none."""
    for path in sorted(folder.glob("journal-*.jsonl")):
        with path.open(encoding="utf-8") as file:
            head = file.readline()
        if head.endswith("\n") and json.loads(head) == {"identity": json.loads(json.dumps(dict(identity)))}:
            with Journal(folder, identity) as journal:
                return list(journal.rows.values())
    return []


def _pixels(settings: Settings) -> float:
    """Of an image, where its size can be known."""
    images, source = settings.subject.images, settings.subject.source
    first = None if images is None else next(iter(sorted(images.rglob("*.png"))), None)
    if first is not None:
        return float(math.prod(image_size(first)))
    height, width = (source.options.get(side) if source is not None else None for side in ("height", "width"))
    return float(height * width) if height and width else float(SIDE * SIDE)
