"""What libraries read from the environment while they load, set for a process before they do; the cores it may use."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

from flowrl.runtime.private_names import NOTES

_SPINS = "3000"
"""Turns, about ten microseconds. GNU's OpenMP waits for some milliseconds in a loop by default; where other work shares
the cores, the thread that is waited for gets none meanwhile. Two threads on two busy cores took 317 s an iteration of
`tiny_nft_reused` with the default and 49 s with this; on idle cores 12.5 s and 12.9 s."""

_QUIET = "bitsandbytes.backends.cpu.ops"
"""The logger that warns of what nobody here misses: a faster kernel for 4-bit weights on a CPU, from a hub."""

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""What torch's allocator of CUDA memory is told by, under its name of today and its former one. Segments that grow fit
what is asked for, whichever stream asks: without them blocks that were cached while rewards were computed are of no use
to the update, and the device runs out of memory that it has."""


def usable_cores() -> int:
    """Cores that this process may use: a scheduler or a container may give it fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def before_libraries_load(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets what the user has not; has no effect on libraries that are loaded already."""
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not any(name in environment for name in _ALLOCATOR):
        environment[_ALLOCATOR[0]] = "expandable_segments:True"
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", _SPINS)
    _without_notes()
    # PEFT, diffusers and transformers import it for names seldom asked; it takes a fifth of a training's start.
    if "bitsandbytes" not in sys.modules and (spec := importlib.util.find_spec("bitsandbytes")) is not None:
        sys.modules[spec.name] = stand_in(spec.name, {"__spec__": spec})


@cache
def _without_notes() -> None:
    def filter_of(words: str) -> Callable[[logging.LogRecord], bool]:
        return lambda record: words not in record.getMessage()

    logging.getLogger(_QUIET).setLevel(logging.ERROR)
    for name, words in NOTES.items():
        logging.getLogger(name).addFilter(filter_of(words))


def stand_in(name: str, known: Mapping[str, Any]) -> ModuleType:
    """Stands for a module with some of its names. Others import all of it, and its parts do if it has a `__spec__`."""
    module = ModuleType(name)

    def whole(asked: str) -> Any:
        for_a_part = asked == "__path__" and "__spec__" in known
        if asked.startswith("__") and not for_a_part:  # by those who look through all modules
            raise AttributeError(asked)
        if sys.modules.get(name) is module:
            del sys.modules[name]
        return getattr(importlib.import_module(name), asked)

    vars(module).update(known, __getattr__=whole)
    return module


def take_deterministic_kernels() -> None:
    """From now on torch takes only kernels that give the same bits for the same input, or raises a RuntimeError that
    names the one that cannot. Comes before cuBLAS's first call, which reads how much memory it may work in (NVIDIA,
    cuBLAS, "Results reproducibility")."""
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


@contextmanager
def deterministic_kernels(wanted: bool) -> Iterator[None]:
    """Inside, kernels are those of `take_deterministic_kernels`, where that is wanted."""
    import torch

    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if wanted:
        take_deterministic_kernels()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
