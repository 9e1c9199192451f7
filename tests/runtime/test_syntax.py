"""Syntax trees of texts, classes and functions, also where many threads want one."""

from __future__ import annotations

import ast
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from flowrl.runtime.syntax import parse_python


def test_texts_bytes_and_indented_definitions() -> None:
    class Inner:
        """One."""

        def method(self) -> int:
            return 1

    assert ast.dump(parse_python("a = 1")) == ast.dump(parse_python(b"a = 1")) == ast.dump(ast.parse("a = 1"))
    (found,) = parse_python(Inner).body
    assert [type(found), found.name] == [ast.ClassDef, "Inner"]  # type: ignore[attr-defined]
    (found,) = parse_python(Inner.method).body
    assert [type(found), found.name] == [ast.FunctionDef, "method"]  # type: ignore[attr-defined]
    with pytest.raises(SyntaxError):
        parse_python("a =")
    with pytest.raises((OSError, TypeError)):
        parse_python(int)


def test_one_thread_parses_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once end in SystemError on Python 3.11.7: one call in some twenty, where garbage is collected inside."""
    inside, most = [0], [0]

    def parse(text: str) -> ast.Module:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.005)
        inside[0] -= 1
        return ast.Module([], [])

    monkeypatch.setattr(ast, "parse", parse)
    with ThreadPoolExecutor(4) as threads:
        assert len(list(threads.map(parse_python, ["a = 1"] * 12))) == 12
    assert most == [1]
