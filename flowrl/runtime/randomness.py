"""Randomness as a function of counters.

Every random number of a run is named by a tuple such as `(seed, "step", iteration, group, sample, step)`. Nothing here
keeps a state between calls and nothing touches a global generator, so that a run resumed anywhere, or a single image
drawn again years later, sees the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from flowrl.runtime.shapes import Float

Part = int | str


def counter_seed(*parts: Part) -> int:
    """Hash a tuple of counters to a seed.

    The parts are written one after another as (kind, length, content), so no two different tuples are written alike:
    `(1, 23)`, `(12, 3)`, `("1", 23)` and `("123",)` give unrelated seeds. The hash is blake2b, the same on every
    platform and in every Python version, unlike `hash`.

    Args:
        *parts: Integers of any size or sign, or strings; at least one.

    Returns an integer in [0, 2^63).

    Raises:
        ValueError: no part was given.
        TypeError: a part is neither an int nor a str (a bool is refused: True would be read as 1).
    """
    if not parts:
        raise ValueError("a counter needs at least one part, for instance (seed, iteration, sample): none was given")
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, int | str):
            raise TypeError(f"counter parts are int or str, got {part!r} of {type(part).__name__}: convert it first")
        kind, content = (b"s", part.encode()) if isinstance(part, str) else (b"i", str(part).encode())
        digest.update(kind + len(content).to_bytes(8, "little") + content)
    return int.from_bytes(digest.digest(), "little") >> 1


def counter_normal(shape: Sequence[int], *parts: Part) -> Float[Tensor, " *shape"]:
    """Draw standard normals that depend on the counters alone.

    Drawn on the CPU in float32, so that machines agree; move the result yourself. PyTorch's CPU generator takes in the
    low 32 bits of a seed only, so two counters share numbers with probability 2^-32.

    Args:
        *parts: The counters, see `counter_seed`.
    """
    generator = torch.Generator(device="cpu").manual_seed(counter_seed(*parts))
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32)


def sample_normals(shape: Sequence[int], keys: Sequence[tuple[Part, ...]]) -> Float[Tensor, " b *shape"]:
    """Draw one standard normal tensor per sample, each from its own tuple of counters in `keys`, so that its numbers do
    not depend on who else is in the batch. Raises ValueError: `keys` is empty."""
    if not keys:
        raise ValueError("sample_normals needs one key per sample, got none: pass at least one tuple of counters")
    return torch.stack([counter_normal(shape, *key) for key in keys])


def counter_integers(low: int, high: int, *parts: Part) -> int:
    """Draw one integer, uniform in [low, high), from the counters. Raises ValueError: the range is empty."""
    if high <= low:
        raise ValueError(f"the range [{low}, {high}) holds no integer: high must be greater than low")
    # The remainder of 63 random bits is uneven by at most (high - low) / 2^63, far below anything measurable.
    return low + counter_seed("integers", *parts) % (high - low)


def counter_choice(n: int, k: int, *parts: Part) -> tuple[int, ...]:
    """Draw k distinct integers of 0 .. n-1 in random order; k = n gives a permutation.

    The first k swaps of a Fisher-Yates shuffle, each with its own counter, so those for k begin those for k + 1.

    Raises ValueError: k is negative or greater than n.
    """
    if not 0 <= k <= n:
        raise ValueError(f"cannot choose {k} distinct integers of {n}: k must lie in 0 .. {n}")
    return tuple(islice(counter_shuffle(n, *parts), k))


def counter_shuffle(n: int, *parts: Part) -> Iterator[int]:
    """The permutation that `counter_choice` gives for k = n, one number after another; each costs the same."""
    moved: dict[int, int] = {}  # only places ahead that a swap has changed, so k of a large n costs k
    for position in range(n):
        other = counter_integers(position, n, "choice", position, *parts)
        yield moved.get(other, other)
        moved[other] = moved.get(position, position)
        moved.pop(position, None)
