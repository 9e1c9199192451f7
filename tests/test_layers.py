"""Who may import whom, and how big a file may be: read from the syntax trees, nothing is executed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 400
MAX_TEST_LINES = 500  # tables of cases are long but easy to read

# Module (or package, with all it holds) -> layer. A file may import its own layer's siblings and the layers below.
LAYERS: dict[str, int] = {
    "flowrl": 0,
    "flowrl.config.train": 0,
    "flowrl.config.base": 0,
    "flowrl.config.methods": 0,
    "flowrl.config.sections": 0,
    "flowrl.config.rewards": 0,
    "flowrl.config.strict_yaml": 0,
    "flowrl.config.vocabulary": 0,
    "flowrl.config.options": 0,
    "flowrl.files": 0,
    "flowrl.trajectory": 0,
    "flowrl.randomness": 0,
    "flowrl.progress": 0,
    "flowrl.capabilities": 0,
    "flowrl.samplers": 1,
    "flowrl.objectives.terms": 1,
    "flowrl.advantages.normalise": 1,
    "flowrl.advantages.reward_maps": 1,
    "flowrl.credit": 1,
    "flowrl.advantages.shaping": 1,
    "flowrl.prompts.curriculum": 1,
    "flowrl.objectives.policy_gradient": 1,
    "flowrl.objectives.forward_losses": 1,
    "flowrl.objectives.preference_losses": 1,
    "flowrl.objectives.gradient_paths": 1,
    "flowrl.prompts.pairs": 1,
    "flowrl.statistics.bootstrap": 1,
    "flowrl.media.images": 1,
    "flowrl.prompts.loading": 1,
    "flowrl.prompts.prompt_files": 1,
    "flowrl.prompts.datasets": 1,
    "flowrl.prompts.source_images": 1,
    "flowrl.media.videos": 1,
    "flowrl.media.kept": 1,
    "flowrl.prompts.grids": 1,
    "flowrl.training.prompting": 4,
    "flowrl.commands.plan": 6,
    "flowrl.rewards.comparing.tournaments": 1,
    "flowrl.statistics.kernel_distance": 1,
    "flowrl.statistics.reliability": 1,
    "flowrl.objectives.group_contrast": 1,
    "flowrl.world": 1,
    "flowrl.benchmarks": 1,
    "flowrl.pipelines": 2,
    "flowrl.rewards": 2,
    "flowrl.training.run": 4,
    "flowrl.training.learner": 4,
    "flowrl.training.parts": 4,
    "flowrl.recipes": 5,
    "flowrl.training.heldout": 5,
    "flowrl.training.drift": 4,
    "flowrl.commands.compare": 6,
    "flowrl.statistics.crossed": 1,
    "flowrl.commands.compare.measure": 5,
    "flowrl.commands.report.run": 5,
    "flowrl.commands.train.result": 5,
    "flowrl.commands.train.run": 6,
    "flowrl.commands.serve": 6,
    "flowrl.commands.eval": 6,
    "flowrl.generation.best_of": 5,
    "flowrl.commands.sweep": 6,
    "flowrl.commands.reward": 6,
    "flowrl.media.perturbations": 1,
    "flowrl.generation.rlg": 4,
    "flowrl.commands.sample": 6,
    "flowrl.cli": 6,
    "flowrl.__main__": 6,
}
HEAVY = {"diffusers", "transformers", "peft", "accelerate", "safetensors", "tokenizers", "torchvision", "tensorboard"}
CONFIG = (
    "flowrl.config.train", "flowrl.config.base", "flowrl.config.methods", "flowrl.config.rewards",
    "flowrl.config.sections", "flowrl.config.strict_yaml",
    "flowrl.config.vocabulary",
)  # fmt: skip


def files() -> dict[str, Path]:
    """Every module of the package by import name, at its real path."""
    found = {}
    for folder in ("flowrl", "samplers", "rewards", "pipelines"):
        base = () if folder == "flowrl" else ("flowrl",)
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = (*base, *path.relative_to(ROOT).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = files()


def layer(module: str) -> int:
    """The layer of a module: its own entry, else that of the package it is in."""
    name = module
    while name not in LAYERS or (name == "flowrl" and module != "flowrl"):
        name, dot, _ = name.rpartition(".")
        if not dot:
            raise AssertionError(
                f"{module} has no layer: add it to LAYERS in {Path(__file__).name} (design: who imports whom)"
            )
    return LAYERS[name]


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Modules named by import statements, wherever they stand, with their level of relativeness."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            submodules = [f"{module}.{alias.name}" for alias in node.names if f"{module}.{alias.name}" in MODULES]
            yield from ((name, node.level) for name in submodules or [module])


def violations(module: str, source: str) -> list[str]:
    """What a module of this name may not import."""
    own, wrong = layer(module), []
    for name, level in imports(ast.parse(source)):
        top = name.partition(".")[0]
        if level:
            wrong.append("relative import: write 'from flowrl.x import y'")
        elif top in ("samplers", "rewards", "pipelines", "configs", "assets"):
            wrong.append(f"bare import of {name}: write flowrl.{name}")
        elif top == "flowrl" and name != "flowrl":
            if layer(name) > own:
                wrong.append(f"imports {name} of a higher layer ({own} -> {layer(name)})")
            if {module.split(".")[1], name.split(".")[1]} == {"rewards", "pipelines"}:
                wrong.append(f"imports {name}: pipelines and rewards never import each other")
            if name in CONFIG and own in (1, 2):
                wrong.append(f"imports {name}: layers 1 and 2 take plain arguments")
            if name.startswith("flowrl.recipes") and own == 5 and not module.startswith("flowrl.recipes"):
                wrong.append(f"imports {name}: nobody beside the command line imports a recipe")
        elif top in HEAVY and own < 2:
            wrong.append(f"imports {name}: layers 0 and 1 know torch and numpy only")
        elif module in CONFIG and top in ("torch", "numpy"):
            wrong.append(f"imports {name}: the configuration needs the standard library and yaml only")
    return wrong


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_respect_the_layers(module: str) -> None:
    assert violations(module, MODULES[module].read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("flowrl.samplers.kernels", "from flowrl.pipelines import sd3"),
        ("flowrl.samplers.kernels", "from flowrl import run"),
        ("flowrl.samplers.kernels", "def f():\n    import diffusers"),
        ("flowrl.samplers.kernels", "from flowrl.config.train import load_config"),
        ("flowrl.samplers.kernels", "import rewards"),
        ("flowrl.samplers.kernels", "from rewards.jpeg import x"),
        ("flowrl.samplers.kernels", "from . import schedules"),
        ("flowrl.rewards.compose", "from flowrl.pipelines.sd3 import x"),
        ("flowrl.pipelines.sd3", "import flowrl.rewards"),
        ("flowrl.training.run", "from flowrl.recipes.grpo import main"),
        ("flowrl.training.heldout", "from flowrl.recipes import grpo"),
        ("flowrl.config.train", "import torch"),
        ("flowrl.objectives.policy_gradient", "from flowrl.config.methods import ObjectiveConfig"),
        ("flowrl.trajectory", "from flowrl.samplers import KERNELS"),
    ],
)
def test_the_rule_catches_what_it_is_for(module: str, source: str) -> None:
    assert violations(module, source)


def test_the_rule_lets_the_intended_imports_pass() -> None:
    source = "import torch\nfrom flowrl.trajectory import Schedule\nfrom flowrl.samplers.kernels import ode"
    assert violations("flowrl.samplers.rollout", source) == []
    assert (
        violations("flowrl.recipes.grpo", "from flowrl.training.heldout import x\nfrom flowrl.config.train import y")
        == []
    )
    assert violations("flowrl.cli", "from flowrl.recipes import grpo") == []


def python_files() -> list[str]:
    tests = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")]
    return sorted([*tests, *(str(path.relative_to(ROOT)) for path in MODULES.values())])


@pytest.mark.parametrize("name", python_files())
def test_files_stay_readable(name: str) -> None:
    source = (ROOT / name).read_text()
    lines, limit = source.count("\n"), MAX_TEST_LINES if name.startswith("tests/") else MAX_LINES
    assert lines <= limit, f"{name} has {lines} lines: split it by topic ({limit} at most)"
    if len(ast.parse(source).body) > 1:  # more than a docstring
        assert "from __future__ import annotations" in source, name


def test_root_stays_off_the_path() -> None:
    assert not (ROOT / "conftest.py").exists(), "a conftest.py at the root would make 'import rewards' work by accident"
    assert not (ROOT / "tests" / "__init__.py").exists()
