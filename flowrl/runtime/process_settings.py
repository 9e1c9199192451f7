"""What libraries read from the environment while they load, set for a process before they do."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping

_SPINS = "3000"
"""Turns, about ten microseconds. GNU's OpenMP waits for some milliseconds in a loop by default; where other work shares
the cores, the thread that is waited for gets none meanwhile. Two threads on two busy cores took 317 s an iteration of
`tiny_nft_reused` with the default and 49 s with this; on idle cores 12.5 s and 12.9 s."""

_QUIET = ("bitsandbytes.backends.cpu.ops",)
"""Loggers that warn of what nobody here misses: a faster kernel for 4-bit weights on a CPU, which a hub would give."""


def before_libraries_load(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets what the user has not; has no effect on libraries that are loaded already."""
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", _SPINS)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)
