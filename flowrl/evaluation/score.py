"""Values of rewards for a folder of images, as a file and a short table: `flowrl.score`."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flowrl.config.bounds import check_counts
from flowrl.generation.drawing import find_device
from flowrl.generation.folders import ImageFile
from flowrl.generation.image_folder import ItemScores, check_needs, read_items, score_items
from flowrl.generation.named_rewards import reward_specs
from flowrl.generation.scorers import has_prompts, load_rewards
from flowrl.rendering.terminal_text import COLUMNS, align, cut
from flowrl.runtime.files import plain, refuse_foreign, write_atomically
from flowrl.runtime.public import public

__all__ = ["FolderScores", "score"]

EXTREMES = 3  # best and worst files that are named
_SCORES = re.compile(r'\Afile,prompt,[^\n]*,error\n|\A\{"file": [^\n]*, "values": \{[^\n]*, "error": ')
"""The first line of a file that this function wrote."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FolderScores:
    """The scores of a folder's images."""

    images: tuple[ImageFile, ...] = field(repr=False)
    """The images in order, with prompts and records."""
    scores: Mapping[str, ItemScores] = field(repr=False)
    """Reward -> values, parts and errors of all images."""
    file: Path | None
    """The written file, if any."""
    text: str = field(repr=False)
    """Mean, spread, failures, best and worst files, for a terminal."""

    @property
    def failed(self) -> tuple[str, ...]:
        """Rewards that failed on every image."""
        return tuple(name for name, scores in self.scores.items() if scores.failed == len(self.images))


@public
def score(
    rewards: str | Path | Sequence[str], folder: str | Path, *, options: Mapping[str, object] | None = None,
    prompt: str | None = None, prompts: str | Path | None = None, out: str | Path | None = None, batch_size: int = 16,
    device: str | None = None, show: bool = True,
) -> FolderScores:  # fmt: skip
    """Scores the images of a folder.

    Args:
        rewards: names of rewards, FILE.py:FUNCTION, or a YAML file with a list of them.
        folder: a folder of images, in any layout; GenEval's is read as such.
        options: options of the reward; with several rewards, keys are `NAME.KEY`.
        prompt: the prompt of all images.
        prompts: .txt with one line per image, in the order of their names, 2.png before 10.png; .jsonl with file,
            prompt and metadata.
        out: .csv or .jsonl file to write; None writes none.
        batch_size: images scored at once.
        device: "cpu", "cuda" or "cuda:N".
        show: show progress.

    Raises:
        FlowrlError: an argument is wrong; names, options, folder, prompts and file are checked before weights load.
    """
    check_counts(batch_size=batch_size)
    names = str(rewards) if isinstance(rewards, str | Path) else ",".join(rewards)
    specs = reward_specs(names, [f"{key}={value}" for key, value in (options or {}).items()])
    file = None if out is None else Path(out)
    if file is not None:
        if file.suffix not in (".csv", ".jsonl"):
            raise ValueError(f"`out` {file}: the file is a .csv or a .jsonl, give it one of these endings.")
        refuse_foreign(file, own=_SCORES)
    items = read_items(Path(folder), prompt=prompt, prompts=prompts)
    loaded = load_rewards(specs, find_device(device))
    for key, reward in loaded.items():
        check_needs(reward, items, key=key, prompts_given=has_prompts(items, prompt))
    found = {key: score_items(reward, items, key=key, batch_size=batch_size) for key, reward in loaded.items()}
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, as_csv(items, found) if file.suffix == ".csv" else as_jsonl(items, found))
    return FolderScores(images=tuple(items), scores=found, file=file, text=summary(items, found))


def as_csv(items: Sequence[ImageFile], found: Mapping[str, ItemScores]) -> str:
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


def as_jsonl(items: Sequence[ImageFile], found: Mapping[str, ItemScores]) -> str:
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


def _errors(found: Mapping[str, ItemScores], place: int) -> dict[str, str]:
    return {key: word for key, scores in found.items() if (word := scores.errors[place]) is not None}


def summary(items: Sequence[ImageFile], found: Mapping[str, ItemScores]) -> str:
    """Mean, standard deviation and failures of each reward, then its best and worst files; 80 columns at most."""
    rows, lines = [], []
    for key, scores in found.items():
        known = scores.values[~np.isnan(scores.values)]
        numbers = ["-"] * 4
        if len(known):
            spread = f"{known.std(ddof=1):.4g}" if len(known) > 1 else "-"
            numbers = [f"{known.mean():.4g}", spread, f"{known.min():.4g}", f"{known.max():.4g}"]
        rows.append([key, *numbers, str(len(items)), str(scores.failed)])
        if scores.failed:
            words = Counter(word for word in scores.errors if word is not None)
            lines.append(cut(f"{key}, failed: {', '.join(f'{word} {n}' for word, n in words.most_common())}", COLUMNS))
            lost = [item.file for item, word in zip(items, scores.errors, strict=True) if word is not None]
            lines += [f"  {cut(file, COLUMNS - 2, front=True)}" for file in lost[:EXTREMES]]
        order = [place for place in np.argsort(scores.values, kind="stable").tolist() if scores.errors[place] is None]
        for name, places in (("best", order[::-1][:EXTREMES]), ("worst", order[:EXTREMES])) if order else ():
            lines.append(cut(f"{key}, {name}", COLUMNS))
            lines += [f"  {scores.values[p]:>10.4g}  {cut(items[p].file, COLUMNS - 14, front=True)}" for p in places]
    return "\n".join([align(["reward", "mean", "std", "lowest", "highest", "images", "invalid"], rows), *lines])
