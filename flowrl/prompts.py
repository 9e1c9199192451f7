"""Prompt files: text (a prompt a line) or JSONL (an object a line with `prompt`; the whole object is its metadata)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.randomness import counter_choice


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One row of a prompt file."""

    text: str
    metadata: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalItem:
    """One image of an evaluation: which prompt, and the number of the sample among those of the same prompt."""

    prompt: Prompt
    prompt_id: int
    sample: int


def read_prompts(path: Path) -> list[Prompt]:
    """Reads a prompt file; blank lines are skipped.

    Raises:
        ValueError: the file cannot be read, is empty, or a line is bad; names file and line.
    """
    if path.suffix not in (".txt", ".jsonl"):
        raise ValueError(
            f"{path}: prompts come from .txt (a prompt a line) or .jsonl (an object a line), not {path.suffix}"
        )
    try:
        # Not splitlines, which also cuts at characters such as U+2028 that JSON strings may hold; -sig skips a BOM.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as UTF-8 text ({error})") from error
    rows = [
        _parse_json(path, number, line) if path.suffix == ".jsonl" else Prompt(text=line.strip(), metadata={})
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not rows:
        raise ValueError(f"{path}: holds no prompt")
    return rows


def _parse_json(path: Path, number: int, line: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: no valid JSON ({error.msg} at column {error.colno})") from error
    text = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{path}, line {number}: needs an object with a non-empty string under 'prompt'")
    return Prompt(text=text, metadata=row)


def prompts_of_iteration(total: int, count: int, seed: int, iteration: int) -> list[int]:
    """Which prompts an iteration trains on: passes over the file in an order shuffled anew each pass.

    A function of (seed, iteration) alone, so that a resumed run, or one on more processes, sees the same.
    """
    positions = range(iteration * count, (iteration + 1) * count)
    orders = {p // total: counter_choice(total, total, seed, "prompt order", p // total) for p in positions}
    return [orders[p // total][p % total] for p in positions]


def spread(total: int, count: int) -> list[int]:
    """Up to `count` places spread evenly over a list of `total`: the middles of as many equal pieces."""
    count = min(total, count)
    return [(2 * k + 1) * total // (2 * count) for k in range(count)]


def eval_items(
    rows: Sequence[Prompt], *, num_prompts: int | None = None, samples_per_prompt: int = 1
) -> list[EvalItem]:
    """The images of an evaluation, in file order; rows with one prompt text share an id and count up their samples.

    `num_prompts` rows are taken evenly from the whole file, which is often sorted by task.
    """
    chosen = range(len(rows)) if num_prompts is None else spread(len(rows), num_prompts)
    ids: dict[str, int] = {}
    seen: Counter[int] = Counter()
    items = []
    for row in (rows[place] for place in chosen):
        prompt_id = ids.setdefault(row.text, len(ids))
        for _ in range(samples_per_prompt):
            items.append(EvalItem(prompt=row, prompt_id=prompt_id, sample=seen[prompt_id]))
            seen[prompt_id] += 1
    return items
