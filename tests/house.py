"""The house in numbers: `python tests/house.py [FOLDER] [--json FILE] [--walk]` measures a checkout.

It reads the syntax trees of flowrl/, samplers/, rewards/ and pipelines/, of real files alone. Definitions:

- complexity: McCabe's number. One, and one more for each if, loop, handler, assertion, conditional expression, `and` or
  `or`, comprehension and case of a match. What a function within a function adds counts for both.
- circles: strongly connected sets of more than one node. Lazy imports and imports for types count. Among folders, each
  subfolder and each loose module of flowrl/ is a room of its own, and arrows between parent and child count.
- rooms, arrows: folders and loose modules of flowrl/, and pairs of them of which one imports the other.
- one-use helpers: functions at the top of a module whose name begins with `_` and occurs twice in the file's text,
  where it is defined and where it is used.
- flags in messages: texts outside commands/ and cli, but docstrings, that hold ` --word` or begin with `--word`.
- settings walk (`--walk`): a small training runs under a profile until its first rollout. Each call of a product
  function is an event in the function's file if the TrainConfig, or a section of it (any object of a class of
  flowrl.config), is one of its arguments; an event in the same file as the one before is left out. `files` counts the
  files, `returns` the events in a file where one was before, `climbs` the events in a file that imports the one before,
  itself or through others.
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOPS = ("flowrl", "samplers", "rewards", "pipelines")
CONCERNS: dict[str, str] = {  # the longest beginning of a file's path below flowrl/ decides
    "samplers/": "algorithms", "credit/": "algorithms", "advantages/": "algorithms", "objectives/": "algorithms",
    "trajectory": "algorithms", "training/": "loop", "recipes/": "loop", "workers/": "loop", "session/": "loop",
    "runs/": "loop", "commands/train/": "loop", "pipelines/": "pipelines", "rewards/": "rewards", "serving/": "rewards",
    "commands/serve/": "rewards", "commands/reward/": "rewards", "commands/reward/card/": "measuring",
    "commands/eval/": "measuring", "commands/compare/": "measuring", "commands/sweep/": "measuring",
    "commands/report/": "measuring", "commands/plan/": "measuring", "commands/bench/": "measuring",
    "commands/doctor/": "measuring", "commands/sample/": "measuring", "generation/": "measuring",
    "statistics/": "measuring", "evaluation/": "measuring", "comparing/": "measuring", "planning/": "measuring",
    "profiling/": "measuring", "health/": "measuring", "benchmarks/": "benchmarks", "world/": "world and pretrain",
    "pretraining/": "world and pretrain", "config/": "config", "migrating/": "config", "commands/init/": "config",
    "commands/": "commands", "cli": "commands", "commands/watch/": "pages", "html/": "pages", "rendering/": "pages",
    "pages/": "pages",
}  # fmt: skip
_BRANCHES = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.Assert,
    ast.IfExp,
    ast.comprehension,
    ast.match_case,
)
_FLAG = re.compile(r"(?:^|\s)--[a-z]")
_FOREIGN = re.compile(r"ray start --head|git [a-z]+ --\S+")
"""Other programs' command lines."""
Function = ast.FunctionDef | ast.AsyncFunctionDef

_WALKED = """
import json, sys
from pathlib import Path
tops = tuple(f"{Path(top).resolve()}/" for top in json.loads(sys.argv[1]))
events = []
class Rollout(BaseException): pass
def profile(frame, event, _):
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(tops): return
    if code.co_name == "rollout" and "/samplers/" in code.co_filename: raise Rollout
    names = code.co_varnames[:code.co_argcount + code.co_kwonlyargcount]
    kinds = [type(frame.f_locals.get(name)).__module__ for name in names]
    if any(kind.startswith("flowrl.config") for kind in kinds): events.append(code.co_filename)
from flowrl.cli import main
words = sys.argv[2:]
sys.argv = ["flowrl", *words]
sys.setprofile(profile)
try: main(words)
except Rollout: pass
sys.setprofile(None)
print("EVENTS", json.dumps(events))
"""
_WALK = (
    "train",
    "tiny_grpo_geneval",
    "out=run",
    "num_iterations=1",
    "prompts_per_step=2",
    "group_size=4",
    "eval_every=0",
    "threads=1",
    "policy.lora_rank=2",
    "logging.tensorboard=false",
)


