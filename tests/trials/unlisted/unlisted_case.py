"""What a case of `unlisted_inputs.py` is, and the oracles that cases share."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrl.cli import main


class Silent(AssertionError):
    """A result that is wrong, of which nobody was told."""


Outcome = tuple[str, str]
"""The word "right" or "refused", and what was seen or said."""


@dataclass(frozen=True, slots=True)
class Case:
    """One input; `run(folder)` makes it in an empty folder, gives it to flowrl, and judges."""

    name: str
    run: Callable[[Path], Outcome]


def command(*words: str) -> tuple[int, str]:
    """Exit code and everything that `flowrl WORDS` printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = main(list(words))
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
    return code, said.getvalue()


def refused(code: int, said: str, *names: str) -> Outcome:
    """That a command refused in words that hold each of `names`, each of which may give alternatives with a bar."""
    if code == 0:
        raise Silent(f"taken without a word: {said.strip()[-300:]}")
    missing = [name for name in names if not any(one.lower() in said.lower() for one in name.split("|"))]
    if missing:
        raise Silent(f"refused, but without the words {missing}: {said.strip()[-300:]}")
    return "refused", said.strip()[-300:]


def refused_call(call: Callable[[], object], *names: str, errors: Sequence[type[Exception]] = (ValueError,)) -> Outcome:
    """That a function raises an error for users whose words hold each of `names`."""
    try:
        result = call()
    except tuple(errors) as error:
        return refused(1, str(error), *names)
    raise Silent(f"taken without a word: {result!r:.200}")


def right(found: float, expected: float, *, within: float, what: str = "value") -> Outcome:
    """That a number is the expected one."""
    if not abs(found - expected) <= within:
        raise Silent(f"{what} {found!r} where {expected!r} is right, within {within:g}")
    return "right", f"{what} {found:.6g}"


def same(found: object, expected: object, what: str = "value") -> Outcome:
    """That a result is the expected one."""
    if found != expected:
        raise Silent(f"{what} {found!r:.200} where {expected!r:.200} is right")
    return "right", f"{what} {found!r:.100}"
