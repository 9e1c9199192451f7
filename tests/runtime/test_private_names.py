"""Private names of other libraries: each is there in what is installed, and none is used outside its one file."""

from __future__ import annotations

import ast
import importlib
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from peft import LoraConfig

from flowrl.runtime import private_names
from flowrl.runtime.private_names import MEMBERS, NAMES, Private, found, gone

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "flowrl" / "runtime/private_names.py"
FILES = sorted(
    path for folder in ("flowrl", "samplers", "rewards", "pipelines") for path in (ROOT / folder).rglob("*.py")
)
ALL = (*NAMES.values(), *MEMBERS)
TABLED = {entry.member for entry in ALL if entry.member.startswith("_")}
LIBRARIES = ("accelerate", "diffusers", "peft", "transformers")
"""Of these the package itself and its `utils` are documented, and what lies in other modules moves."""
_FOREIGN = re.compile(rf"({'|'.join(LIBRARIES)})\.(?!utils$)\w[\w.]*(:\w+)?|torch(\.\w+)*\._[a-z][\w.]*(:\w+)?")


# ---- they are there --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", ALL, ids=lambda entry: str(entry.path))
def test_the_name_is_in_the_installed_release(entry: Private) -> None:
    found(entry)  # says which release moved it


def test_names_are_imported_from_the_one_file_as_what_they_are() -> None:
    from diffusers.models.attention_processor import Attention

    assert private_names.Attention is Attention
    with pytest.raises(ImportError, match="Nonsense"):
        from flowrl.runtime.private_names import Nonsense  # noqa: F401


@pytest.mark.parametrize(
    "path",
    ["peft:LoraConfig._no_such", "peft.no_such_module:Linear", "peft:LoraConfig.__init__(_no_such)", "peft:_no_such"],
)
def test_a_name_that_is_gone_is_told_with_the_releases_that_have_it(path: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"has no {path}, needed by flowrl (for a test): peft 0.19 to 0.21")):
        found(Private(path, "for a test", "0.19"))


def test_what_is_said_of_a_name_depends_on_the_installed_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_names, "TESTED", {"peft": ("0.18.0", "0.21.2")})
    entry = Private("peft:Nothing._at_all", "for a test", "0.19.0")
    assert "peft 0.22.0 has no peft:Nothing._at_all, " in gone(entry, "0.22.0")
    assert "so that it was moved after 0.21.2, by 0.22.0 at the latest" in gone(entry, "0.22.0")
    assert "earlier ones do not; install 'peft>=0.19.0,<=0.21.2'" in gone(entry, "0.9.1")
    assert "moved" not in gone(entry, "0.20.0")


