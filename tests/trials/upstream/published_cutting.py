"""Cuts functions out of other people's files by syntax tree, so that one runs without its repository's imports.

A cut function is compiled without annotations and decorators (but those of a class's own methods) in a namespace of
what it names: torch, numpy and the like, and what the caller gives. A piece of a long function is cut as the statements
from the one that binds a name to the one that binds another.
"""

from __future__ import annotations

import ast
import math
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

KEPT = {"staticmethod", "classmethod", "property"}
"""Decorators that a method keeps."""


class MissingError(Exception):
    """A checkout, commit, file or function is not there."""


@dataclass(frozen=True)
class Checkouts:
    """A folder of checkouts: git directories, or trees with or without one.

    Each is named `owner+name`, `owner/name` or `name`; a fork's folder serves where it has the commit.
    """

    folder: Path

    def text(self, repository: str, commit: str, file: str) -> str:
        """A file as it was at the commit. Raises MissingError: no checkout holds it."""
        owner, name = repository.split("/")
        places = [self.folder / f"{owner}+{name}", self.folder / owner / name, self.folder / name]
        for place in [*places, *sorted(self.folder.glob(f"*+{name}"))]:
            for directory in (place, place / ".git", place / "repo"):
                if (directory / "HEAD").is_file():
                    shown = subprocess.run(
                        ["git", f"--git-dir={directory.resolve()}", "show", f"{commit}:{file}"],
                        capture_output=True,
                        text=True,
                        check=False,
                    )
                    if shown.returncode == 0:
                        return shown.stdout
        raise MissingError(f"no checkout of {repository} below {self.folder} holds {file} at {commit}")


@dataclass(frozen=True)
class Cut:
    """One file of one repository at one commit."""

    text: str
    also: tuple[Cut, ...] = ()
    tree: ast.Module = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tree", _Bare().visit(ast.parse(self.text)))

    def function(self, *names: str, **given: Any) -> Any:
        """The last of some functions, classes or constants of the file, the others beside it; `Class.method` is the
        method alone, as a function of `self`. `given` is what else they name."""
        space = _names() | given
        found = None
        for name in names:
            owner, _, method = name.rpartition(".")
            body = self._named(self.tree.body, owner).body if owner else self.tree.body
            node = self._named(body, method)
            if owner and not isinstance(node, ast.Assign):
                node.decorator_list = []
            exec(_compiled([node]), space)  # the very purpose: code of a checkout that the user names
            found = space[method]
        return found

    def statements(self, within: str, first: str, last: str) -> CodeType:
        """The statements of a function, from the first that binds `first` to the last that binds `last`, in the
        innermost list of statements that has both. Give it to `run`."""
        *owners, function = within.split(".")
        body = self.tree.body
        for owner in owners:
            body = self._named(body, owner).body
        found: tuple[int, list[ast.stmt]] | None = None
        for depth, block in _blocks(self._named(body, function)):
            binds = [_bound(statement) for statement in block]
            begins = [i for i, names in enumerate(binds) if first in names]
            ends = [i for i, names in enumerate(binds) if last in names]
            if begins and ends and begins[0] < ends[-1] and (found is None or depth > found[0]):
                found = depth, block[begins[0] : ends[-1] + 1]
        if found is None:
            raise MissingError(f"{within} has no list of statements from {first} to {last}")
        return _compiled(found[1])

    @staticmethod
    def _named(body: list[ast.stmt], name: str) -> Any:
        for node in body:
            if getattr(node, "name", None) == name or (isinstance(node, ast.Assign) and name in _bound(node)):
                return node
        raise MissingError(f"no {name} in the file")


def run(code: CodeType, **given: Any) -> dict[str, Any]:
    """What statements leave behind, of what is given."""
    space = _names() | given
    exec(code, space)  # as above
    return space


def _names() -> dict[str, Any]:
    return {"torch": torch, "np": np, "math": math, "F": F, "__name__": "cut"}


def _compiled(nodes: list[Any]) -> CodeType:
    module = ast.fix_missing_locations(ast.Module(body=nodes, type_ignores=[]))
    return compile(module, "<cut>", "exec")


class _Bare(ast.NodeTransformer):
    """Takes away annotations and the decorators of functions, whose names a cut function does not need."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.returns = None
        node.decorator_list = [d for d in node.decorator_list if isinstance(d, ast.Name) and d.id in KEPT]
        for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
            argument.annotation = None
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.generic_visit(node)
        node.bases, node.keywords, node.decorator_list = [], [], []
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        if node.value is None:
            return ast.Pass()
        return ast.Assign(targets=[node.target], value=node.value)


def _blocks(node: ast.AST, depth: int = 0) -> Iterator[tuple[int, list[ast.stmt]]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield depth, block
            for statement in block:
                yield from _blocks(statement, depth + 1)


def _bound(statement: ast.AST) -> set[str]:
    targets = [node for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return {target.id for target in targets}


@dataclass(frozen=True)
class Comparison:
    """A function of theirs beside ours.

    Attributes:
        method: what it computes, in a few words.
        repository, commit, file, function: where theirs is.
        ours: the dotted name of ours.
        compare: gives (what, ours, theirs) for one draw of the random inputs.
        bound: largest difference that passes, as a share of their largest entry.
        gradient: whether gradients are among what is compared.
        also: other files of the repository that it reads.
    """

    method: str
    repository: str
    commit: str
    file: str
    function: str
    ours: str
    compare: Any
    bound: float = 1e-5
    gradient: bool = False
    also: tuple[str, ...] = ()

    def cut(self, checkouts: Checkouts) -> Cut:
        """Their file."""
        first, *rest = (checkouts.text(self.repository, self.commit, file) for file in (self.file, *self.also))
        return Cut(first, tuple(map(Cut, rest)))


def difference(ours: Any, theirs: Any) -> float:
    """Largest distance as a share of the largest entry of theirs; of texts and flags 0 where equal, else 1."""
    if isinstance(ours, str | bool | set | frozenset | list | tuple | Mapping) or ours is None:
        return float(ours != theirs)
    mine, other = (np.asarray(torch.as_tensor(value).detach().double().cpu()) for value in (ours, theirs))
    if mine.shape != other.shape:
        raise ValueError(f"ours has the shape {mine.shape}, theirs {other.shape}")
    scale = float(np.abs(other).max(initial=0.0)) or 1.0
    gap = float(np.abs(mine - other).max(initial=0.0))
    if not math.isfinite(gap):
        return math.inf
    return gap / scale
