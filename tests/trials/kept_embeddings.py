"""What kept embeddings cost: writing, looking whether one is there, reading; and two writers of the same files.

    python tests/trials/kept_embeddings.py --out docs/research/trials/kept_embeddings.json

Rows have the shapes of SD3.5's in bfloat16. Two processes write and read the same keys at once; every row that either
reads must be the one that was written.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from origin import origin

from flowrl.pipelines.weights.embedding_cache import EmbeddingCache
from flowrl.runtime.randomness import counter_normal
from flowrl.trajectory import Conditioning

TOKENS, WIDTH, POOLED = 77 + 128, 4096, 2048


def row_of(number: int) -> Conditioning:
    """A row that its number tells from others."""
    shapes = {"embeds": (1, TOKENS, WIDTH), "pooled": (1, POOLED)}
    return Conditioning({name: counter_normal(shape, number, name).bfloat16() for name, shape in shapes.items()})


def milliseconds(work: Callable[[int], Any], count: int) -> float:
    """Wall time of one of so many calls."""
    begun = time.perf_counter()
    for number in range(count):
        work(number)
    return 1000 * (time.perf_counter() - begun) / count


def hammer(folder: str, count: int, rounds: int, wrong: Any) -> None:
    """Writes and reads the same keys again and again; counts rows that are not what was written."""
    torch.set_num_threads(1)
    cache, rows = EmbeddingCache(folder=Path(folder), settings={}), [row_of(number) for number in range(count)]
    for _ in range(rounds):
        for number, row in enumerate(rows):
            key = cache.key(str(number), ())
            cache.write(key, row)
            found = cache.read(key)
            same = found is not None and all(
                torch.equal(found.tensors[name], row.tensors[name]) for name in row.tensors
            )
            with wrong.get_lock():
                wrong.value += not same


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        cache = EmbeddingCache(folder=Path(folder), settings={"encoders": "random"})
        rows = [row_of(number) for number in range(options.count)]
        keys = [cache.key(str(number), ()) for number in range(options.count)]
        result: dict[str, Any] = {
            "rows": options.count,
            "megabytes_of_a_row": round(sum(tensor.nbytes for tensor in rows[0].tensors.values()) / 1e6, 3),
            "milliseconds": {
                "write": round(milliseconds(lambda n: cache.write(keys[n], rows[n]), options.count), 3),
                "look": round(milliseconds(lambda n: cache.has(keys[n]), options.count), 3),
                "read": round(milliseconds(lambda n: cache.read(keys[n]), options.count), 3),
                "key": round(milliseconds(lambda n: cache.key(str(n), ()), options.count), 3),
            },
        }
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        wrong = context.Value("i", 0)
        writers = [context.Process(target=hammer, args=(folder, 10, 20, wrong)) for _ in range(2)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        left = [path for path in Path(folder).glob("*/*") if path.suffix != ".safetensors" or path.name[0] == "."]
        result["two_writers"] = {"writes": 2 * 10 * 20, "wrong_reads": wrong.value, "files_left_over": len(left),
                                 "exit_codes": [writer.exitcode for writer in writers]}  # fmt: skip
    options.out.write_text(json.dumps({"origin": origin(), **result}, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