def complexities(tree: ast.AST) -> Iterator[tuple[Function, int]]:
    """Every function below a node with McCabe's number, as this file's docstring defines it."""
    found: list[tuple[Function, int]] = []

    def branches(node: ast.AST) -> int:
        own = len(node.values) - 1 if isinstance(node, ast.BoolOp) else isinstance(node, _BRANCHES)
        number = own + sum(map(branches, ast.iter_child_nodes(node)))
        if isinstance(node, Function):
            found.append((node, 1 + number))
        return number

    branches(tree)
    return iter(found)


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The strongly connected sets of more than one node, the largest first."""
    reach = {node: reached(graph, node) for node in graph}
    found = {frozenset(o for o in reach[node] if o != node and node in reach.get(o, ())) | {node} for node in graph}
    return sorted((sorted(one) for one in found if len(one) > 1), key=lambda one: (-len(one), one))


def reached(graph: Mapping[str, Iterable[str]], start: str) -> set[str]:
    """Every node that arrows lead to from a node, through others too."""
    found, left = set[str](), [start]
    while left:
        new = set(graph.get(left.pop(), ())) - found
        found |= new
        left += new
    return found


def listed(found: Mapping[str, object]) -> str:
    """All that offend, a line each: pytest shortens what it compares."""
    return "".join(f"\n{name}: {wrong}" for name, wrong in found.items())


class House:
    """A checkout's product, parsed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        paths = [path for top in TOPS for path in sorted((root / top).rglob("*.py"))]
        self.files = {str(path.relative_to(root)).removeprefix("flowrl/"): path for path in paths}
        self.texts = {name: path.read_text() for name, path in self.files.items()}
        self.trees = {name: ast.parse(text) for name, text in self.texts.items()}
        self.nodes = {name: list(ast.walk(tree)) for name, tree in self.trees.items()}
        self.modules = {self._module(name): name for name in self.files}

    @cached_property
    def functions(self) -> list[tuple[str, Function, int]]:
        """File, function and complexity of every function."""
        return [(name, *found) for name, tree in self.trees.items() for found in complexities(tree)]

    @staticmethod
    def _module(name: str) -> str:
        return ".".join(("flowrl", *Path(name).with_suffix("").parts)).removesuffix(".__init__")

    @staticmethod
    def room(name: str) -> str:
        """The folder of flowrl/ or the loose module that a file is or lies in."""
        return Path(name).parts[0].removesuffix(".py")

    @staticmethod
    def folder(name: str) -> str:
        """The folder that a file lies in, with its parents; a loose module's own name."""
        return str(Path(name).parent) if "/" in name else name.removesuffix(".py")

    @classmethod
    def command(cls, name: str) -> str:
        """The same, but of flowrl/commands each command."""
        return "/".join(Path(name).parts[:2]) if name.startswith("commands/") else cls.room(name)

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """File -> files that it imports, wherever the statement stands."""
        graph: dict[str, set[str]] = {}
        for name, nodes in self.nodes.items():
            found = set[str]()
            for node in nodes:
                if isinstance(node, ast.Import):
                    found |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    whole = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                    found |= {one if one in self.modules else str(node.module) for one in whole.values()}
            graph[name] = {self.modules[one] for one in found & self.modules.keys()} - {name}
        return graph

    def grouped(self, group: Callable[[str], str]) -> dict[str, set[str]]:
        """The arrows among groups of files."""
        graph: dict[str, set[str]] = {group(name): set() for name in self.files}
        for name, others in self.imports.items():
            graph[group(name)] |= {group(other) for other in others} - {group(name)}
        return graph

    def concern(self, name: str) -> str:
        """What a file is about, by the table."""
        if Path(name).stem == "page":
            return "pages"
        return CONCERNS[max(found, key=len)] if (found := [one for one in CONCERNS if name.startswith(one)]) else "rest"

    def lines(self, name: str) -> int:
        return len(self.texts[name].splitlines())

    def one_use_helpers(self) -> list[tuple[str, int]]:
        """Helpers used once, with their lines."""
        words = {name: Counter(re.findall(r"\w+", text)) for name, text in self.texts.items()}
        return [
            (f"{name}:{node.name}", (node.end_lineno or 0) - node.lineno + 1)
            for name, tree in self.trees.items()
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name.startswith("_") and words[name][node.name] == 2
        ]

    def namespaces(self) -> list[str]:
        """Functions with a parameter of type Namespace."""
        return [
            f"{name}:{function.name}"
            for name, function, _ in self.functions
            for every in [[*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]]
            if any(one.annotation is not None and "Namespace" in ast.unparse(one.annotation) for one in every)
        ]

    def texts_where(self, test: Callable[[str], object], rooms: Iterable[str]) -> list[str]:
        """Texts of code outside of rooms that pass a test, as file:line: text; docstrings are left out."""
        found = []
        for name, nodes in self.nodes.items():
            bare = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
            for node in nodes if self.room(name) not in rooms else []:
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare:
                    if test(node.value):
                        found.append(f"{name}:{node.lineno}: {node.value.strip()[:80]}")
        return found

    def found(self, pattern: str, rooms: Iterable[str] = ()) -> list[str]:
        """Lines of text outside of rooms in which a pattern occurs, as file:line."""
        return [
            f"{name}:{number}"
            for name, text in self.texts.items()
            if self.room(name) not in rooms
            for number, line in enumerate(text.splitlines(), 1)
            for _ in re.findall(pattern, line)
        ]


