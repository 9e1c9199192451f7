"""`flowrl reward score`: values of rewards for a folder of images, as a file and a short table."""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from flowrl.generation.drawing import find_device
from flowrl.generation.folders import ImageFile
from flowrl.generation.image_folder import Scores, check_needs, read_items, score_items
from flowrl.generation.named_rewards import reward_specs
from flowrl.generation.scorers import has_prompts, load_rewards
from flowrl.rendering.terminal_text import COLUMNS, aligned, cut
from flowrl.runtime.files import plain, refuse_foreign, write_atomically
from flowrl.runtime.scrubbing import say as print

EXTREMES = 3  # best and worst files that are named
_SCORES = re.compile(r'\Afile,prompt,[^\n]*,error\n|\A\{"file": [^\n]*, "values": \{[^\n]*, "error": ')
"""The first line of a file that this command wrote."""


def run(parsed: argparse.Namespace) -> int:
    """Scores a folder, writes the file, prints the table.

    Args:
        parsed: the command line.

    Returns:
        0, or 1 where a reward failed on every image.

    Raises:
        ValueError: before weights load for what can be known then: names, options, folder, prompts, file to write.
    """
    specs = reward_specs(parsed.rewards, parsed.option)
    if parsed.out.suffix not in (".csv", ".jsonl"):
        raise ValueError(f"--out {parsed.out}: the file is a .csv or a .jsonl, give it one of these endings.")
    refuse_foreign(parsed.out, own=_SCORES)
    items = read_items(parsed.folder, prompt=parsed.prompt, prompts=parsed.prompts)
    rewards = load_rewards(specs, find_device(parsed.device))
    for key, reward in rewards.items():
        check_needs(reward, items, key=key, prompts_given=has_prompts(items, parsed.prompt))
    found = {key: score_items(reward, items, key=key, batch_size=parsed.batch_size) for key, reward in rewards.items()}
    parsed.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(parsed.out, as_csv(items, found) if parsed.out.suffix == ".csv" else as_jsonl(items, found))
    print(summary(items, found))
    print(f"wrote {parsed.out}")
    return int(any(scores.failed == len(items) for scores in found.values()))


def as_csv(items: Sequence[ImageFile], found: Mapping[str, Scores]) -> str:
    """One line per image: file, prompt, each reward, each part as `reward/part`, and errors; empty where it failed."""
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


def as_jsonl(items: Sequence[ImageFile], found: Mapping[str, Scores]) -> str:
    """One object per image: file, prompt, values by reward, parts by reward, error by reward; null where it failed."""
    lines = []
    for place, item in enumerate(items):
        lines.append(json.dumps(plain({
            "file": item.file, "prompt": item.prompt,
            "values": {key: float(scores.values[place]) for key, scores in found.items()},
            "parts": {key: {name: float(numbers[place]) for name, numbers in scores.parts.items()}
                      for key, scores in found.items()},
            "error": _errors(found, place) or None,
        }), ensure_ascii=False) + "\n")  # fmt: skip
    return "".join(lines)


def _errors(found: Mapping[str, Scores], place: int) -> dict[str, str]:
    return {key: word for key, scores in found.items() if (word := scores.errors[place]) is not None}


def summary(items: Sequence[ImageFile], found: Mapping[str, Scores]) -> str:
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
            lines.append(cut(f"{key}, failed: {', '.join(f'{word} {n}' for word, n in words.most_common())}", COLUMNS))
            lost = [item.file for item, word in zip(items, scores.errors, strict=True) if word is not None]
            lines += [f"  {cut(file, COLUMNS - 2, front=True)}" for file in lost[:EXTREMES]]
        order = [place for place in np.argsort(scores.values, kind="stable").tolist() if scores.errors[place] is None]
        for name, places in (("best", order[::-1][:EXTREMES]), ("worst", order[:EXTREMES])):
            if order:
                lines.append(cut(f"{key}, {name}", COLUMNS))
            lines += [f"  {scores.values[p]:>10.4g}  {cut(items[p].file, COLUMNS - 14, front=True)}" for p in places]
    return "\n".join(lines)
