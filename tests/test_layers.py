"""The house: who may import whom, what lies where, what is used. Read from the syntax trees, nothing is executed."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from house import circles, house_of, listed

from flowrl.config.rewards import built_in_rewards
from flowrl.config.strict_yaml import read_mapping

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 500
MAX_TEST_LINES = 600  # tables of cases are long but easy to read
MAX_FILES = 30  # in a folder

# Folder (or loose module of flowrl/) -> layer. A file imports from its own folder and from folders of its own layer or
# of lower ones; circles are excluded below, so that folders of one layer have an order too.
LAYERS: dict[str, int] = {
    **dict.fromkeys(("__init__", "__main__", "cli", "commands"), 8),
    "pages": 7,
    **dict.fromkeys(("evaluation", "comparing", "planning", "profiling", "health", "publishing", "migrating"), 6),
    "serving": 6,
    "session": 5,
    **dict.fromkeys(("recipes", "workers", "pretraining", "generation"), 4),
    **dict.fromkeys(("training", "runs"), 3),
    **dict.fromkeys(("rewards", "pipelines"), 2),
    **dict.fromkeys(("samplers", "credit", "advantages", "objectives", "benchmarks", "world", "prompts", "media"), 1),
    "rendering": 1,
    **dict.fromkeys(("runtime", "config", "statistics", "trajectory"), 0),
}
LOOSE = {"__init__", "__main__", "cli", "trajectory"}
"""What may lie in flowrl/ itself."""
HEAVY = {"diffusers", "transformers", "peft", "accelerate", "safetensors", "tokenizers", "torchvision", "tensorboard"}
PUBLIC = ("rlg_pipeline", "slot_network", "backends_here")
"""Definitions that no product code uses, since users do; so are names that a package imports as themselves."""
_NAME = re.compile(r"[:.]([A-Za-z_]\w*)$|^([A-Za-z_]\w*)$")  # the end of "module:name", or a name alone


HOUSE = house_of(ROOT)
MODULES = {module: HOUSE.files[name] for module, name in HOUSE.modules.items()}
"""Every module of the package by import name, at its real path."""


def room(module: str) -> str:
    """The folder of flowrl/ that a module lies in, or its own name where it lies loose."""
    return [*module.split("."), "__init__"][1]


def layer(module: str) -> int:
    """The layer of a module's room."""
    if room(module) not in LAYERS:
        raise AssertionError(
            f"{room(module)} has no layer: add it to LAYERS in {Path(__file__).name} (design: who imports whom)"
        )
    return LAYERS[room(module)]


def imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """Modules named by import statements, wherever they stand, with their level of relativeness."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            for alias in node.names:
                whole = f"{module}.{alias.name}"
                yield (whole if whole in MODULES else module), node.level


def nodes_of(module: str) -> list[ast.AST]:
    return HOUSE.nodes[str(MODULES[module].relative_to(ROOT)).removeprefix("flowrl/")]


def violations(module: str, nodes: Iterable[ast.AST]) -> list[str]:
    """What a module of this name may not import."""
    own, wrong = layer(module), []
    for name, level in imports(nodes):
        top = name.partition(".")[0]
        if level:
            wrong.append("relative import: write 'from flowrl.x import y'")
        elif top in ("samplers", "rewards", "pipelines", "configs", "assets"):
            wrong.append(f"bare import of {name}: write flowrl.{name}")
        elif top == "flowrl" and name != "flowrl":
            if layer(name) > own:
                wrong.append(f"imports {name} of a higher layer ({own} -> {layer(name)})")
            if {room(module), room(name)} == {"rewards", "pipelines"}:
                wrong.append(f"imports {name}: pipelines and rewards never import each other")
            if room(name) == "recipes" and layer(module) < LAYERS["session"] and room(module) != "recipes":
                wrong.append(f"imports {name}: nothing below the session imports a recipe")
            if own == 1 and room(name) == "config" and name != "flowrl.config.options":
                wrong.append(f"imports {name}: the pure layers take plain arguments")
        elif top in HEAVY and own < 2:
            wrong.append(f"imports {name}: layers 0 and 1 know torch and numpy only")
        elif room(module) == "config" and top in ("torch", "numpy"):
            wrong.append(f"imports {name}: the configuration needs the standard library and yaml only")
    return wrong


def violations_of(module: str, source: str) -> list[str]:
    return violations(module, ast.walk(ast.parse(source)))


def test_imports_respect_the_layers() -> None:
    found = {module: wrong for module in sorted(MODULES) if (wrong := violations(module, nodes_of(module)))}
    assert not found, listed(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("flowrl.samplers.kernels", "from flowrl.pipelines import sd3"),
        ("flowrl.samplers.kernels", "from flowrl.training import run"),
        ("flowrl.samplers.kernels", "def f():\n    import diffusers"),
        ("flowrl.samplers.kernels", "from flowrl.config.train import load_config"),
        ("flowrl.samplers.kernels", "import rewards"),
        ("flowrl.samplers.kernels", "from rewards.jpeg import x"),
        ("flowrl.samplers.kernels", "from . import schedules"),
        ("flowrl.rewards.compose", "from flowrl.pipelines.families.sd3 import x"),
        ("flowrl.pipelines.families.sd3", "import flowrl.rewards"),
        ("flowrl.training.run", "from flowrl.recipes.grpo import main"),
        ("flowrl.generation.models", "from flowrl.recipes import grpo"),
        ("flowrl.config.train", "import torch"),
        ("flowrl.objectives.terms", "from flowrl.config.methods import ObjectiveConfig"),
        ("flowrl.trajectory", "from flowrl.samplers import KERNELS"),
    ],
)
def test_the_rule_catches_what_it_is_for(module: str, source: str) -> None:
    assert violations_of(module, source)


def test_the_rule_lets_the_intended_imports_pass() -> None:
    source = "import torch\nfrom flowrl.trajectory import Schedule\nfrom flowrl.samplers.kernels import ode"
    assert violations_of("flowrl.samplers.rollout", source) == []
    source = "from flowrl.training.heldout import x\nfrom flowrl.config.train import y"
    assert violations_of("flowrl.recipes.grpo", source) == []
    assert violations_of("flowrl.session.train", "from flowrl.recipes import grpo") == []


# ---- circles ---------------------------------------------------------------------------------------------------------


@cache
def file_graph() -> dict[str, set[str]]:
    """Module -> modules it imports, lazily and for type checking too."""
    return {
        module: {name for name, _ in imports(nodes_of(module)) if name in MODULES and name != module}
        for module in MODULES
    }


def folder_graph() -> dict[str, set[str]]:
    """Folder of the tree -> folders it imports from, parents and children too; loose modules are their own."""

    def folder(module: str) -> str:
        path = MODULES[module].relative_to(ROOT)
        return str(path.with_suffix("") if str(path.parent) == "flowrl" else path.parent)

    graph: dict[str, set[str]] = defaultdict(set)
    for module, names in file_graph().items():
        own = folder(module)
        graph[own] |= set(map(folder, names)) - {own}
    return graph


@pytest.mark.slow
def test_no_file_imports_itself_through_others() -> None:
    assert circles(file_graph()) == []


@pytest.mark.slow
def test_no_folder_imports_itself_through_others() -> None:
    assert circles(folder_graph()) == []


def test_circles_are_found() -> None:
    assert circles({"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"], "e": []}) == [["a", "b", "c"]]
    assert circles({"a": ["b", "c"], "b": ["c"], "c": []}) == []


# ---- what lies where -------------------------------------------------------------------------------------------------


def test_the_root_holds_what_is_listed() -> None:
    assert {path.stem for path in (ROOT / "flowrl").glob("*.py")} == LOOSE
    assert {path.name for path in (ROOT / "flowrl").iterdir() if path.is_dir()} - {"__pycache__"} <= (
        LAYERS.keys() | {"configs", "assets"}
    )


def test_no_folder_is_crowded() -> None:
    count = Counter(path.parent.relative_to(ROOT) for path in MODULES.values())
    assert {str(folder): number for folder, number in count.items() if number > MAX_FILES} == {}
    tests = Counter(path.parent.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py"))
    assert {str(folder): number for folder, number in tests.items() if number > MAX_FILES} == {}


def test_tests_mirror_the_rooms() -> None:
    rooms = {str(path.parent.relative_to(ROOT)).removeprefix("flowrl/") for path in MODULES.values()} | {"flowrl"}
    folders = {str(path.parent.relative_to(ROOT / "tests")) for path in (ROOT / "tests").rglob("test_*.py")}
    assert folders - rooms - {"."} == set()


# ---- what is used ----------------------------------------------------------------------------------------------------


def names_used(nodes: Iterable[ast.AST]) -> Counter[str]:
    """How often names are read, as variables, attributes, or at the end of "module:name" texts."""
    used: Counter[str] = Counter()
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            used[node.id] += 1
        elif isinstance(node, ast.Attribute):
            used[node.attr] += 1
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            used.update(name for pair in _NAME.findall(node.value) for name in pair if name)
    return used


def definitions(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Functions, classes and constants at the top of a module."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Assign):
            yield from ((target.id, node) for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node


@pytest.mark.slow
def test_everything_is_used_or_public() -> None:
    used: Counter[str] = Counter()
    for module in MODULES:
        used.update(names_used(nodes_of(module)))
    used.update(row["place"].partition(":")[2] for row in built_in_rewards().values())
    used.update(row["table"] for row in read_mapping(ROOT / "flowrl/planning/catalogue.yaml")["methods"])
    imports = (node for module in MODULES for node in nodes_of(module) if isinstance(node, ast.ImportFrom))
    used.update(alias.name for node in imports for alias in node.names if alias.asname == alias.name)  # made public
    unused = {
        f"{module}.{name}"
        for module in MODULES
        for name, node in definitions(HOUSE.trees[HOUSE.modules[module]])
        if not name.startswith("__") and name not in PUBLIC and used[name] <= names_used(ast.walk(node))[name]
    }
    assert unused == set(), "use it, delete it, or list it in PUBLIC with its reader"
    assert [name for name in PUBLIC if used[name]] == [], "these are used: take them off the list"


# ---- files -----------------------------------------------------------------------------------------------------------


def python_files() -> list[str]:
    tests = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")]
    return sorted([*tests, *(str(path.relative_to(ROOT)) for path in MODULES.values())])


def unreadable(name: str) -> Iterator[str]:
    """What is wrong with the size and the head of a file."""
    source = (ROOT / name).read_text()
    lines, limit = source.count("\n"), MAX_TEST_LINES if name.startswith("tests/") else MAX_LINES
    if lines > limit:
        yield f"{lines} lines: split it by topic ({limit} at most)"
    if "from __future__ import annotations" not in source and not name.endswith("__init__.py"):
        body = [node for node in ast.parse(source).body if not isinstance(node, ast.Import | ast.ImportFrom)]
        if len(body) > 1:  # more than a docstring
            yield "begins without 'from __future__ import annotations'"


def test_files_stay_readable() -> None:
    found = {name: wrong for name in python_files() if (wrong := list(unreadable(name)))}
    assert not found, listed(found)


def test_root_stays_off_the_path() -> None:
    assert not (ROOT / "conftest.py").exists(), "a conftest.py at the root would make 'import rewards' work by accident"
    assert not list((ROOT / "tests").rglob("__init__.py"))


# ---- what CONTRIBUTING says ------------------------------------------------------------------------------------------


def test_the_map_of_contributing_leads_somewhere() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition("### To change X, open Y")[2].partition("\n### ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "`" in line]
    assert 20 <= len(rows) <= 40
    for row in rows:
        path = ROOT
        for name in re.findall(r"`([^`]+)`", row.split("|")[2]):
            if name.isupper():  # a table in the file named before it
                assert any(found == name for found, _ in definitions(ast.parse(path.read_text()))), row
            else:
                path = ROOT / name
                assert path.exists(), row


def test_every_file_that_contributing_names_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rooms = [ROOT, ROOT / "flowrl"]
    for name in re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9.]*)`", text):
        assert any((room / name).exists() for room in rooms), name


READ_FROM_OTHERS = {"answers", "overlap", "points", "scene_prompts", "tiny_sd3"}
"""Files whose patterns, prompts or published meanings are other people's words."""


_OTHER_WORDS = re.compile(r"(?i)\b\w*picture\w*|\banew\b|\bmend(?:s|ed|ing)?\b")


def test_one_word_per_thing() -> None:
    texts = {module: HOUSE.texts[name] for module, name in sorted(HOUSE.modules.items())}
    found = {
        module: words
        for module, text in texts.items()
        if MODULES[module].stem not in READ_FROM_OTHERS and (words := _OTHER_WORDS.findall(text))
    }
    assert not found, "image, again, fix" + listed(found)
