"""Reference of the public functions and classes, from their docstrings: `flowrl` itself, `__all__`, the contracts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from site_syntax import ROOT, markdown, modules

import flowrl
from flowrl.cli import COMMANDS
from flowrl.config.source_syntax import find_definition, module_path, text_after, tree_of

CONTRACTS = (
    "flowrl.rewards", "flowrl.rewards.base.user_file", "flowrl.pipelines", "flowrl.samplers", "flowrl.samplers.kernels",
    "flowrl.advantages", "flowrl.prompts.loading", "flowrl.trajectory", "flowrl.runtime.randomness",
    "flowrl.runtime.capabilities",
)  # fmt: skip
"""Modules whose public names are for users although they have no `__all__`: what an own reward, family or method is."""
LOOSE = ("rlg_pipeline", "slot_network")
"""Functions for users that stand alone in their modules."""
INNER = ("flowrl.recipes",)
"""Packages whose `__all__` is for the commands."""


def interface_pages() -> dict[str, str]:
    """Path within the site -> the page of a module, and the list of them."""
    found = dict(sorted(public().items()))
    pages = {f"reference/api/{module}.md": _page(module, names) for module, names in found.items()}
    pages["reference/api/flowrl.md"] = _functions_page()
    listed = [f"- [`{module}`](api/{module}.md): {_first(module)}" for module in ("flowrl", *found)]
    toc = "\n".join(f"api/{module}" for module in ("flowrl", *found))
    text = "Importing `flowrl` is light; torch and the model libraries load with the submodules that need them."
    pages["reference/api.md"] = "\n\n".join(
        ["# Python reference", text, "\n".join(listed), f"```{{toctree}}\n:hidden:\n\n{toc}\n```\n"]
    )
    return pages


def functions_table() -> str:
    """Every function of `flowrl` with its command, what it does, and what it returns with its attributes."""
    commands = _commands()
    lines = ["| function | command | what it does | returns |", "|---|---|---|---|"]
    for name, module in functions().items():
        node = _function(module, name)
        said = markdown((ast.get_docstring(node) or "").partition("\n\n")[0])
        cells = (
            f"[`flowrl.{name}({_call(node.args)})`](../reference/api/flowrl.md#{name})",
            f"`flowrl {commands[name]}`" if name in commands else "",
            " ".join(re.split(r"(?<=\w)[.;]\s", f"{said} ", maxsplit=1)[0].split()),
            _returned(module, node),
        )
        lines.append(f"| {' | '.join(one.replace('|', chr(92) + '|') for one in cells)} |")
    return "\n".join(lines)


def functions() -> dict[str, str]:
    """Function of `flowrl` -> the module that it is imported from, in the order of the commands; the others last."""
    order = [*_commands()]
    found = {name: module for name, module in flowrl._PLACES.items() if name.islower()}
    return dict(sorted(found.items(), key=lambda one: order.index(one[0]) if one[0] in order else len(order)))


@cache
def _commands() -> dict[str, str]:
    """Function -> the command that calls it, as the commands' own files say."""
    return {
        name: command
        for command in COMMANDS
        for name in re.findall(
            r"\bflowrl\.(\w+)\(", (ROOT / "flowrl" / "commands" / f"{command.replace(' ', '_')}.py").read_text()
        )
        if name in flowrl._PLACES
    }


def _function(module: str, name: str) -> ast.FunctionDef:
    found = find_definition(module, name)
    if found is None or not isinstance(found[1], ast.FunctionDef):
        raise ValueError(f"{module} has no function {name}")
    return found[1]


def _call(arguments: ast.arguments) -> str:
    """What a call names: what has no default, and the first argument; `…` stands for the rest."""
    names = [one.arg for one in arguments.args]
    needed = max(1, len(names) - len(arguments.defaults))
    keywords = [
        f"{one.arg}=…" for one, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if value is None
    ]
    more = len(names) > needed or len(arguments.kwonlyargs) > len(keywords)
    return ", ".join([*names[:needed], *keywords, *(["…"] if more else [])])


def _result_class(module: str, node: ast.FunctionDef) -> tuple[str, ast.ClassDef] | None:
    """The class of flowrl that a function returns, with its module."""
    for name in re.findall(r"\b[A-Z]\w+", ast.unparse(node.returns) if node.returns is not None else ""):
        found = find_definition(module, name)
        if found is not None and isinstance(found[1], ast.ClassDef):
            return found[0], found[1]
    return None


def _returned(module: str, node: ast.FunctionDef) -> str:
    kind = ast.unparse(node.returns) if node.returns is not None else "None"
    found = _result_class(module, node)
    if found is None:
        return "nothing" if kind == "None" else f"`{kind}`"
    fields = [ast.unparse(one.target) for one in found[1].body if isinstance(one, ast.AnnAssign)]
    fields += [
        one.name
        for one in found[1].body
        if isinstance(one, ast.FunctionDef) and any(ast.unparse(mark) == "property" for mark in one.decorator_list)
    ]
    return f"`{kind}`: " + ", ".join(f"`{name}`" for name in fields if not name.startswith("_"))


