"""What the code says of itself, read from the syntax trees: nothing of the package is imported or run.

Options are the fields of frozen dataclasses: name, annotation, default, and the docstring below the field.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

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


@cache
def module_path(module: str) -> Path | None:
    """The file of a module of the package, by its real place in the repository; None of other modules."""
    parts = module.split(".")
    if parts[0] != "flowrl":
        return None
    moved = parts[1:] if len(parts) > 1 and parts[1] in ("samplers", "rewards", "pipelines") else parts
    folder = ROOT.joinpath(*moved)
    for path in (folder.with_suffix(".py"), folder / "__init__.py"):
        if path.is_file():
            return path
    return None


@cache
def tree_of(module: str) -> ast.Module:
    """The syntax tree of a module.

    Raises:
        ValueError: there is no such module.
    """
    path = module_path(module)
    if path is None:
        raise ValueError(f"there is no module {module} in the package")
    return ast.parse(path.read_text(encoding="utf-8"))


def modules() -> Iterator[str]:
    """Every module of the package by its import name, in order."""
    for folder in ("flowrl", "pipelines", "rewards", "samplers"):
        base = () if folder == "flowrl" else ("flowrl",)
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = (*base, *path.relative_to(ROOT).with_suffix("").parts)
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def located(module: str, name: str) -> tuple[str, ast.AST] | None:
    """The module and node that define a name which stands in a module, followed through its imports; None elsewhere."""
    tree = tree_of(module)
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return module, node
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return module, node
    for inner in ast.walk(tree):
        if isinstance(inner, ast.ImportFrom) and inner.module is not None and module_path(inner.module) is not None:
            for alias in inner.names:
                if (alias.asname or alias.name) == name:
                    whole = f"{inner.module}.{alias.name}"
                    return (whole, tree_of(whole)) if module_path(whole) else located(inner.module, alias.name)
    return None


def value_of(module: str, name: str) -> ast.expr:
    """The expression that a name of a module is assigned.

    Raises:
        ValueError: there is none.
    """
    found = located(module, name)
    if found is not None and isinstance(found[1], ast.Assign | ast.AnnAssign) and found[1].value is not None:
        return found[1].value
    raise ValueError(f"{module} assigns nothing to {name}")


def class_of(module: str, name: str) -> tuple[str, ast.ClassDef]:
    """The module and the definition of a class that stands in a module.

    Raises:
        ValueError: there is none.
    """
    found = located(module, name)
    if found is None or not isinstance(found[1], ast.ClassDef):
        raise ValueError(f"{module} has no class {name}")
    return found[0], found[1]


def text_after(body: list[ast.stmt], place: int) -> str:
    """The text that stands alone after a statement, which documents it."""
    after = body[place + 1] if place + 1 < len(body) else None
    if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
        return inspect.cleandoc(after.value.value)
    return ""


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


def class_text(module: str, name: str, variable: str) -> str:
    """A text that a class keeps as a class variable, such as ``reproduces``; empty where there is none."""
    _, found = class_of(module, name)
    for node in found.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == variable:
            return str(ast.literal_eval(node.value)) if node.value is not None else ""
    return ""


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
        found = located(module, node.id)
        if found is not None and isinstance(found[1], ast.Assign | ast.AnnAssign) and found[1].value is not None:
            return words_of(found[0], found[1].value)
        return "mapping" if found is not None else f"`{node.id}`"
    return f"`{ast.unparse(node)}`"


def names_in(module: str, table: str) -> list[str]:
    """The names of a table of choices: its keys, or the ``name`` of each of its members."""
    node = value_of(module, table)
    if isinstance(node, ast.Dict):
        return [str(ast.literal_eval(key)) for key in node.keys if key is not None]
    return [
        str(ast.literal_eval(word.value))
        for inner in ast.walk(node) if isinstance(inner, ast.Call)
        for word in inner.keywords if word.arg == "name"
    ]  # fmt: skip


def classes_in(module: str, table: str) -> dict[str, str]:
    """A table of choices: name -> the class of its options, given as such or as ``options=`` of an entry.

    Raises:
        ValueError: the table is not written out.
    """
    node = value_of(module, table)
    if not isinstance(node, ast.Dict):
        raise ValueError(f"{table} of {module} is not written out as names and classes")
    found = {}
    for key, value in zip(node.keys, node.values, strict=True):
        given = (
            [word.value for word in value.keywords if word.arg == "options"] if isinstance(value, ast.Call) else [value]
        )
        if key is not None:
            found[str(ast.literal_eval(key))] = ast.unparse(given[0])
    return found


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
        found = located(module, node.id)
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
        found = located(module, node.id)
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
