"""Cases: images."""

from __future__ import annotations

from collections.abc import Iterator

from unlisted_case import Case


def cases() -> Iterator[Case]:
    """Every case of this file."""
    yield from ()