@cache
def house_of(root: Path) -> House:
    """A checkout, parsed once a process."""
    gc.disable()  # it would look at millions of nodes again and again, and find nothing
    try:
        return House(root)
    finally:
        gc.freeze()
        gc.enable()


def measure(root: Path = ROOT) -> dict[str, Any]:
    """Every figure of a checkout but the walk, by name; lists stand beside the numbers that count them."""
    house = house_of(root)
    numbers = {f"{name}:{function.name}": number for name, function, number in house.functions}
    every = [number for *_, number in house.functions]
    helpers, namespaces = house.one_use_helpers(), house.namespaces()
    concerns, printed = Counter[str](), Counter[str]()
    for name in house.files:
        concerns[house.concern(name)] += house.lines(name)
    classes = defaultdict[str, list[str]](list)
    for name, nodes in house.nodes.items():
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(name)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                printed[house.room(name)] += node.func.id in ("print", "say")
    public = [function for _, function, _ in house.functions if not function.name.startswith("_")]
    said = sum(ast.get_docstring(function) is not None for function in public)
    rooms, folders = house.grouped(house.room), house.grouped(house.folder)
    each_command = house.grouped(house.command)
    inside = [one for one in namespaces if one.startswith("commands/")]
    unlike = [one for one in inside if one.rpartition(":")[2] not in ("run", "add_arguments")]
    flags = house.texts_where(lambda text: _FLAG.search(_FOREIGN.sub("", text)), ("commands", "cli"))
    geneval = house.texts_where("geneval".__eq__, ("rewards", "benchmarks"))
    recipes = house.found(r"\.recipe (?:==|!=|in )", ("recipes",))
    argv = house.found(r"\bsys\.argv\b", ("cli", "__main__"))
    repeated = {name: where for name, where in sorted(classes.items()) if len(where) > 1}
    file_circles, folder_circles = circles(house.imports), circles(folders)
    return {
        "files": len(house.files), "lines": sum(map(house.lines, house.files)),
        "lines by concern": dict(sorted(concerns.items())),
        "lines of commands": sum(house.lines(name) for name in house.files if house.room(name) == "commands"),
        "loose modules": sum("/" not in name for name in house.files),
        "circles of files": len(file_circles), "files on circles": file_circles,
        "circles of folders": len(folder_circles), "folders in circles": sum(map(len, folder_circles)),
        "folders on circles": folder_circles,
        "rooms": len(rooms), "arrows": sum(map(len, rooms.values())),
        "rooms, each command one": len(each_command), "arrows, each command one": sum(map(len, each_command.values())),
        "functions": len(every), "complexity > 10": sum(n > 10 for n in every),
        "complexity > 15": sum(n > 15 for n in every),
        "most complex": dict(sorted(numbers.items(), key=lambda one: (-one[1], one[0]))[:20]),
        "one-use helpers": len(helpers), "lines of one-use helpers": sum(lines for _, lines in helpers),
        "fmt: skip": sum(text.count("fmt: skip") for text in house.texts.values()),
        "fmt: skip in tests": sum(path.read_text().count("fmt: skip") for path in (root / "tests").rglob("*.py")),
        "Namespace outside commands": len(namespaces) - len(inside),
        "Namespace in commands, but run and add_arguments": len(unlike),
        "functions with a Namespace": [*sorted(set(namespaces) - set(inside)), *sorted(unlike)],
        "class names more than once": len(repeated), "repeated classes": {k: len(v) for k, v in repeated.items()},
        "public functions with a docstring, %": round(100 * said / len(public), 1),
        "flags in messages": len(flags), "messages with flags": flags,
        "sys.argv outside cli": len(argv), "reads of sys.argv": argv,
        "prints": sum(printed.values()), "prints by room": {k: v for k, v in sorted(printed.items()) if v},
        "recipes compared outside recipes": len(recipes), "comparisons of recipes": recipes,
        '"geneval" outside rewards and benchmarks': len(geneval), "names of geneval": geneval,
    }  # fmt: skip


