"""Options, annotations and docstrings of the code in Markdown, read from the syntax trees.

Options are the fields of frozen dataclasses: name, annotation, default, and the docstring below the field.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flowrl.config.source_syntax import class_of, find_definition, table_of, text_after, value_of

ROOT = Path(__file__).resolve().parents[2]
WORDS = {
    "int": "integer", "float": "number", "bool": "`true` or `false`", "str": "text", "Any": "anything",
    "dict": "mapping", "Mapping": "mapping", "Path": "path",
}  # fmt: skip
"""Annotations in the words of a YAML file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A field of an options dataclass.

    Attributes:
        name: of the field.
        kind: its type in words.
        default: as a YAML file would write it; None where the option is required.
        section: the dataclass (module, name) that it holds, or a list of; None for plain values.
        listed: whether it is a list of such.
        meaning: its docstring.
    """

    name: str
    kind: str
    default: str | None
    section: tuple[str, str] | None
    listed: bool
    meaning: str


def modules() -> Iterator[str]:
    """Every module of the package by its import name, in order."""
    for folder in ("flowrl", "pipelines", "rewards", "samplers"):
        base = () if folder == "flowrl" else ("flowrl",)
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = (*base, *path.relative_to(ROOT).with_suffix("").parts)
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def options_of(module: str, name: str) -> list[Option]:
    """The fields of a dataclass, in order.

    Raises:
        ValueError: there is no such class.
    """
    home, found = class_of(module, name)
    options = []
    for place, node in enumerate(found.body):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if "ClassVar" in ast.unparse(node.annotation) or node.target.id.startswith("_"):
            continue
        section, listed = _section(home, node.annotation)
        options.append(Option(
            name=node.target.id, kind=words_of(home, node.annotation), default=_default(home, node.value),
            section=section, listed=listed, meaning=text_after(found.body, place),
        ))  # fmt: skip
    return options


def words_of(module: str, node: ast.expr) -> str:
    """An annotation in the words of a YAML file; aliases are followed."""
    if isinstance(node, ast.Constant):
        return "`null`" if node.value is None else words_of(module, ast.parse(str(node.value), mode="eval").body)
    if isinstance(node, ast.BinOp):
        return f"{words_of(module, node.left)} or {words_of(module, node.right)}"
    if isinstance(node, ast.Subscript):
        kind, inner = ast.unparse(node.value).rpartition(".")[2], node.slice
        parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        if kind == "Literal":
            return " or ".join(f"`{_yaml(ast.literal_eval(part))}`" for part in parts)
        if kind in ("tuple", "list", "Sequence"):
            if kind != "tuple" or ast.unparse(parts[-1]) == "...":
                return f"list of {words_of(module, parts[0])}"
            return f"[{', '.join(words_of(module, part) for part in parts)}]"
        return WORDS.get(kind, kind)
    if isinstance(node, ast.Name):
        if node.id in WORDS:
            return WORDS[node.id]
        found = find_definition(module, node.id)
        if found is not None and isinstance(found[1], ast.Assign | ast.AnnAssign) and found[1].value is not None:
            return words_of(found[0], found[1].value)
        return "mapping" if found is not None else f"`{node.id}`"
    return f"`{ast.unparse(node)}`"


def names_in(module: str, table: str) -> list[str]:
    """The names of a table of choices: its keys, or the ``name`` of each of its members."""
    node = value_of(module, table)
    if isinstance(node, ast.Dict):
        return list(table_of(module, table))
    return [
        str(ast.literal_eval(word.value))
        for inner in ast.walk(node) if isinstance(inner, ast.Call)
        for word in inner.keywords if word.arg == "name"
    ]  # fmt: skip


def markdown(text: str) -> str:
    """A docstring as Markdown: sections such as Args become lists; code in single backticks; no raw HTML."""
    out: list[str] = []
    section = False
    for line in text.splitlines():
        if re.fullmatch(r"(Args|Attributes|Returns|Raises|Yields):", line):
            section = True
            out += ["", f"**{line[:-1]}**", ""]
        elif section and line.startswith("    "):
            name, colon, rest = line[4:].partition(": ")
            fresh = not line.startswith("     ")
            if fresh and colon and re.fullmatch(r"[\w`*., ]+", name) and out[-1] != "**Returns**":
                out.append(f"- `{name.strip('`')}`: {rest}")
            else:
                out.append(f"{'' if fresh and not out[-1].startswith(('-', ' ')) else '  '}{line.strip()}")
        elif line.startswith(">>> "):
            section = False
            out += (["```python"] if "```python" not in out[-4:] else []) + [line]
        else:
            section = section and not line.strip()
            out.append(line)
    return "\n".join(escaped(line) for line in _fenced(out))


def escaped(line: str) -> str:
    """A line of Markdown whose angle brackets outside code are no HTML, and whose code is in single backticks."""
    if line.startswith("    "):
        return line
    line = re.sub(r"``([^`]+)``", r"`\1`", line)
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(part if part.startswith("`") else part.replace("<", "\\<") for part in parts)


def cell(text: str) -> str:
    """Text for a cell of a table."""
    return escaped(" ".join(text.split())).replace("|", "\\|")


def _fenced(lines: list[str]) -> list[str]:
    """Examples end where an empty line or the text does."""
    out, inside = list[str](), False
    for line in lines:
        if inside and not line.strip():
            out.append("```")
            inside = False
        if line == "```python" and inside:
            continue
        inside = inside or line == "```python"
        out.append(line)
    return [*out, "```"] if inside else out


def _section(module: str, node: ast.expr) -> tuple[tuple[str, str] | None, bool]:
    """The dataclass that an annotation names, alone, beside null, or as the members of a list."""
    if isinstance(node, ast.BinOp):
        left, listed = _section(module, node.left)
        return (left, listed) if left is not None else _section(module, node.right)
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "tuple" and isinstance(node.slice, ast.Tuple):
        return _section(module, node.slice.elts[0])[0], True
    if isinstance(node, ast.Name) and node.id not in WORDS:
        found = find_definition(module, node.id)
        if found is not None and isinstance(found[1], ast.ClassDef):
            return (found[0], found[1].name), False
    return None, False


def _default(module: str, node: ast.expr | None) -> str | None:
    """A default as YAML; None where a value has to be given."""
    if node is None:
        return None
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "field":
        given = {word.arg: word.value for word in node.keywords}
        if "default" in given:
            return _default(module, given["default"])
        made = ast.unparse(given["default_factory"])
        return {"dict": "{}", "list": "[]", "tuple": "[]"}.get(made, "its own defaults")
    if isinstance(node, ast.Name):
        found = find_definition(module, node.id)
        if found is not None and isinstance(found[1], ast.Assign | ast.AnnAssign):
            return _default(found[0], found[1].value)
    try:
        return _yaml(ast.literal_eval(node))
    except ValueError:
        return ast.unparse(node)


def _yaml(value: object) -> str:
    """A plain value as a YAML file writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    return '""' if value == "" else f"{value:g}" if isinstance(value, float) else str(value)
