"""Syntax trees of Python code."""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading
from typing import Any

_PARSING = threading.Lock()


def parse_python(code: str | bytes | type[Any] | Any) -> ast.Module:
    """The syntax tree of a text, or of the source of a class or function; errors are those of `ast` and `inspect`.

    One thread at a time: before 3.11.8 and 3.12.2, Python ends in SystemError where two parse at once.
    """
    with _PARSING:
        text = code if isinstance(code, str | bytes) else textwrap.dedent(inspect.getsource(code))
        return ast.parse(text)