def walk(root: Path = ROOT, python: str = sys.executable) -> dict[str, int]:
    """Files, climbs and returns of a run's settings; trains for some seconds."""
    house = house_of(root)
    real = {str(path.resolve()): name for name, path in house.files.items()}
    with tempfile.TemporaryDirectory() as folder:
        tops = json.dumps([str(root / top) for top in TOPS])
        environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [python, "-c", _WALKED, tops, *_WALK]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("EVENTS ")]
    if not lines:
        raise SystemExit(f"the training ended before its first rollout:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    events = [real[str(Path(one).resolve())] for one in json.loads(lines[-1].removeprefix("EVENTS "))]
    events = [one for before, one in pairwise(["", *events]) if one != before]
    climbs = sum(before in reached(house.imports, now) for before, now in pairwise(events))
    return {"files": len(set(events)), "climbs": climbs, "returns": len(events) - len(set(events))}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a checkout.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT, help="checkout (default: this one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file to write the figures to, lists too")
    parser.add_argument("--walk", action="store_true", help="train for some seconds and follow the run's settings")
    asked = parser.parse_args()
    root = asked.folder.resolve()
    commit = subprocess.run(["git", "-C", str(root), "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True)
    head = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": commit.stdout.strip()}
    figures = measure(root)
    if asked.walk:
        figures["settings walk"] = walk(root)
    for name, value in figures.items():
        if isinstance(value, int | float):
            print(f"{value:>10,}  {name}")
        elif isinstance(value, dict):
            print(f"{'':12}{name}: " + ", ".join(f"{key} {one:,}" for key, one in value.items()))
    if asked.json:
        head["command"] = "python tests/house.py" + " --walk" * asked.walk
        asked.json.write_text(json.dumps(head | figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
