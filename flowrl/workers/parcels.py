"""Weights on their way to workers: a version is laid down once, in bundles that a worker takes one after another.

| where a worker is | how bundles reach it |
|---|---|
| on the learner's machine | in memory that both map. It has no name: it is gone when all who have it open have ended |
| elsewhere, or the machine has no such memory left | through Ray, by references |

A bundle has at most `BUNDLE` bytes, so that neither side holds a version twice. Of weights that are split over learners
each lays down what it holds, and a worker takes the parts of all. A bundle whose digest does not fit is refused.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowrl.pipelines.weights.parallelize import first_held, own_part
from flowrl.pipelines.weights.trained_weights import Held

BUNDLE = 2**26
"""Most bytes of tensors in a bundle."""
_ALIGNED = 64  # bytes at whose multiples tensors begin
_BLOCK = 2**13  # words of 8 bytes that are added up for a digest


class SharedBytes:
    """Bytes that processes of this machine map; see the file's docstring. Raises OSError: there is no room."""

    def __init__(self, size: int) -> None:
        if sys.platform != "linux":
            raise OSError(f"{sys.platform} has no memory without a name")
        self.size, self.fd = size, os.memfd_create("flowrl-weights")
        weakref.finalize(self, os.close, self.fd)
        os.posix_fallocate(self.fd, 0, size)
        self.bytes = torch.frombuffer(mmap.mmap(self.fd, size), dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Bundle:
    """Tensors, or pieces of some, in a row of bytes."""

    start: int
    """Where it begins in its memory."""
    size: int
    """Bytes."""
    digest: str
    """Of its bytes."""
    reference: Any = None
    """Ray's, where it does not come by memory."""


@dataclass(frozen=True, slots=True)
class Shard:
    """What one learner has laid down of a version."""

    process: int
    memory: int
    """Its number among the files that the process has open; negative where bundles have references."""
    bundles: tuple[Bundle, ...]

    def by_ray(self, put: Callable[[Any], Any]) -> Shard:
        """The same for workers of other machines; `put` gives a reference. Raises ValueError, OSError: as `arrived`."""
        arrived = zip(self.bundles, self.arrived(), strict=True)
        return replace(self, bundles=tuple(replace(one, reference=put(data.numpy())) for one, data in arrived))

    def arrived(self) -> Iterator[Tensor]:
        """The bytes of each bundle. Raises ValueError: they are not those laid down; OSError: they are gone."""
        for one in self.bundles:
            if one.reference is None:
                place = one.start % mmap.ALLOCATIONGRANULARITY
                with open(f"/proc/{self.process}/fd/{self.memory}", "rb") as file:  # what is written here stays here
                    given: dict[str, Any] = {"access": mmap.ACCESS_COPY, "offset": one.start - place}
                    mapped = mmap.mmap(file.fileno(), place + one.size, **given)
                data = torch.frombuffer(mapped, dtype=torch.uint8)[place:]
            else:
                import ray

                data = torch.tensor(ray.get(one.reference))
            if _digest(data) != one.digest:
                raise ValueError(f"weights of {one.size:,} bytes arrived damaged: their digest does not fit")
            yield data


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, weakref_slot=True)
class Version:
    """Weights that workers can draw under, for as long as somebody has this."""

    number: int
    parts: tuple[Shard, ...]
    """Of each learner that holds some of the weights."""
    memory: SharedBytes | None
    """That this learner's bundles lie in."""


