"""What `flowrl list` lists, read from the sources: tables and docstrings by their syntax trees, nothing is imported.

So a listing needs neither torch nor the libraries of a reward, and there is no second copy of what the code says.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from flowrl.commands.eval.benchmark import BENCHMARKS, REPRODUCES
from flowrl.config.base import read_with_base
from flowrl.config.key_docs import fields_of, first_sentence, key_docs
from flowrl.config.train import TrainConfig
from flowrl.files import read_json

METHODS = {
    "credit.method": ("credit/__init__.py", "CREDIT"),
    "objective.name": ("objectives/policy_gradient.py", "OBJECTIVES"),
    "objective.name (recipe forward)": ("objectives/forward_losses.py", "FORWARD"),
    "objective.name (recipe preference)": ("recipes/preference_settings.py", "OBJECTIVES"),
    "objective.name (recipe backprop)": ("objectives/gradient_paths.py", "PATHS"),
    "shaping.name": ("advantages/shaping.py", "SHAPINGS"),
    "reward_map.name": ("advantages/reward_maps.py", "MAPS"),
    "curriculum.sampling": ("prompts/curriculum.py", "CURRICULA"),
}
"""Key whose value a method is -> the file and the table that names them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One line of a list: `more` is what is said of it when it is asked for by name."""

    name: str
    text: str
    more: tuple[tuple[str, str], ...] = ()


def entries(kind: str) -> list[Entry]:
    """Everything of one kind, in the order of the code; of a configuration by name."""
    makers = {"configs": _configs, "rewards": _rewards, "methods": _methods, "families": _families,
              "benchmarks": _benchmarks, "keys": _keys}  # fmt: skip
    return list(makers[kind]())


def config_files() -> dict[str, Path]:
    """The configurations that ship, by name."""
    return {path.stem: path for path in sorted((_root() / "configs").glob("*.yaml"))}


def head_of(text: str) -> str:
    """The comment that a configuration begins with, without its marks."""
    lines = text.split("\n")
    end = next((k for k, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return "\n".join(line.removeprefix("#").strip() for line in lines[:end])


def table_names(file: str, table: str) -> dict[str, ast.expr]:
    """The keys of a table of a source file, with the expressions that stand for their values."""
    for node in _tree(file).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and target.id == table and isinstance(value, ast.Dict):
            return {str(ast.literal_eval(key)): item for key, item in zip(value.keys, value.values, strict=True) if key}
    raise ValueError(f"{file} has no table {table}")


def families() -> dict[str, Any]:
    """The model families by name: their stock classes and published checkpoints."""
    found: dict[str, Any] = read_json(_root() / "pipelines" / "published.json")["families"]
    return found


def _configs() -> Iterator[Entry]:
    for name, path in config_files().items():
        text = path.read_text(encoding="utf-8")
        model = read_with_base(path)["pipeline"]["model"]
        yield Entry(name=name, text=first_sentence(head_of(text)), more=(("model", model), ("head", head_of(text))))


def _rewards() -> Iterator[Entry]:
    for name, value in table_names("rewards/__init__.py", "REWARDS").items():
        module, _, cls = str(ast.literal_eval(value)).removeprefix("flowrl.").partition(":")
        yield _of_class(name, f"{module.replace('.', '/')}.py", cls)


def _methods() -> Iterator[Entry]:
    for key, (file, table) in METHODS.items():
        for name, value in table_names(file, table).items():
            cls = next((word.value for word in getattr(value, "keywords", ()) if word.arg == "options"), value)
            found = _of_class(name, *_home(file, ast.unparse(cls)))
            choice, _, recipe = key.removesuffix(")").partition(" (recipe ")
            chosen = f"{choice}={name}{f' recipe={recipe}' if recipe else ''}"
            yield Entry(name=name, text=found.text, more=(("key", chosen), *found.more))


def _families() -> Iterator[Entry]:
    for name, facts in families().items():
        text = first_sentence(ast.get_docstring(_tree(f"pipelines/families/{name}.py")) or "")
        models = [f"{model} ({known['licence']})" for model, known in facts["checkpoints"].items()]
        yield Entry(name=name, text=text, more=(("classes", ", ".join(facts["stock"])), ("models", "\n".join(models))))


def _benchmarks() -> Iterator[Entry]:
    for name in BENCHMARKS:
        text = REPRODUCES.get(name, "")
        of_runner = ast.get_docstring(_tree(BENCHMARKS[name].removeprefix("flowrl.").replace(".", "/") + ".py")) or ""
        yield Entry(name=name, text=first_sentence(text or of_runner), more=(("in full", text or of_runner),))


def _keys() -> Iterator[Entry]:
    for doc in key_docs(TrainConfig):
        more = (("takes", doc.kind), *((("default", doc.default),) if doc.default else ()), ("meaning", doc.text))
        yield Entry(name=doc.key, text=first_sentence(doc.text), more=more)


def _of_class(name: str, file: str, cls: str) -> Entry:
    """An entry of a dataclass of options: its docstring, and its fields as what there is more."""
    body = next(node for node in _tree(file).body if isinstance(node, ast.ClassDef) and node.name == cls)
    text, texts = ast.get_docstring(body) or "", fields_of(body)
    more = [("in full", text)]
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id in texts:
            default = "required" if node.value is None else ast.unparse(node.value)
            more.append((f"options.{node.target.id}", f"({default}) {texts[node.target.id]}"))
    return Entry(name=name, text=first_sentence(text), more=tuple(more))


def _home(file: str, cls: str) -> tuple[str, str]:
    """The file that defines a class which another file uses."""
    for node in _tree(file).body:
        if isinstance(node, ast.ImportFrom) and any(alias.name == cls for alias in node.names):
            return f"{(node.module or '').removeprefix('flowrl.').replace('.', '/')}.py", cls
    return file, cls


@cache
def _tree(file: str) -> ast.Module:
    return ast.parse((_root() / file).read_text(encoding="utf-8"))


def _root() -> Path:
    return Path(str(resources.files("flowrl")))
