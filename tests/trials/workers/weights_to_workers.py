"""How long weights take from the learner to two workers of the same machine: in memory that both map, as runs send them
there, and bundle by bundle through Ray's object store, as they go to other machines.

    python tests/trials/workers/weights_to_workers.py --out docs/research/trials/weights_to_workers.json

What is timed is an update on a CPU, digests included: from tensors of the learner to tensors of two workers that have
been overwritten with them. The middle of some updates, without the first.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from origin import origin
from torch import Tensor

from flowrl.pipelines.weights.trained_weights import Held
from flowrl.runtime.cluster import connect, disconnect
from flowrl.workers.parcels import Shard, SharedBytes, lay_down, read

WORKERS = 2


def tensors_of(mebibytes: int) -> dict[str, Tensor]:
    """Float32 tensors of a MiB each."""
    return {f"layer_{number}": torch.randn(512, 512) for number in range(mebibytes)}


class Holder:
    """A worker's tensors."""

    def __init__(self, mebibytes: int) -> None:
        torch.set_num_threads(1)
        self.own = tensors_of(mebibytes)

    def take(self, part: Shard) -> float:
        """Overwrites them; a number of the result."""
        read([part], self.own)
        return float(self.own["layer_0"][0, 0])


def middle(
    mebibytes: int, times: int, sent: Callable[[Mapping[str, Held], Callable[[Any], Any]], Shard]
) -> dict[str, float]:
    """Median milliseconds of an update, and of them those until the learner may go on."""
    import ray

    made: Any = ray.remote(num_cpus=1)(Holder)
    holders, tensors = [made.remote(mebibytes) for _ in range(WORKERS)], tensors_of(mebibytes)
    held = {name: Held(values=one, dtype=one.dtype, shape=tuple(one.shape)) for name, one in tensors.items()}
    found, laid = list[float](), list[float]()
    for _ in range(times + 1):
        tensors["layer_0"].add_(1)
        begun = time.perf_counter()
        part = sent(held, ray.put)
        laid.append(1000 * (time.perf_counter() - begun))
        got = ray.get([holder.take.remote(part) for holder in holders])
        found.append(1000 * (time.perf_counter() - begun))
        assert got == [float(tensors["layer_0"][0, 0])] * WORKERS
    for holder in holders:
        ray.kill(holder)
    return {"all_ms": round(median(found[1:]), 1), "learner_ms": round(median(laid[1:]), 1)}


def by_memory(spare: list[SharedBytes]) -> Callable[[Mapping[str, Held], Callable[[Any], Any]], Shard]:
    """Laid down in the same memory again and again, as a run without staleness does."""

    def sent(weights: Mapping[str, Held], put: Callable[[Any], Any]) -> Shard:
        part, memory = lay_down(weights, spare, put)
        assert memory is not None
        spare.append(memory)
        return part

    return sent


def by_ray(weights: Mapping[str, Held], put: Callable[[Any], Any]) -> Shard:
    """Laid down, and put into the object store from there."""
    part, memory = lay_down(weights, [], put)
    sent = part.by_ray(put)
    assert memory is not None  # which the part lies in until it is sent
    return sent


def main() -> None:
    """Writes the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64, 256], help="MiB of the weights")
    parser.add_argument("--times", type=int, default=15)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    connect(None, workers=WORKERS)
    try:
        rows = [
            {"MiB": size, "memory": middle(size, asked.times, by_memory([])), "ray": middle(size, asked.times, by_ray)}
            for size in asked.sizes
        ]
    finally:
        disconnect()
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps({"origin": origin(), "workers": WORKERS, "times": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