def lay_down(
    weights: Mapping[str, Held], spare: list[SharedBytes], put: Callable[[Any], Any]
) -> tuple[Shard, SharedBytes | None]:
    """Lays down what a process holds of the weights: in one of the `spare` memories where it fits, else in new memory,
    or where there is no room bundle by bundle through `put`."""
    layout = list(bundles_of(weights))
    size = sum(size for _, _, size in layout)
    try:
        memory = spare.pop() if spare and spare[-1].size == size else SharedBytes(size)
    except OSError:
        memory = None
    bundles, start = list[Bundle](), 0
    for header, pieces, length in layout:
        room = torch.empty(length, dtype=torch.uint8) if memory is None else memory.bytes[start : start + length]
        room[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        offset = _after(len(header))
        for held, begin, count in pieces:
            end = offset + count * held.dtype.itemsize
            room[offset:end].view(held.dtype).copy_(held.values.flatten()[begin : begin + count])
            offset = _after(end)
        bundles.append(Bundle(start, length, _digest(room), put(room.numpy()) if memory is None else None))
        start += length
    return Shard(os.getpid(), -1 if memory is None else memory.fd, tuple(bundles)), memory


def bundles_of(weights: Mapping[str, Held]) -> Iterator[tuple[bytes, list[tuple[Held, int, int]], int]]:
    """Of each bundle its header, its pieces (of which weight, from which element held here, how many), and bytes."""
    named, own, size = list[tuple[Any, ...]](), list[tuple[Held, int, int]](), 0

    def bundle() -> tuple[bytes, list[tuple[Held, int, int]], int]:
        text = json.dumps(named, separators=(",", ":")).encode()
        header = len(text).to_bytes(8, "little") + text
        return header, own, _after(len(header)) + size

    for name, held in weights.items():
        begin, total, each = 0, held.values.numel(), held.dtype.itemsize
        while begin < total:
            count = min(total - begin, BUNDLE // each)
            if own and size + count * each > BUNDLE:
                yield bundle()
                named, own, size = [], [], 0
            named.append((name, held.shape, held.first + begin, count, str(held.dtype).removeprefix("torch.")))
            own.append((held, begin, count))
            begin, size = begin + count, size + _after(count * each)
    yield bundle()


def read(parts: Sequence[Shard], own: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
    """Copies a version into the tensors that a worker draws with, of those that are split into this process's pieces,
    or into new ones. Raises ValueError: something is not whole, or of another policy; OSError: as `Shard.arrived`."""
    found = dict(own or {})
    left = {name: own_part(tensor).numel() for name, tensor in found.items()}
    for data in (data for part in parts for data in part.arrived()):
        length = int(data[:8].view(torch.int64))
        offset = _after(8 + length)
        for name, shape, first, count, kind in json.loads(data[8 : 8 + length].numpy().tobytes()):
            dtype = getattr(torch, kind)
            end = offset + count * dtype.itemsize
            if own is None and name not in found:
                found[name] = torch.empty(shape, dtype=dtype)
                left[name] = found[name].numel()
            if name not in found or list(found[name].shape) != shape:
                raise ValueError(f"the learner's weights have {name} {shape}, which this worker's policy has not")
            piece, begin = own_part(found[name].detach()).view(-1), first_held(found[name])
            low, high = max(first, begin), min(first + count, begin + len(piece))
            if low < high:
                piece[low - begin : high - begin].copy_(data[offset:end].view(dtype)[low - first : high - first])
                left[name] -= high - low
            offset = _after(end)
    if missing := [name for name, count in left.items() if count]:
        raise ValueError(f"{len(missing)} weights did not arrive whole (first: {missing[0]})")
    return found


def reachable(part: Shard) -> bool:
    """Whether this process can map what a learner has laid down."""
    try:
        return part.memory >= 0 and all(len(data) > 0 for data in part.arrived())
    except (OSError, ValueError):
        return False


def _after(offset: int) -> int:
    return -(-offset // _ALIGNED) * _ALIGNED


def _digest(data: Tensor) -> str:
    """SHA-256 of sums of 64 KiB each: fast beside a copy, and a bit or a block that is wrong shows in it."""
    words = data.view(torch.int64)
    whole = len(words) // _BLOCK * _BLOCK
    sums = torch.cat([words[:whole].view(-1, _BLOCK).sum(1), words[whole:].sum()[None]])
    return hashlib.sha256(sums.numpy().tobytes()).hexdigest()
