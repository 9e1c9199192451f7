"""One of two processes that `flowrl doctor` starts; they add numbers a few times, and the first prints milliseconds.

python -m flowrl.health.process_probe BACKEND FILE RANK
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

_TIMES, _NUMBERS, _SECONDS = 10, 1000, 60


def meet(backend: str, file: str, rank: int) -> float:
    """Milliseconds of one sum over both processes. Raises RuntimeError: they do not meet, or the sum is wrong."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=f"file://{file}", rank=rank, world_size=2, timeout=timedelta(seconds=_SECONDS)
    )
    try:
        begun = time.perf_counter()
        for _ in range(_TIMES):
            numbers = torch.full((_NUMBERS,), rank + 1.0, device=device)
            dist.all_reduce(numbers)
            if not bool((numbers == 3).all()):
                raise RuntimeError("a sum over two processes is wrong")
        return 1000 * (time.perf_counter() - begun) / _TIMES
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    print(meet(sys.argv[1], sys.argv[2], int(sys.argv[3])))
