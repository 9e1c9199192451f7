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

from flowrl.pipelines.weights.trained_weights import Held

BUNDLE = 2**26
"""Most bytes of tensors in a bundle."""
_ALIGNED = 64  # bytes at whose multiples tensors begin
_BLOCK = 2**13  # words of 8 bytes that are added up for a digest


class Memory:
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
class Part:
    """What one learner has laid down of a version."""

    process: int
    memory: int
    """Its number among the files that the process has open."""
    bundles: tuple[Bundle, ...]

    def by_ray(self, memory: Memory, put: Callable[[Any], Any]) -> Part:
        """The same for workers of other machines; `put` gives a reference."""
        return replace(self, bundles=tuple(
            replace(one, reference=put(memory.bytes[one.start : one.start + one.size].numpy()))
            for one in self.bundles
        ))  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, weakref_slot=True)
class Version:
    """Weights that workers can draw under, for as long as somebody has this."""

    number: int
    parts: tuple[Part, ...]
    """Of each learner that holds some of the weights."""
    memory: Memory | None
    """That this learner's bundles lie in."""


def lay_down(weights: Mapping[str, Held], spare: list[Memory], put: Callable[[Any], Any]) -> tuple[Part, Memory | None]:
    """Lays down what a process holds of the weights: in one of the `spare` memories where it fits, else in new memory,
    or where there is no room bundle by bundle through `put`."""
    layout = list(_layout(weights))
    size = sum(size for _, _, size in layout)
    try:
        memory = spare.pop() if spare and spare[-1].size == size else Memory(size)
    except OSError:
        memory = None
    bundles, start = list[Bundle](), 0
    for header, pieces, length in layout:
        room = torch.empty(length, dtype=torch.uint8) if memory is None else memory.bytes[start : start + length]
        room[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        offset = _after(len(header))
        for name, begin, count in pieces:
            held = weights[name]
            end = offset + count * held.dtype.itemsize
            room[offset:end].view(held.dtype).copy_(held.values.flatten()[begin : begin + count])
            offset = _after(end)
        reference = put(room.numpy()) if memory is None else None
        bundles.append(Bundle(start, length, _digest(room), reference))
        start += length
    return Part(os.getpid(), -1 if memory is None else memory.fd, tuple(bundles)), memory


def read(parts: Sequence[Part], own: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
    """Copies a version into the tensors that a worker draws with, or into new ones. Raises ValueError: something did
    not arrive whole, or is of another policy; OSError: a learner's memory is not there, or not any more."""
    found = {} if own is None else own
    left = {name: tensor.numel() for name, tensor in found.items()}
    for part in parts:
        for data in _arrived(part):
            for name, shape, first, values in _unpacked(data):
                if own is None and name not in found:
                    found = {**found, name: torch.empty(shape, dtype=values.dtype)}
                    left[name] = found[name].numel()
                if name not in found or tuple(found[name].shape) != shape:
                    raise ValueError(f"the learner's weights have {name} {shape}, which this worker's policy has not")
                found[name].data.view(-1)[first : first + len(values)].copy_(values)
                left[name] -= len(values)
    if missing := [name for name, count in left.items() if count]:
        raise ValueError(f"{len(missing)} weights did not arrive whole (first: {missing[0]})")
    return found


def reachable(part: Part) -> bool:
    """Whether this process can map what a learner has laid down."""
    try:
        return part.memory >= 0 and all(len(data) > 0 for data in _arrived(part))
    except (OSError, ValueError):
        return False


def _after(offset: int) -> int:
    return -(-offset // _ALIGNED) * _ALIGNED


def _layout(weights: Mapping[str, Held]) -> Iterator[tuple[bytes, list[tuple[str, int, int]], int]]:
    """Of each bundle its header, its pieces (name, first element of what is held, number of elements), and bytes."""
    own, size = list[tuple[str, int, int]](), 0

    def bundle() -> tuple[bytes, list[tuple[str, int, int]], int]:
        named = [
            (name, weights[name].shape, weights[name].first + begin, count, str(weights[name].dtype)[6:])
            for name, begin, count in own
        ]
        text = json.dumps(named, separators=(",", ":")).encode()
        header = len(text).to_bytes(8, "little") + text
        return header, own, _after(len(header)) + size

    for name, held in weights.items():
        begin, total = 0, held.values.numel()
        while begin < total:
            count = min(total - begin, BUNDLE // held.dtype.itemsize)
            length = _after(count * held.dtype.itemsize)
            if own and size + length > BUNDLE:
                yield bundle()
                own, size = [], 0
            own.append((name, begin, count))
            begin, size = begin + count, size + length
    yield bundle()


def _arrived(part: Part) -> Iterator[Tensor]:
    """The bytes of each bundle, whose digest fits."""
    for one in part.bundles:
        if one.reference is None:
            data = _mapped(part, one)
        else:
            import ray

            data = torch.tensor(ray.get(one.reference))
        if _digest(data) != one.digest:
            raise ValueError(f"weights of {one.size:,} bytes arrived damaged: their digest does not fit")
        yield data


def _mapped(part: Part, one: Bundle) -> Tensor:
    place = one.start % mmap.ALLOCATIONGRANULARITY
    descriptor = os.open(f"/proc/{part.process}/fd/{part.memory}", os.O_RDONLY)
    try:  # a private map: what would be written here stays here
        mapped = mmap.mmap(descriptor, place + one.size, access=mmap.ACCESS_COPY, offset=one.start - place)
    finally:
        os.close(descriptor)
    return torch.frombuffer(mapped, dtype=torch.uint8)[place:]


def _unpacked(data: Tensor) -> Iterator[tuple[str, tuple[int, ...], int, Tensor]]:
    """Of each piece of a bundle: name, shape of the whole tensor, number of its first element, and elements."""
    length = int(data[:8].view(torch.int64))
    offset = _after(8 + length)
    for name, shape, first, count, kind in json.loads(data[8 : 8 + length].numpy().tobytes()):
        dtype = getattr(torch, kind)
        end = offset + count * dtype.itemsize
        yield name, tuple(shape), first, data[offset:end].view(dtype)
        offset = _after(end)


def _digest(data: Tensor) -> str:
    """SHA-256 of sums of 64 KiB each: fast beside a copy, and a bit or a block that is wrong shows in it."""
    words = data.view(torch.int64)
    whole = len(words) // _BLOCK * _BLOCK
    sums = torch.cat([words[:whole].view(-1, _BLOCK).sum(1), words[whole:].sum()[None]])
    return hashlib.sha256(sums.numpy().tobytes()).hexdigest()