@pytest.mark.parametrize("loaded", [False, True])
def test_a_lora_looks_for_layers_of_bitsandbytes_where_it_is_loaded(
    loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere PEFT would import it, for more than a second, to see that there are none."""
    private_names.register_layers(LoraConfig(), {})
    name = "bitsandbytes.nn"
    monkeypatch.delitem(sys.modules, name, raising=False)
    if loaded:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    model: Any = importlib.import_module("peft.tuners.lora.model")
    assert (model.is_bnb_available(), model.is_bnb_4bit_available()) == (loaded, loaded)


def test_members_of_instances_are_looked_up_in_what_their_class_declares() -> None:
    assert found(Private("torch:nn.Module._buffers", "")) is None
    with pytest.raises(ValueError, match=r"has no torch:nn\.Module\._no_buffers"):
        found(Private("torch:nn.Module._no_buffers", ""))


def test_the_table_and_its_file_agree() -> None:
    """Every private member that the file touches is in the table, and all of the table are touched or overridden."""
    tree = ast.parse(HOME.read_text())
    nodes = list(ast.walk(tree))
    touched = {node.attr for node in nodes if isinstance(node, ast.Attribute) and private(node.attr)}
    strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    members = {entry.member for entry in MEMBERS}
    assert touched <= members
    overridden = {name for _, name in overrides()}
    assert {name for name in members if private_text(name)} <= touched | overridden | strings


# ---- and nowhere else ------------------------------------------------------------------------------------------------


def private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name.strip("_") != ""


def own_names(nodes: list[ast.AST]) -> set[str]:
    """Private names that a file or a class defines itself: functions, classes, variables, fields."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                names.add(node.attr)
    return names


def foreign_uses(source: str) -> Iterator[str]:
    """Private or undocumented names of other libraries in a source, with their lines."""
    nodes = list(ast.walk(ast.parse(source)))
    own = own_names(nodes)
    for node in nodes:
        for name in _named(node, own):
            yield f"line {getattr(node, 'lineno', '?')}: {name}"


def _named(node: ast.AST, own: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if _FOREIGN.fullmatch(alias.name) or "._" in f".{alias.name}")
    elif isinstance(node, ast.ImportFrom) and node.module and node.module != "__future__":
        for alias in node.names:
            if _FOREIGN.fullmatch(node.module) or any(map(private, (*node.module.split("."), alias.name))):
                yield f"{node.module}.{alias.name}"
    elif isinstance(node, ast.Attribute) and private(node.attr):
        if node.attr not in own or (node.attr in TABLED and not _on_self(node)):
            yield ast.unparse(node)
    elif isinstance(node, ast.Attribute) and _FOREIGN.fullmatch(dotted := ast.unparse(node)):
        if dotted.split(".")[1].islower() and dotted.split(".")[1] != "utils" and dotted.count(".") > 1:
            yield dotted
    elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in (
        "getattr", "setattr", "delattr", "hasattr", "object", "attrgetter",
    ):  # fmt: skip
        for given in node.args:
            if isinstance(given, ast.Constant) and isinstance(given.value, str) and private_text(given.value):
                yield given.value
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _FOREIGN.fullmatch(node.value):
        yield node.value


def private_text(name: str) -> bool:
    return private(name) and name.isidentifier()


def _on_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


@cache
def overrides() -> list[tuple[str, str]]:
    """Private methods of flowrl's classes that stand for one of a class of another library: (class, method)."""
    overridden = []
    for path in FILES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts if parts[0] == "flowrl" else ("flowrl", *parts))
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.ClassDef) or not node.bases:
                continue
            names = {name.name for name in node.body if isinstance(name, ast.FunctionDef) and private(name.name)}
            if names:
                kind = getattr(importlib.import_module(module), node.name)
                foreign = [base for base in kind.__mro__[1:] if not base.__module__.startswith("flowrl")]
                overridden += [(node.name, name) for name in names if any(hasattr(base, name) for base in foreign)]
    return overridden


@pytest.mark.slow
def test_no_other_file_uses_private_names() -> None:
    uses = {str(path.relative_to(ROOT)): list(foreign_uses(path.read_text())) for path in FILES if path != HOME}
    left = {name: lines for name, lines in uses.items() if lines}
    assert left == {}, "enter it in flowrl/runtime/private_names.py, with the reason, and use it from there"


def test_private_methods_that_are_overridden_are_in_the_table() -> None:
    assert {name for _, name in overrides()} <= TABLED


@pytest.mark.parametrize(
    "source",
    [
        "pipe._pack_latents(x)",
        "x = layer._active_adapter",
        "class A:\n    _cp_plan: int\n\ndef f(network):\n    return network._cp_plan",
        "import torch._dynamo",
        "from torch._utils import IMPORT_MAPPING",
        "from torch.distributed import _functional_collectives as c",
        "from diffusers.models.embeddings import TimestepEmbedding",
        "def f():\n    from peft.tuners.lora import Linear",
        "import transformers.models.gemma2",
        "import transformers\ntransformers.models.gemma2.Gemma2Model",
        "getattr(pipe, '_execution_device')",
        "patch.object(pipe, '_execution_device', None)",
        "importlib.import_module('diffusers.models.unets')",
        "x = 'torch._dynamo' in sys.modules",
        "class B(Linear):\n    def f(self):\n        return self._disable_adapters",
    ],
)
def test_the_rule_finds_what_it_is_for(source: str) -> None:
    assert list(foreign_uses(source))


def test_the_rule_lets_own_names_and_documented_ones_pass() -> None:
    source = textwrap.dedent("""
        import torch.distributed as dist
        from accelerate.utils import gather_object
        from diffusers import FluxPipeline
        from diffusers.utils import BaseOutput
        from torch.utils.checkpoint import checkpoint

        _LIMIT = 3

        class A:
            _attention_backend = None

            def __init__(self):
                self._kept = _LIMIT

            def of(self, other):
                return self._attention_backend or other._kept
    """)
    assert list(foreign_uses(source)) == []
