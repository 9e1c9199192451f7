"""How long weights take from the learner to two workers on the same machine: through Ray's object store, as runs send
them, and through shared memory of torch's own (`torch.Tensor.share_memory_`), whose handle is sent.

    python tests/trials/workers/weights_to_workers.py --out docs/research/trials/weights_to_workers.json

Ray keeps objects of one machine in shared memory itself. What is timed is an update of LoRA-like tensors on a CPU: from
tensors of the learner to tensors of two workers that have been overwritten with them. The middle of some updates.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from origin import origin
from torch import Tensor

from flowrl.runtime.cluster import connect, disconnect
from flowrl.workers.ray_backend import _bytes_of, _tensor_of

WORKERS = 2


def tensors_of(mebibytes: int) -> dict[str, Tensor]:
    """Float32 tensors of a MiB each."""
    return {f"layer_{number}": torch.randn(512, 512) for number in range(mebibytes)}


def timed(update: Callable[[], None], times: int) -> float:
    """Median milliseconds of an update."""
    found = []
    for _ in range(times + 1):
        begun = time.perf_counter()
        update()
        found.append(1000 * (time.perf_counter() - begun))
    return round(median(found[1:]), 2)


class Holder:
    """A worker's tensors."""

    def __init__(self, mebibytes: int) -> None:
        import ray

        ray.util.register_serializer(torch.Tensor, serializer=_bytes_of, deserializer=_tensor_of)
        self.own = tensors_of(mebibytes)

    def take(self, references: list[Any]) -> float:
        """Overwrites them; a number of the result."""
        import ray

        for name, tensor in ray.get(references[0]).items():
            self.own[name].copy_(tensor)
        return float(self.own["layer_0"][0, 0])


def by_ray(mebibytes: int, times: int) -> float:
    """Milliseconds through the object store."""
    import ray

    ray.util.register_serializer(torch.Tensor, serializer=_bytes_of, deserializer=_tensor_of)
    made: Any = ray.remote(num_cpus=1)(Holder)
    holders, tensors = [made.remote(mebibytes) for _ in range(WORKERS)], tensors_of(mebibytes)

    def update() -> None:
        tensors["layer_0"].add_(1)
        kept = ray.put(tensors)
        found = ray.get([holder.take.remote([kept]) for holder in holders])
        assert found == [float(tensors["layer_0"][0, 0])] * WORKERS

    milliseconds = timed(update, times)
    for holder in holders:
        ray.kill(holder)
    return milliseconds


def hold(link: Any, shared: dict[str, Tensor]) -> None:
    """A process that overwrites its tensors with the shared ones whenever it is told."""
    torch.set_num_threads(1)
    own = {name: torch.empty_like(tensor) for name, tensor in shared.items()}
    while link.recv():
        for name, tensor in shared.items():
            own[name].copy_(tensor)
        link.send(float(own["layer_0"][0, 0]))


def by_shared_memory(mebibytes: int, times: int) -> float:
    """Milliseconds through memory that was shared once; the learner writes into it."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    context = torch.multiprocessing.get_context("spawn")
    tensors = tensors_of(mebibytes)
    shared = {name: tensor.clone().share_memory_() for name, tensor in tensors.items()}
    links, processes = [], []
    for _ in range(WORKERS):
        here, there = multiprocessing.Pipe()
        process = context.Process(target=hold, args=(there, shared), daemon=True)
        process.start()
        links.append(here)
        processes.append(process)

    def update() -> None:
        tensors["layer_0"].add_(1)
        for name, tensor in tensors.items():
            shared[name].copy_(tensor)
        for link in links:
            link.send(True)
        assert [link.recv() for link in links] == [float(tensors["layer_0"][0, 0])] * WORKERS

    milliseconds = timed(update, times)
    for link, process in zip(links, processes, strict=True):
        link.send(False)
        process.join()
    return milliseconds


def main() -> None:
    """Writes the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64, 256], help="MiB of the weights")
    parser.add_argument("--times", type=int, default=15)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    shared = {size: by_shared_memory(size, asked.times) for size in asked.sizes}
    connect(None, workers=WORKERS)
    try:
        rays = {size: by_ray(size, asked.times) for size in asked.sizes}
    finally:
        disconnect()
    rows = [{"MiB": size, "ray_ms": rays[size], "shared_memory_ms": shared[size]} for size in asked.sizes]
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps({"origin": origin(), "workers": WORKERS, "times": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
