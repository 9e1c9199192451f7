"""What a process holds while it trains, in bytes: an estimate from counted tensors, not a measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

GIB = 2**30
CARDS = {24: 23.6, 40: 39.4, 80: 79.1, 141: 139.8}
"""Nominal size of a card -> GiB that its driver reports."""
OVERHEAD = 2 * GIB
"""Context, workspaces, and blocks that the allocator cannot use."""
TRAINED = 24
"""Bytes of a trained parameter: float32 weight 4, Adam's moments 8, gradient 4 and its float64 sum 8."""
SLOT = 4
"""Bytes of a trained parameter in one more slot of weights."""
SAVED_STATE = 12
"""Bytes of a trained parameter in a checkpoint, without slots: weight and Adam's moments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Of one process.

    Attributes:
        held: bytes by what they are, all through the run.
        unknown: what is held too, but of unknown size.
        image: activations of one image of a micro-batch.
        image_checkpointed: the same with gradient checkpointing.
        configured: those of the configured micro-batch.
        micro_batch_size: the configured one.
        freed: bytes of text encoders that are there at the start only.
    """

    held: Mapping[str, int]
    unknown: tuple[str, ...]
    image: int
    image_checkpointed: int
    configured: int
    micro_batch_size: int
    freed: int

    @property
    def fixed(self) -> int:
        """All but activations, the allowance included."""
        return sum(self.held.values()) + OVERHEAD

    @property
    def peak(self) -> int:
        """At most, in the update or at the start."""
        return self.fixed + max(self.configured, self.freed)


def trained_bytes(parameters: int, slots: int) -> int:
    """LoRA, its gradient, Adam's moments, and further slots."""
    return parameters * (TRAINED + SLOT * slots)


def checkpoint_bytes(parameters: int, slots: int) -> int:
    """One checkpoint on disk."""
    return parameters * (SAVED_STATE + SLOT * slots)


def fitting(memory: Memory, card: float, allowed: Sequence[int], *, checkpointed: bool) -> int:
    """The largest allowed micro-batch that a card of so many GiB holds; 0 where none does.

    Args:
        memory: of a process.
        card: GiB.
        allowed: sizes that divide an update's images.
        checkpointed: with gradient checkpointing.
    """
    each = memory.image_checkpointed if checkpointed else memory.image
    free = card * GIB - memory.fixed
    if free < memory.freed:
        return 0
    return max((size for size in allowed if size * each <= free), default=0)


def allowed_sizes(images: int, multiple: int) -> list[int]:
    """Micro-batches that divide an update's images of a process, multiples of what must stay together."""
    return [size for size in range(multiple, images + 1, multiple) if images % size == 0]
