"""Runs the tests that a change can reach, the nearest first, within a budget of seconds: `make affected`.

`make affected ARGS="BASE --seconds 120"` takes what differs from a commit; without BASE it is what is not committed. A
test is as far from a change as there are imports between them. Arrows are import statements, wherever they stand, and
texts like "flowrl.rewards.jpeg:Jpeg" in tables; a file that is no module is used by those that name it or its folder.
Changed test files always run. Slow tests never do, and a file that does not fit runs without its dearest tests.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from duration_table import UNKNOWN, Table, file_of, read_table
from house import ROOT, TOPS

KEPT = Path(".pytest_cache") / "arrows.json"
CONFTEST = "tests/conftest.py"
_DOTTED = re.compile(r"""["'](flowrl(?:\.\w+)+)(?::\w+)?(\.\{|["'])""")
_LONG_TEXT = re.compile(r"""(\"{3}|'{3}).*?\1""", re.DOTALL)
_IMPORT = re.compile(r"^\s*(?:from +([\w.]+) +import +(\([^)]*\)|[^\n#]+)|import +([^\n#]+))", re.MULTILINE)
_HELPER = re.compile(r"""["'](\w+)(?::\w+|\.\w+)["']""")


# ---- arrows ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkout:
    """A checkout's Python files, and who uses whom."""

    root: Path
    texts: Mapping[str, str]
    """Path below the root -> text."""
    modules: Mapping[str, str]
    """Import name -> path."""
    uses: Mapping[str, frozenset[str]]
    """Path -> paths that it imports or names in a table."""


def read_checkout(root: Path = ROOT) -> Checkout:
    """Reads every Python file; what a file imports is kept until it changes."""
    folders = [*TOPS, "tests", "docs"]
    paths = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    texts = {path.relative_to(root).as_posix(): path.read_text() for path in paths}
    modules = names_of(root, texts)
    kept = root / KEPT
    before = json.loads(kept.read_text()) if kept.is_file() else {}
    now = {name: [_stamp(root / name), before.get(name, [None, []])[1]] for name in texts}
    for name, (stamp, _) in now.items():
        if before.get(name, [None])[0] != stamp:
            now[name][1] = sorted(imported(texts[name]) | named(texts[name]))
    if now != before:
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(json.dumps(now))
    uses = {name: resolved(words, modules) - {name} for name, (_, words) in now.items()}
    return Checkout(root, texts, modules, uses | of_fixtures(texts, modules))


def _stamp(path: Path) -> str:
    found = path.stat()
    return f"{found.st_mtime_ns} {found.st_size}"


def names_of(root: Path, texts: Iterable[str]) -> dict[str, str]:
    """Import name -> path: `flowrl.…` for the product, a bare name for what lies on pytest's path."""
    project = root / "pyproject.toml"
    options = tomllib.loads(project.read_text())["tool"]["pytest"]["ini_options"] if project.is_file() else {}
    bare = {*options.get("pythonpath", ()), "tests"}
    found = {}
    for name in texts:
        path = Path(name)
        if path.parts[0] in TOPS:
            parts = ("flowrl", *path.with_suffix("").parts[path.parts[0] == "flowrl" :])
            found[".".join(parts).removesuffix(".__init__")] = name
        elif path.parent.as_posix() in bare:
            found[path.stem] = name
    return found


def imported(text: str) -> set[str]:
    """Names that import statements bring in, wherever they stand; without Python's parser, which takes 15 times as
    long. A statement begins its line, as the formatter writes it."""
    found = set[str]()
    for module, names, whole in _IMPORT.findall(_LONG_TEXT.sub("", text)):
        words = [name.split() for name in re.sub(r"#.*", "", names or whole).strip("() \n").split(",")]
        found |= {f"{module}.{name}" if module else name for name, *_ in filter(None, words)}
    return found


def named(text: str) -> set[str]:
    """Names in texts: "flowrl.a.b:C", "helper:f", and "flowrl.a.*" for f"flowrl.a.{name}"."""
    dotted = {f"{name}.*" if end != '"' and end != "'" else name for name, end in _DOTTED.findall(text)}
    return dotted | set(_HELPER.findall(text))


def resolved(words: Iterable[str], modules: Mapping[str, str]) -> frozenset[str]:
    """The files behind names: the longest beginning that is a module, or all modules of a package."""
    found = set[str]()
    for word in words:
        if word.endswith(".*"):
            found |= {path for name, path in modules.items() if name.startswith(word[:-1])}
            continue
        while word and word not in modules:
            word = word.rpartition(".")[0]
        if word:
            found.add(modules[word])
    return frozenset(found)


def of_fixtures(texts: Mapping[str, str], modules: Mapping[str, str]) -> dict[str, frozenset[str]]:
    """Conftest's arrows, to what it imports at its top, and those of each fixture in it as a node of its own."""
    found: dict[str, frozenset[str]] = {}
    if CONFTEST in texts:
        body = ast.parse(texts[CONFTEST]).body
        functions = [node for node in body if isinstance(node, ast.FunctionDef)]
        rest = [node for node in body if node not in functions]
        found = {f"{CONFTEST}::{node.name}": resolved(imported(ast.unparse(node)), modules) for node in functions}
        top = "\n".join(map(ast.unparse, rest))
        plugins = re.findall(r"\w+", " ".join(re.findall("pytest_plugins.*", top)))
        found[CONFTEST] = resolved(imported(top) | named(texts[CONFTEST]) | set(plugins), modules)
    return found


def distances(checkout: Checkout, changed: Iterable[str]) -> dict[str, int]:
    """Path -> steps from the nearest changed file, for every file that a change can reach."""
    users = defaultdict[str, set[str]](set)
    for name, others in checkout.uses.items():
        for other in others:
            users[other].add(name)
    tests = [name for name in checkout.texts if is_test(name)]
    users[CONFTEST] |= set(tests)
    for node in checkout.uses:
        if fixture := node.partition(f"{CONFTEST}::")[2]:
            users[node] |= those_with(checkout, [fixture], r"\b{}\b") & set(tests)
    modules = set(checkout.modules.values())
    found: dict[str, int] = {}
    edge = set[str]()
    for name in changed:
        found[name] = 0
        edge.add(name)
        if name not in modules and not is_test(name):
            users[name] |= users_of_data(checkout, name)
    while edge:
        edge = {user for name in edge for user in users[name]} - found.keys()
        found |= dict.fromkeys(edge, 1 + max(found.values()))
    return found


def users_of_data(checkout: Checkout, name: str) -> set[str]:
    """Files that name a file of data, by its name or its stem, and those that name its outermost folder.

    Words of a room of code stand everywhere; there the folder counts only if nothing names the file.
    """
    path = Path(name)
    words = [path.name, *([path.stem] if "_" in path.stem and path.suffix != ".md" else [])]
    found = those_with(checkout, words, r"(?<![\w-]){}(?![\w-])")
    folders = [folder for folder in path.parts[:-1] if folder not in (*TOPS, "tests")] or path.parts[:-1]
    if folders and not (found and path.parts[0] in TOPS):
        found |= those_with(checkout, folders[:1], r"""["'/]{}["'/]""")
    return found


def those_with(checkout: Checkout, words: Iterable[str], pattern: str) -> set[str]:
    """Files in which one of some words stands as a pattern says; most hold none, and are not searched."""
    patterns = {word: re.compile(pattern.format(re.escape(word))) for word in words}
    texts = checkout.texts.items()
    return {name for name, text in texts if any(word in text and one.search(text) for word, one in patterns.items())}


def is_test(name: str) -> bool:
    return name.startswith("tests/") and Path(name).name.startswith("test_") and name.endswith(".py")


# ---- choice ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What runs, in this order, and what of it is left out."""

    files: tuple[str, ...]
    without: tuple[str, ...]
    """Tests of those files that do not fit."""
    seconds: float
    left: Mapping[str, float]
    """Files that a change can reach and that do not run, with their seconds."""


def choose(table: Table, found: Mapping[str, int], changed: Collection[str], budget: float) -> Choice:
    """Takes the nearest files, of equally near ones those of a changed room and then the cheapest; 0 is no budget.

    A test that has a changed file's name is as near as can be: most of those import it through its room.
    """
    mirrors = {f"test_{Path(name).stem}" for name in changed}
    rooms = {str(Path(name).parent).removeprefix("flowrl/").removeprefix("tests/") for name in changed}
    seconds, rest = table.of_files(slow=False), table.rest()
    tests = defaultdict[str, dict[str, float]](dict)
    for test, one in table.tests.items():
        if test not in table.slow:
            tests[file_of(test)][test] = one

    def place(name: str) -> tuple[int, bool, float]:
        room = str(Path(name).parent).removeprefix("tests/")
        steps = min(found[name], 1) if Path(name).stem in mirrors else found[name]
        return steps, room not in rooms, seconds.get(name, UNKNOWN)

    taken, without, left, spent = list[str](), list[str](), dict[str, float](), 0.0
    for name in sorted(filter(is_test, found), key=place):
        need = seconds.get(name, UNKNOWN)
        if budget and found[name] and spent + need > budget:
            fitting, dear = rest.get(name, UNKNOWN), list[str]()
            for test, one in sorted(tests[name].items(), key=lambda one: one[1]):
                if spent + fitting + one <= budget:
                    fitting += one
                else:
                    dear.append(test)
            if spent + fitting > budget:
                left[name] = need
                continue
            without += dear
            need = fitting
        taken.append(name)
        spent += need
    return Choice(files=tuple(taken), without=tuple(without), seconds=spent, left=left)


def changed_files(root: Path, base: str) -> list[str]:
    """Files that differ from a commit, those that git does not know yet included, and that are still there or were."""

    def git(*words: str) -> list[str]:
        command = ["git", "-C", str(root), *words]
        return [
            one for one in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0") if one
        ]

    return sorted({*git("diff", "--name-only", "-z", base), *git("ls-files", "--others", "--exclude-standard", "-z")})


def told(choice: Choice, changed: Collection[str]) -> Iterator[str]:
    yield f"{len(changed)} changed files; {len(choice.files)} files of tests, about {choice.seconds:.0f} s"
    if choice.without or choice.left:
        more = f"{len(choice.left)} files ({sum(choice.left.values()):.0f} s) and {len(choice.without)} tests"
        yield f"left out, because they do not fit: {more}; make test runs them"


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests that a change can reach, the nearest first.")
    base = os.environ.get("PRE_COMMIT_FROM_REF", "HEAD")  # what a push adds to, where pre-commit asks
    parser.add_argument("base", nargs="?", default=base, help="commit that the change is counted from (default: HEAD)")
    parser.add_argument("--seconds", type=float, default=60.0, help="budget; 0 takes all (default: 60)")
    parser.add_argument("--list", action="store_true", help="print the files with their distances, run nothing")
    asked = parser.parse_args()
    changed = changed_files(ROOT, asked.base)
    found = distances(read_checkout(), changed)
    there = {name: steps for name, steps in found.items() if (ROOT / name).is_file()}
    choice = choose(read_table(), there, changed, asked.seconds)
    print(*told(choice, changed), sep="\n", flush=True)
    if asked.list:
        print(*(f"{found[name]:3}  {name}" for name in choice.files), sep="\n")
    if asked.list or not choice.files:
        return 0
    left_out = [f"--deselect={test}" for test in choice.without]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *choice.files, *left_out]
    code = subprocess.run(command, cwd=ROOT).returncode
    return 0 if code == 5 else code  # 5: every test of these files is slow


if __name__ == "__main__":
    sys.exit(main())
