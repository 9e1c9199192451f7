"""Prompts of a run: read from files or datasets, put in order, with the images that they are about.

`flowrl.prompts.prompt_files` and `flowrl.prompts.datasets` describe the files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

from torch import Tensor

from flowrl.prompts.datasets import is_dataset, read_dataset
from flowrl.prompts.identity import keys_of
from flowrl.prompts.prompt_files import Prompt as Prompt
from flowrl.prompts.prompt_files import read_file, say_once
from flowrl.prompts.source_images import read_image
from flowrl.runtime.randomness import counter_shuffle
from flowrl.runtime.shapes import Float


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalItem:
    """One image of an evaluation."""

    prompt: Prompt
    """Its row."""
    prompt_id: int
    """Number of the row among the distinct ones."""
    sample: int
    """Number among the images of the same row."""
    key: str = ""
    """Tells the row from the others, see `flowrl.prompts.identity.keys_of`; "" takes what the row asks for."""
    noise: int | None = None
    """Number among the images with one `Prompt.noise_name`; None takes `sample`, the same unless equal texts differ."""


def load_prompts(text: str, negative: str = "", *, resolve: Callable[[str], Path]) -> list[Prompt]:
    """Reads the prompts that a configuration names: a path, an asset or a dataset.

    Args:
        text: a .txt, .jsonl or .csv file, asset:NAME, or dataset:ID_OR_FOLDER[:SPLIT].
        negative: for the rows without a negative prompt of their own.
        resolve: finds the file of a text that names no dataset, `flowrl.config.train.resolve_path`.

    Raises ValueError: see `read_prompts`, or nothing is there.
    """
    return read_prompts(text if is_dataset(text) else resolve(text), negative)


def read_prompts(path: str | Path, negative: str = "") -> list[Prompt]:
    """Reads a prompt file, or the dataset that a text dataset:ID_OR_FOLDER[:SPLIT] names.

    Args:
        path: the file or the text.
        negative: for the rows without a negative prompt of their own.

    Raises ValueError: it cannot be read, is empty, or a row is bad (the images that it names too); says which.
    """
    rows = read_dataset(str(path), negative) if is_dataset(path) else read_file(Path(path), negative)
    named = [(str(row.metadata["id"]), row.metadata) for row in rows if row.metadata.get("id") is not None]
    ids = Counter(name for name, _ in {(name, repr(metadata)) for name, metadata in named})
    if shared := [name for name, count in ids.items() if count > 1]:
        say_once(f"{path}: different rows share an id ({len(shared)}, such as {min(shared)!r}); a reward may mix them")
    return rows


def load_sources(prompt: Prompt) -> list[Float[Tensor, " 3 h w"]]:
    """The images that a prompt's instruction is about, RGB in [0, 1]; the last few read are kept in memory. Raises
    ValueError: an image is damaged or no longer there."""
    return [read_image(path) for path in prompt.sources]


def prompts_of_iteration(total: int, count: int, seed: int, iteration: int) -> list[int]:
    """The prompts of an iteration, from passes over the file, each shuffled. They depend only on (seed, iteration), so
    resumed runs and more processes see the same. It shuffles only as far as needed, however many prompts there are."""
    chosen = []
    for position in range(iteration * count, (iteration + 1) * count):
        drawn, rest = _order(total, seed, position // total)
        drawn += islice(rest, max(0, position % total + 1 - len(drawn)))
        chosen.append(drawn[position % total])
    return chosen


@lru_cache(maxsize=8)  # a pass that ends and one that begins, for each of a few rounds
def _order(total: int, seed: int, number: int) -> tuple[list[int], Iterator[int]]:
    """A pass over the file: the prompts drawn so far, and the rest."""
    return [], counter_shuffle(total, seed, "prompt order", number)


def spread(total: int, count: int) -> list[int]:
    """Up to `count` places spread evenly over a list of `total`: the middles of as many equal pieces."""
    count = min(total, count)
    return [(2 * k + 1) * total // (2 * count) for k in range(count)]


def eval_items(
    rows: Sequence[Prompt], *, num_prompts: int | None = None, samples_per_prompt: int = 1
) -> list[EvalItem]:
    """The images of an evaluation, in file order; equal rows share an id, and their samples are numbered through.
    `num_prompts` rows come evenly from the whole file, which is often sorted by task."""
    places = range(len(rows)) if num_prompts is None else spread(len(rows), num_prompts)
    chosen = [rows[place] for place in places]
    ids: dict[str, int] = {}
    seen: Counter[str] = Counter()  # by key
    drawn: Counter[str] = Counter()  # by name of the noise
    items = []
    for row, key in zip(chosen, keys_of(chosen), strict=True):
        for _ in range(samples_per_prompt):
            number, noise = ids.setdefault(key, len(ids)), drawn[row.noise_name]
            items.append(EvalItem(prompt=row, prompt_id=number, sample=seen[key], key=key, noise=noise))
            seen[key] += 1
            drawn[row.noise_name] += 1
    return items
