"""Reads facts about the code from its syntax trees, without importing or running the package.

So a listing needs neither torch nor the libraries of a reward, and no fact is stated twice.
"""

from __future__ import annotations

import ast
import inspect
from functools import cache
from importlib import resources
from pathlib import Path

from flowrl.runtime.syntax import parse_python

PACKAGE = Path(str(resources.files("flowrl")))


@cache
def module_path(module: str) -> Path | None:
    """The file of a module of the package; None for other modules."""
    package, *parts = module.split(".")
    if package != "flowrl":
        return None
    folder = PACKAGE.joinpath(*parts)
    for path in (folder.with_suffix(".py"), folder / "__init__.py"):
        if path.is_file():
            return path
    return None


@cache
def tree_of(module: str) -> ast.Module:
    """The syntax tree of a module."""
    path = module_path(module)
    if path is None:
        raise ValueError(f"there is no module {module} in the package")
    return parse_python(path.read_text(encoding="utf-8"))


@cache
def find_definition(module: str, name: str) -> tuple[str, ast.AST] | None:
    """The module and node that define a name in a module, followed through imports; None outside the package."""
    tree = tree_of(module)
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return module, node
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in (getattr(one, "id", None) for one in targets):
            return module, node
    for inner in ast.walk(tree):
        if isinstance(inner, ast.ImportFrom) and module_path(origin := str(inner.module)) is not None:
            for alias in inner.names:
                if (alias.asname or alias.name) == name:
                    whole = f"{origin}.{alias.name}"
                    return (whole, tree_of(whole)) if module_path(whole) else find_definition(origin, alias.name)
    return None


def value_of(module: str, name: str) -> ast.expr:
    """The expression that is assigned to a name of a module."""
    found = find_definition(module, name)
    if found is not None and isinstance(found[1], ast.Assign | ast.AnnAssign) and found[1].value is not None:
        return found[1].value
    raise ValueError(f"{module} assigns nothing to {name}")


def class_of(module: str, name: str) -> tuple[str, ast.ClassDef]:
    """The module and the definition of a class that a module names."""
    found = find_definition(module, name)
    if found is None or not isinstance(found[1], ast.ClassDef):
        raise ValueError(f"{module} has no class {name}")
    return found[0], found[1]


def text_after(body: list[ast.stmt], place: int) -> str:
    """The docstring after a statement."""
    after = body[place + 1] if place + 1 < len(body) else None
    if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
        return inspect.cleandoc(after.value.value)
    return ""


def table_of(module: str, table: str) -> dict[str, ast.expr]:
    """A literal table: its keys and the expressions of their values. Raises ValueError: there is no such table."""
    node = value_of(module, table)
    if not isinstance(node, ast.Dict):
        raise ValueError(f"{table} of {module} is not written out as names and values")
    return {str(ast.literal_eval(key)): value for key, value in zip(node.keys, node.values, strict=True) if key}


def classes_in(module: str, table: str) -> dict[str, str]:
    """A table of choices: name -> the class of its options, given directly or as ``options=`` of an entry."""
    found = {}
    for name, value in table_of(module, table).items():
        words = value.keywords if isinstance(value, ast.Call) else []
        found[name] = ast.unparse(next((word.value for word in words if word.arg == "options"), value))
    return found