def _functions_page() -> str:
    """Every function of `flowrl`, each with the class of its result below it."""
    out = ["# `flowrl`", markdown(ast.get_docstring(tree_of("flowrl")) or "")]
    for name, module in functions().items():
        node = _function(module, name)
        out += [f"## `{name}`", f"```python\n{_signature(node)}\n```", markdown(ast.get_docstring(node) or "")]
        found = _result_class(module, node)
        if found is not None and f"### `{found[1].name}`" not in out:
            out += [f"### `{found[1].name}`", markdown(ast.get_docstring(found[1]) or ""), *_members(found[1])]
    return "\n\n".join(part for part in out if part) + "\n"


@cache
def public() -> dict[str, tuple[str, ...]]:
    """Module -> its public names."""
    found: dict[str, tuple[str, ...]] = {}
    for module in modules():
        path = module_path(module)
        said = "" if path is None else path.read_text(encoding="utf-8")
        if module not in CONTRACTS and not any(
            word in said for word in ("__all__", *(f"def {name}(" for name in LOOSE))
        ):
            continue  # parsing all modules takes many seconds
        tree = tree_of(module)
        names = [*_listed(tree)] if not module.startswith(INNER) else []
        defined = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        if not names and module in CONTRACTS:
            names = [*_taken_over(tree), *(name for name in defined if not name.startswith("_"))]
        names += [name for name in LOOSE if name in defined and name not in names]
        if names:
            found[module] = tuple(names)
    return found


def _listed(tree: ast.Module) -> Iterator[str]:
    """The names of `__all__`."""
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            yield from (str(part.value) for part in ast.walk(node) if isinstance(part, ast.Constant))


def _taken_over(tree: ast.Module) -> Iterator[str]:
    """Names that are imported for users, `from … import X as X`."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            yield from (one.name for one in node.names if one.name == one.asname)


def _first(module: str) -> str:
    """The first sentence of a module's docstring."""
    return markdown((ast.get_docstring(tree_of(module)) or "").partition("\n")[0])


def _page(module: str, names: tuple[str, ...]) -> str:
    out = [f"# `{module}`", markdown(ast.get_docstring(tree_of(module)) or "")]
    for name in names:
        found = find_definition(module, name)
        out.append(f"## `{name}`")
        if found is None:
            continue
        home, node = found
        if home != module:
            out.append(f"*Defined in `{home}`.*")
        if isinstance(node, ast.FunctionDef):
            out += [f"```python\n{_signature(node)}\n```", markdown(ast.get_docstring(node) or "")]
        elif isinstance(node, ast.ClassDef):
            out += [markdown(ast.get_docstring(node) or ""), *_members(node)]
        elif isinstance(node, ast.Assign | ast.AnnAssign) and module_path(home) is not None:
            body = tree_of(home).body
            out.append(markdown(text_after(body, body.index(node))))
    return "\n\n".join(part for part in out if part) + "\n"


def _members(node: ast.ClassDef) -> list[str]:
    """Fields with their docstrings, then public methods and properties."""
    out = []
    fields = [
        f"- `{ast.unparse(one)}`: {' '.join(markdown(text_after(node.body, place)).split())}".rstrip(": ")
        for place, one in enumerate(node.body)
        if isinstance(one, ast.AnnAssign) and not ast.unparse(one.target).startswith("_")
    ]  # fmt: skip
    if fields:
        out.append("\n".join(fields))
    for one in node.body:
        if not isinstance(one, ast.FunctionDef) or (
            one.name.startswith("_") and one.name not in ("__init__", "__call__")
        ):
            continue
        said = ast.get_docstring(one)
        if said is not None:
            out += [f"### `{node.name}.{one.name}`", f"```python\n{_signature(one)}\n```", markdown(said)]
    return out


def _signature(node: ast.FunctionDef) -> str:
    """A definition's first line, an argument a line where it is long."""
    decorated = "".join(
        f"@{text}\n" for one in node.decorator_list if (text := ast.unparse(one)) in ("property", "staticmethod")
    )
    returned = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    arguments = _parts(ast.unparse(node.args))
    line = f"def {node.name}({', '.join(arguments)}){returned}"
    if len(line) > 100:
        line = f"def {node.name}(\n    " + ",\n    ".join(arguments) + f",\n){returned}"
    return f"{decorated}{line}"


def _parts(arguments: str) -> list[str]:
    """Arguments one by one, with spaces around the sign before a default; commas within brackets and texts stay.

    >>> _parts("x: tuple[int, int]=(1, 2), *, y: str=','")
    ['x: tuple[int, int] = (1, 2)', '*', "y: str = ','"]
    """
    out, depth, quote = [""], 0, ""
    for letter in arguments:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter == "," and depth == 0:
            out.append("")
            continue
        depth += (letter in "([{") - (letter in ")]}") if not quote else 0
        out[-1] += letter
    return [re.sub(r"^(\w+: [^=]+)=", r"\1 = ", part.strip()) for part in out if part.strip()]
