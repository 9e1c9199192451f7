"""What a launcher (torchrun, accelerate, srun with the same variables) tells this process about the others."""

from __future__ import annotations

import os
from dataclasses import dataclass

_HOW = (
    "torchrun and 'accelerate launch' set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for every process; "
    "without a launcher unset them all to train with one process"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """A process among several: its number, how many there are, and the address of process 0."""

    rank: int
    world: int
    address: str
    port: int


def num_launched() -> int:
    """Number of the run's processes, from the launcher's variables. Raises ValueError: as `launched`."""
    found = launched()
    return 1 if found is None else found.world


def launched() -> Launched | None:
    """What the launcher's variables say; None for a single process. Raises ValueError: a variable is missing or makes
    no sense; names it, its value and who sets it."""
    world, rank = _whole("WORLD_SIZE", 1), _whole("RANK", 0)
    if world < 1:
        raise ValueError(f"the environment has WORLD_SIZE={world}, and a run has at least one process: {_HOW}")
    if not 0 <= rank < world:
        raise ValueError(
            f"the environment has RANK={rank} and WORLD_SIZE={os.environ.get('WORLD_SIZE') or 'unset'}, and ranks are "
            f"0 to WORLD_SIZE - 1: {_HOW}"
        )
    if world == 1:
        return None
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ValueError(f"the environment has WORLD_SIZE={world} but no {' and no '.join(missing)}: {_HOW}")
    if not 0 < (port := _whole("MASTER_PORT", 0)) < 2**16:
        raise ValueError(f"the environment has MASTER_PORT={port}, and ports are 1 to 65535: {_HOW}")
    return Launched(rank=rank, world=world, address=os.environ["MASTER_ADDR"], port=port)


def _whole(name: str, default: int) -> int:
    text = os.environ.get(name, "").strip()
    try:
        return int(text) if text else default
    except ValueError:
        raise ValueError(f"the environment has {name}={text!r}, which is not a whole number: {_HOW}") from None
