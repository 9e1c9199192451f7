"""`flowrl reward score`: values of rewards for a folder of images, as a file and a short table."""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from flowrl.files import write_atomically
from flowrl.generation.image_folder import Item, Scores, check_needs, read_items, reward_specs, score_items
from flowrl.rewards import Reward
from flowrl.rewards.compose import build_weighted_sum
from flowrl.rewards.specs import validate_reward_specs

COLUMNS = 80
EXTREMES = 3  # best and worst files that are named


def score(parsed: argparse.Namespace) -> int:
    """Scores a folder, writes the file, prints the table.

    Args:
        parsed: as `flowrl.commands.reward.arguments.add_score`.

    Returns:
        0, or 1 where a reward failed on every image.

    Raises:
        ValueError: before weights load for what can be known then: names, options, folder, prompts, file to write.
    """
    specs = reward_specs(parsed.rewards, parsed.option)
    if parsed.out.suffix not in (".csv", ".jsonl"):
        raise ValueError(f"--out {parsed.out}: the file is a .csv or a .jsonl, give it one of these endings.")
    check_batch_size(parsed.batch_size)
    items = read_items(parsed.folder, prompt=parsed.prompt, prompts=parsed.prompts)
    rewards = load_rewards(specs, parsed.device)
    for key, reward in rewards.items():
        check_needs(reward, items, key=key, prompts_given=has_prompts(items, parsed.prompt))
    found = {key: score_items(reward, items, key=key, batch_size=parsed.batch_size) for key, reward in rewards.items()}
    parsed.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(parsed.out, as_csv(items, found) if parsed.out.suffix == ".csv" else as_jsonl(items, found))
    print(summary(items, found))
    print(f"wrote {parsed.out}")
    return int(any(scores.failed == len(items) for scores in found.values()))


def load_rewards(specs: Sequence[Mapping[str, Any]], device: str | None) -> dict[str, Reward]:
    """Checked and built rewards by key, on the device asked for or the best there is."""
    validate_reward_specs(specs)
    terms = build_weighted_sum(specs, device=device or ("cuda" if torch.cuda.is_available() else "cpu")).terms
    return {term.key: term.reward for term in terms}


def check_batch_size(batch_size: int) -> None:
    """Refuses a batch without images."""
    if batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, got {batch_size}.")


def has_prompts(items: Sequence[Item], prompt: str | None) -> bool:
    """Whether prompts were given; `--prompt ""` gives the empty one on purpose."""
    return prompt is not None or any(item.prompt for item in items)


def as_csv(items: Sequence[Item], found: Mapping[str, Scores]) -> str:
    """A line an image: file, prompt, each reward, each part as `reward/part`, and errors; empty where it failed."""
    columns = {
        name: numbers
        for key, scores in found.items()
        for name, numbers in ((key, scores.values), *((f"{key}/{part}", n) for part, n in scores.parts.items()))
    }
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["file", "prompt", *columns, "error"])
    for place, item in enumerate(items):
        errors = "; ".join(f"{key}: {word}" for key, word in _errors(found, place).items())
        numbers = ["" if math.isnan(n[place]) else f"{n[place]:.9g}" for n in columns.values()]
        writer.writerow([item.file, item.prompt, *numbers, errors])
    return stream.getvalue()


def as_jsonl(items: Sequence[Item], found: Mapping[str, Scores]) -> str:
    """An object an image: file, prompt, values by reward, parts by reward, error by reward; null where it failed."""
    lines = []
    for place, item in enumerate(items):
        lines.append(json.dumps({
            "file": item.file, "prompt": item.prompt,
            "values": {key: _known(scores.values[place]) for key, scores in found.items()},
            "parts": {key: {name: _known(numbers[place]) for name, numbers in scores.parts.items()}
                      for key, scores in found.items()},
            "error": _errors(found, place) or None,
        }, ensure_ascii=False) + "\n")  # fmt: skip
    return "".join(lines)


def _errors(found: Mapping[str, Scores], place: int) -> dict[str, str]:
    return {key: word for key, scores in found.items() if (word := scores.errors[place]) is not None}


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def summary(items: Sequence[Item], found: Mapping[str, Scores]) -> str:
    """Mean, standard deviation and failures of each reward, then its best and worst files; 80 columns at most."""
    rows = []
    for key, scores in found.items():
        known = scores.values[~np.isnan(scores.values)]
        spread = f"{known.std(ddof=1):.4g}" if len(known) > 1 else "-"
        extremes = [f"{known.min():.4g}", f"{known.max():.4g}"] if len(known) else ["-", "-"]
        mean = f"{known.mean():.4g}" if len(known) else "-"
        rows.append([key, mean, spread, *extremes, str(len(items)), str(scores.failed)])
    lines = [aligned(["reward", "mean", "std", "lowest", "highest", "images", "invalid"], rows)]
    for key, scores in found.items():
        if scores.failed:
            words = Counter(word for word in scores.errors if word is not None)
            told = ", ".join(f"{word} {count}" for word, count in words.most_common())
            lines.append(cut(f"{key}, failed: {told}", COLUMNS))
        order = [place for place in np.argsort(scores.values, kind="stable").tolist() if scores.errors[place] is None]
        for name, places in (("best", order[::-1][:EXTREMES]), ("worst", order[:EXTREMES])):
            if order:
                lines.append(cut(f"{key}, {name}", COLUMNS))
            lines += [f"  {scores.values[p]:>10.4g}  {cut(items[p].file, COLUMNS - 14, front=True)}" for p in places]
    return "\n".join(lines)


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]], columns: int = COLUMNS) -> str:
    """Columns apart by two blanks, numbers to the right; the first column is cut where the whole is too wide."""
    widths = [max(len(row[k]) for row in [head, *rows]) for k in range(len(head))]
    widths[0] = max(8, min(widths[0], columns - sum(widths[1:]) - 2 * (len(widths) - 1)))
    return "\n".join(
        "  ".join(
            [f"{cut(row[0], widths[0]):<{widths[0]}}", *(f"{c:>{w}}" for c, w in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in [head, *rows]
    )


def cut(text: str, width: int, *, front: bool = False) -> str:
    """A text of at most `width` characters; what is left out, at the end or in front, becomes an ellipsis."""
    if len(text) <= width:
        return text
    return "\u2026" + text[len(text) - width + 1 :] if front else text[: width - 1] + "\u2026"
