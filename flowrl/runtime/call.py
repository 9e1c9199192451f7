"""The call that flowrl answers: its words, and whether it shows progress.

A context variable holds it, so neither another thread nor a user's own printing function shares it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """A call: a command with its words, or a Python call with its arguments."""

    words: str
    show: bool = True


_CALL: ContextVar[Call | None] = ContextVar("call", default=None)


def call_words() -> str:
    """The words of the call, for files that record how they were made; empty if unknown."""
    call = _CALL.get()
    return "" if call is None else call.words


def shown() -> bool:
    """Whether progress and notes are shown."""
    call = _CALL.get()
    return call is None or call.show


def within_call() -> bool:
    """Whether flowrl is answering a call in this context."""
    return _CALL.get() is not None


@contextmanager
def answering(words: str = "", *, show: bool = True) -> Iterator[None]:
    """Everything inside belongs to this call. A nested call keeps the outer words and shows no more than it."""
    outer = _CALL.get()
    token = _CALL.set(Call(words, show) if outer is None else Call(outer.words, show and outer.show))
    try:
        yield
    finally:
        _CALL.reset(token)


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """A Python call, as a user writes it.

    >>> call_text("sample", {"model": Path("runs/first"), "seeds": [0, 1], "settings": {"steps": 2}})
    "flowrl.sample(model='runs/first', seeds=[0, 1], steps=2)"
    """
    flat = {**{key: value for key, value in arguments.items() if key != "settings"}, **arguments.get("settings", {})}
    words = []
    for key, value in flat.items():
        folder = getattr(value, "folder", None)  # of a result: where it can be found again
        if isinstance(value, Path) or isinstance(folder, Path):
            value = str(value if folder is None else folder)
        words.append(f"{key}={getattr(value, '__qualname__', None) or repr(value)}")
    return f"flowrl.{name}({', '.join(words)})"
