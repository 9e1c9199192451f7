"""Choices for loading a checkpoint; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Split(Protocol):
    """The processes that hold one copy of the denoisers between them, as `mesh.Shards` has them."""

    mesh: Any
    """A DeviceMesh of one dimension."""

    def any_needs(self, flags: list[bool]) -> list[bool]:
        """For each place whether it is true on any of the processes."""

    def gather(self, mine: T) -> list[T]:
        """What each of the processes has, in their order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """What of a checkpoint loads at once, and its form on the device."""

    later: bool = False
    """Whether text encoders and denoisers wait for `load_text_encoders` and `load_denoiser` of the pipeline."""
    quantize: str = "none"
    """Form of the denoisers' large weights (`weights/quantize.py`), or "none"."""
    split: Split | None = None
    """The processes that share denoisers; None if each has the whole."""
    masters: bool = False
    """Whether what is split is trained: then parts stay in float32, and are rounded as they are gathered."""
    variant: str | None = None
    """Ending of the names of the files with weights; None takes those without one."""
    offload: tuple[str, ...] = ()
    """Parts that rest on the host while unused: "text_encoders" (an image encoder too), "vae"."""


AT_ONCE = Loading()
"""Everything is loaded at once."""
