"""The lists of `flowrl list`, read from tables and docstrings in the sources' syntax trees."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from flowrl.config.base import config_files, read_with_base
from flowrl.config.key_docs import fields_of, first_sentence, key_docs
from flowrl.config.options import unknown_name
from flowrl.config.rewards import built_in_rewards
from flowrl.config.source_syntax import PACKAGE, class_of, classes_in, tree_of
from flowrl.config.strict_yaml import read_mapping
from flowrl.config.train import TrainConfig
from flowrl.evaluation.benchmark import BENCHMARKS
from flowrl.runtime.files import read_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A key that names methods of a recipe, and the table or class that holds them."""

    key: str
    heading: str
    module: str
    table: str
    recipe: str = "grpo"
    method: str = ""
    value: str = ""

    def classes(self) -> dict[str, str]:
        """Each method's name and the class of its options."""
        return {self.method: self.table} if self.method else classes_in(self.module, self.table)


METHODS = tuple(Choice(**row) for row in read_mapping(Path(__file__).with_suffix(".yaml"))["methods"])
"""Keys that name methods; an empty recipe stands for all recipes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogueEntry:
    """One line of a list, its heading, and its full text when asked for by name."""

    name: str
    text: str
    group: str = ""
    more: tuple[tuple[str, str], ...] = ()


def entries(kind: str) -> list[CatalogueEntry]:
    """All entries of one kind, in the order of the code; configurations by name."""
    if kind == "rewards":
        return [_of_class(name, *row["place"].split(":")) for name, row in built_in_rewards().items()]
    if kind == "benchmarks":
        known = {
            name: one.reproduces or ast.get_docstring(tree_of(one.rules)) or "" for name, one in BENCHMARKS.items()
        }
        return [CatalogueEntry(name=k, text=first_sentence(v), more=(("in full", v),)) for k, v in known.items()]
    return list({"configs": _configs, "methods": _methods, "families": _families, "keys": _keys}[kind]())


def missing_name(kind: str, name: str, found: list[CatalogueEntry]) -> str:
    """The sentence for a name that no entry has: where a paper or a published model of that name is told of, so that
    `flow_grpo` leads to "Flow-GRPO"; else the nearest name."""
    wanted = _letters(name)

    def telling(listed: Iterable[CatalogueEntry]) -> str:
        return ", ".join(one.name for one in listed if wanted and wanted in _letters(f"{one.text} {one.more}"))

    if kind in ("methods", "families", "benchmarks"):
        if told := telling(found):
            return f"no name in {kind} is {name!r}; told of under: {told}"
        if kind == "methods" and (told := telling(_keys())):
            return f"no name in methods is {name!r}; a key tells of it, see 'flowrl list keys NAME': {told}"
    return unknown_name(f"name in {kind}", name, [entry.name for entry in found])


def _letters(text: str) -> str:
    return re.sub(r"[\W_]", "", text).lower()


def head_of(text: str) -> str:
    """The comment that a configuration begins with, without its marks."""
    comment = takewhile(lambda line: line.startswith("#"), text.split("\n"))
    return "\n".join(line.removeprefix("#").strip() for line in comment)


def families() -> dict[str, Any]:
    """The model families by name: their stock classes and published checkpoints."""
    return dict(read_json(PACKAGE / "pipelines" / "published.json")["families"])


def _configs() -> Iterator[CatalogueEntry]:
    for name, path in config_files().items():
        text = path.read_text(encoding="utf-8")
        model = read_with_base(path)["pipeline"]["model"]
        more = (("folder", path.parent.name), ("model", model), ("head", head_of(text)))
        yield CatalogueEntry(name=name, text=first_sentence(head_of(text)), group=path.parent.name, more=more)


def _methods() -> Iterator[CatalogueEntry]:
    for choice in METHODS:
        recipe = f" recipe={choice.recipe}" if choice.recipe not in ("", "grpo") else ""
        for name, cls in choice.classes().items():
            found = _of_class(name, choice.module, cls)
            key = f"{choice.key}{choice.value or f'={name}{recipe}'}"
            group = f"{choice.heading}: {choice.key}{recipe and f',{recipe}'}"
            more = (("key", key), *found.more[: 1 if choice.method else None])  # fields of a section are keys
            yield CatalogueEntry(name=name, text=found.text, group=group, more=more)


def _families() -> Iterator[CatalogueEntry]:
    for name, facts in families().items():
        own = (ast.get_docstring(tree_of(f"flowrl.pipelines.families.{name}")) or "").partition(": any")[0]
        models = [f"{model} ({known['licence']})" for model, known in facts["checkpoints"].items()]
        text = f"{first_sentence(own)}: {', '.join(dict.fromkeys(m.split('/')[-1] for m in facts['checkpoints']))}"
        yield CatalogueEntry(
            name=name, text=text, more=(("classes", ", ".join(facts["stock"])), ("models", "\n".join(models)))
        )


def _keys() -> Iterator[CatalogueEntry]:
    for doc in key_docs(TrainConfig):
        more = (("takes", doc.kind), *((("default", doc.default),) if doc.default else ()), ("meaning", doc.text))
        yield CatalogueEntry(name=doc.key, text=first_sentence(doc.text), more=more)


def _of_class(name: str, module: str, cls: str) -> CatalogueEntry:
    """An entry of a dataclass of options: its docstring, and its fields as what there is more."""
    _, body = class_of(module, cls)
    text, texts = ast.get_docstring(body) or "", fields_of(body)
    more = [("in full", text)]
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id in texts:
            default = "required" if node.value is None else ast.unparse(node.value)
            more.append((f"options.{node.target.id}", f"({default}) {texts[node.target.id]}"))
    return CatalogueEntry(name=name, text=first_sentence(text), more=tuple(more))
