"""Words of judges, read from the user's copy of a benchmark's repository: never run, parsed as data.

Published prompts stand in Python files (as constants, or in the messages of a request) and in JSON files.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

from flowrl.benchmarks.judged.cases import Words
from flowrl.runtime.syntax import parse_python

IMAGE = "<image>"


def first_file(folders: Sequence[Path], names: Sequence[str]) -> Path | None:
    """The first of some files that is in one of the folders."""
    return next((folder / name for folder in folders for name in names if (folder / name).is_file()), None)


def constants(path: Path) -> dict[str, str]:
    """The texts that a Python file gives names to. Raises ValueError: it is not Python."""
    found: dict[str, str] = {}
    for node in _tree(path).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found |= {target.id: node.value.value for target in node.targets if isinstance(target, ast.Name)}
    return found


def messages(path: Path, function: str) -> Words:
    """The system and user turns of a chat request in a Python file's function, one image after the text.
    `{record['Name']}` becomes the field `{name}`. Raises ValueError: no such function, or one of another form."""
    wanted = [node for node in _tree(path).body if isinstance(node, ast.FunctionDef) and node.name == function]
    texts = [
        _text(value, path)
        for first in wanted[:1]
        for node in ast.walk(first)
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and key.value == "text"
    ]
    if len(texts) != 2:
        raise ValueError(
            f"{path}: {function} is to make a request of a system and a user turn, {len(texts)} texts "
            f"were found: give the published file, or NAME.txt beside it."
        )
    return Words(system=texts[0], user=texts[1] + IMAGE)


def _text(node: ast.expr, path: Path) -> str:
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    found = []
    for part in parts:
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            found.append(part.value)
        elif (
            isinstance(part, ast.FormattedValue)
            and isinstance(part.value, ast.Subscript)
            and isinstance(part.value.slice, ast.Constant)
            and isinstance(part.value.slice.value, str)
        ):
            found.append("{" + part.value.slice.value.lower() + "}")
        else:
            raise ValueError(f"{path}: holds a text that is put together in a way not known: give the published file.")
    return "".join(found)


def _tree(path: Path) -> ast.Module:
    try:
        return parse_python(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as Python ({error}): give the published file.") from error
