"""Breaks the product in chosen places, one after another, and counts what the default tests see.

    python tests/trials/mutants/mutants.py [--only NAME ...] [--seconds 60] [--out docs/research/trials/mutants.json]

`mutants.yaml` beside this file is the list: a text that stands once in a file of the product, what is put in its place,
and in words what that breaks. Each is tried in a copy of the tree, never in the tree itself: test files of
`make test`, the nearest first (the mirrored file, what imports the broken module, its room, then by the number of
imports in between), until the first failure or until so many processor seconds are used up. The test that failed then
has to pass without the change. One process that has imported torch, diffusers and the like, and nothing of flowrl, is
forked for each part of the tests, so that a mutant costs no imports of libraries.

Results are kept as they come: the command goes on where it was stopped, and begins again on another commit. `--only`
tries mutants whatever is known of them. It fails where a mutant without a `reason` survives.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
LIST = Path(__file__).with_suffix(".yaml")
OUT = ROOT / "docs" / "research" / "trials" / "mutants.json"
NOT_ASKED = ("tests/test_layers.py", "tests/test_house.py", "tests/test_mutants.py")
"""Tests of how the product is written: they see any change, and none of what it does."""
LAST = 20
"""So many of the longest test files come last."""
TOGETHER = 12
"""Test files that far ones are run by at a time."""
WARM: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("accelerate", "jaxtyping", "numpy", "peft", "PIL.Image", "pytest", "safetensors.torch"), ()),
    **dict.fromkeys(("rich.progress", "scipy.special", "torch.utils.checkpoint", "yaml"), ()),
    "diffusers": (
        "AutoencoderKL",
        "FlowMatchEulerDiscreteScheduler",
        "SD3Transformer2DModel",
        "StableDiffusion3Pipeline",
    ),
    "transformers": ("CLIPTextModelWithProjection", "CLIPTokenizer", "T5EncoderModel", "T5TokenizerFast"),
}
"""What the process that is forked imports: libraries, and parts of those that import them when they are asked for."""
IMPORTED = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
"""What pytest need not say of its plugins in a process that has imported them before it began."""
SEEN, SURVIVED, UNCLEAR = "seen", "survived", "unclear"


# ---- the list --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One break."""

    name: str
    file: str
    old: str
    new: str
    broken: str
    """What the new text breaks, in words."""
    reason: str = ""
    """Why no test has to see it."""

    @property
    def room(self) -> str:
        """The room that the file lies in."""
        return self.file.removeprefix("flowrl/").partition("/")[0]

    def changed(self, text: str) -> str:
        """The broken text of the file. Raises ValueError: the old text does not stand there once."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: its old text stands {count} times in {self.file}, and has to stand once")
        return text.replace(self.old, self.new)

    def function(self, text: str) -> str:
        """The function or class that the old text stands in, innermost last; "" at the top of the module."""
        line, found = text[: text.index(self.old)].count("\n") + 1, list[str]()
        inside: Sequence[ast.AST] = ast.parse(text).body
        while inside:
            nodes = [node for node in inside if getattr(node, "lineno", 0) <= line <= getattr(node, "end_lineno", 0)]
            found += [n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)]
            inside = [child for node in nodes for child in ast.iter_child_nodes(node)]
        return ".".join(found)


@cache
def read_mutants() -> tuple[Mutant, ...]:
    """The list."""
    return tuple(Mutant(**entry) for entry in yaml.safe_load(LIST.read_text()))


# ---- which tests, in which order -------------------------------------------------------------------------------------


@cache
def arrows(root: Path) -> tuple[dict[str, set[str]], list[str]]:
    """Files of product and tests with those that import them, wherever the statement stands; and the test files."""
    from affected import imported, names_of, resolved  # from the real tree: the process that is forked must not have it
    from house import TOPS

    paths = [path for top in (*TOPS, "tests") for path in sorted((root / top).rglob("*.py"))]
    texts = {path.relative_to(root).as_posix(): path.read_text() for path in paths if "golden" not in path.parts}
    modules, importers = names_of(root, texts), defaultdict[str, set[str]](set)
    for name, text in texts.items():
        for other in resolved(imported(text), modules) - {name}:
            importers[other].add(name)
    tests = [name for name in texts if name.startswith("tests/") and Path(name).name.startswith("test_")]
    return dict(importers), [test for test in tests if test not in NOT_ASKED]


def nearest(mutant: Mutant, root: Path, last: Sequence[str]) -> list[list[str]]:
    """All test files in the parts that they are run by, nearest first; long ones `last`, but for the mirrored."""
    importers, tests = arrows(root)
    away, edge, steps = {mutant.file: 0}, {mutant.file}, 0
    while edge:
        steps += 1
        edge = {one for file in edge for one in importers.get(file, ())} - away.keys()
        away |= dict.fromkeys(edge, steps)
    folder = f"tests/{Path(mutant.file.removeprefix('flowrl/')).parent}"

    def place(test: str) -> tuple[int, bool, int, str]:
        here, far = str(Path(test).parent) == folder, away.get(test, 99)
        far = 0 if here and Path(test).name == f"test_{Path(mutant.file).name}" else far
        rank = 0 if here and far <= 2 else 1 if far <= 1 else 2 if here else 3  # many import a room's __init__ alone
        return rank, bool(far) and test in last, far, test

    ordered = sorted(tests, key=place)
    parts = [list(part) for _, part in groupby(ordered, key=lambda test: place(test)[0])]
    return [part[first : first + TOGETHER] for part in parts for first in range(0, len(part), TOGETHER)]


# ---- the process that is forked --------------------------------------------------------------------------------------


class Watching:
    """A plugin that keeps the order of files, writes down what is run, and stops when the time is used up."""

    def __init__(self, files: Sequence[str], seconds: float, notes: Path) -> None:
        self.files, self.seconds, self.notes = {file: place for place, file in enumerate(files)}, seconds, notes
        self.failed = ""

    def pytest_configure(self, config: Any) -> None:
        self.root = Path(config.rootpath)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        with self.notes.open("a") as file:
            file.write(f"{nodeid}\n")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_runtest_teardown(self, item: Any) -> None:
        if used() > self.seconds:
            item.session.shouldstop = "the time is used up"

    def pytest_collection_finish(self, session: Any) -> None:
        session.items.sort(key=lambda item: self.files.get(str(item.path.relative_to(self.root)), 0))


def used() -> float:
    """Processor seconds of this process and of children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def serve(link: Connection, root: Path, folder: Path) -> None:
    """Imports libraries, then runs tests of the copy in forks of itself, as it is asked to."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(root)}
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    sys.path[:] = [str(root), *(path for path in sys.path if not Path(path).is_relative_to(ROOT) or ".venv" in path)]
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what libraries say of each other
    for library, parts in WARM.items():
        module = importlib.import_module(library)
        for part in parts:  # diffusers and transformers import what is asked for
            getattr(module, part)
    link.send("ready")
    while (asked := link.recv()) is not None:
        (notes := folder / "notes").unlink(missing_ok=True)
        if not (pid := os.fork()):
            run_tests(root, folder, notes, **asked)
        ended = os.pidfd_open(pid)
        in_time = bool(select.select([ended], [], [], 10 * asked["seconds"] + 60)[0])
        if not in_time:
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ended)
        lines = notes.read_text().splitlines() if notes.exists() else []
        begun = [line for line in lines if not line.startswith("{")]
        ended_well = len(begun) < len(lines)
        result = json.loads(lines[-1]) if ended_well else {"code": -1, "failed": begun[-1] if begun else ""}
        link.send(result | {"tests": len(begun), "in_time": in_time})


def run_tests(root: Path, folder: Path, notes: Path, *, files: list[str], seconds: float, options: list[str]) -> None:
    """Runs tests in this fork, which ends with them."""
    code, failed = -1, ""
    try:
        os.setsid()
        os.chdir(root)
        output, nothing = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), os.open(os.devnull, 0)
        for stream, number in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(stream, number)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        import pytest

        plugin = Watching([file.partition("::")[0] for file in files], seconds, notes)
        told = [
            "-x",
            "-q",
            "--tb=short",
            "-m",
            "not slow",
            "--representatives",
            "-p",
            "no:cacheprovider",
            "-W",
            IMPORTED,
        ]
        code = int(pytest.main([*told, f"--basetemp={folder / 'made'}", *options, *files], plugins=[plugin]))
        failed = plugin.failed
        if (own := sys.modules.get("flowrl")) is not None and not str(own.__file__).startswith(str(root)):
            raise RuntimeError(f"{own.__file__} is not the copy")
        with notes.open("a") as file:
            file.write(json.dumps({"code": code, "failed": failed, "seconds": round(used(), 1)}) + "\n")
    except BaseException:  # what ends a fork is told nowhere else
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


# ---- a mutant --------------------------------------------------------------------------------------------------------


def copied(folder: Path) -> Path:
    """The tree as it lies here, without what git ignores, in a folder of its own with a repository of its own."""
    root = folder / "tree"
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
        text=True,
    ).stdout.split("\0")
    for name in filter(None, listed):
        if (ROOT / name).exists() or (ROOT / name).is_symlink():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name, follow_symlinks=False)
    own = ["git", "-C", str(root), "-c", "user.name=mutants", "-c", "user.email=mutants@localhost"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "tree"]):
        subprocess.run([*own, *words], check=True)
    return root


class Trials:
    """The copy, the process that is forked, and tests that fail in the copy whatever is changed."""

    def __init__(self, root: Path, folder: Path, link: Connection, seconds: float) -> None:
        self.root, self.folder, self.link, self.seconds = root, folder, link, seconds
        self.fail_anyway: list[str] = []

    def ask(self, files: Sequence[str], seconds: float, *options: str) -> dict[str, Any]:
        self.link.send({"files": list(files), "seconds": seconds, "options": list(options)})
        found: dict[str, Any] = self.link.recv()
        return found

    def write(self, file: str, text: str) -> None:
        """Writes a file of the copy; what was compiled of it goes, for its time may be told in whole seconds."""
        path = self.root / file
        path.write_text(text)
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()

    def passes_without(self, test: str) -> bool:
        """Whether a test passes where nothing is broken."""
        whole_file = ["--collect-only"] if "::" not in test else []
        return bool(self.ask([test], self.seconds, *whole_file)["code"] == 0)

    def tried(self, mutant: Mutant, last: Sequence[str]) -> dict[str, Any]:
        """What the tests see of a mutant."""
        text = (self.root / mutant.file).read_text()
        parts, tests, spent = nearest(mutant, self.root, last), 0, 0.0
        while parts and spent < self.seconds:
            self.write(mutant.file, mutant.changed(text))
            left_out = [f"--deselect={test}" for test in self.fail_anyway]
            found = self.ask(parts[0], self.seconds - spent, *left_out)
            self.write(mutant.file, text)
            tests, spent = tests + found["tests"], spent + found.get("seconds", self.seconds)
            test = found["failed"]
            if not found["in_time"] or (found["code"] not in (0, 2, 5) and not test):
                return {"outcome": UNCLEAR, "test": test, "tests": tests, "seconds": round(spent, 1)}
            if test and self.passes_without(test):
                return {"outcome": SEEN, "test": test, "tests": tests, "seconds": round(spent, 1)}
            if test and test not in self.fail_anyway:
                self.fail_anyway.append(test)
            else:
                parts = parts[1:]
        return {"outcome": SURVIVED, "test": "", "tests": tests, "seconds": round(spent, 1)}


# ---- the command -----------------------------------------------------------------------------------------------------


def main() -> int:
    """Tries the mutants, prints a table, writes JSON; returns 0 where each that survives has a reason."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="mutants of these names, or rooms")
    parser.add_argument("--seconds", type=float, default=60, help="processor seconds of tests for each (60)")
    parser.add_argument("--out", type=Path, default=OUT, help="JSON file")
    asked = parser.parse_args()
    chosen = [mutant for mutant in read_mutants() if not asked.only or {mutant.name, mutant.room} & {*asked.only}]
    if unknown := {*asked.only} - {word for mutant in chosen for word in (mutant.name, mutant.room)}:
        parser.error(f"no mutant and no room is called {', '.join(sorted(unknown))}")
    os.nice(10)
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name).resolve()
        root = copied(folder)
        link, other = Pipe()
        if not (pid := os.fork()):  # before anything of flowrl is imported
            try:
                link.close()
                serve(other, root, folder)
            finally:
                os._exit(0)
        other.close()
        try:
            assert link.recv() == "ready"
            rows = try_all(Trials(root, folder, link, asked.seconds), chosen, asked.out, again=bool(asked.only))
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    print(table(rows))
    return int(any(row["outcome"] != SEEN and not row["reason"] for row in rows))


def try_all(trials: Trials, chosen: Sequence[Mutant], out: Path, *, again: bool) -> list[dict[str, Any]]:
    """Tries mutants and writes what is known after each; of all mutants of the list, in its order."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "trials")]
    from origin import origin

    from flowrl.runtime.files import write_atomically
    from flowrl.runtime.progress import progress

    about = origin()
    known = json.loads(out.read_text())["mutants"] if out.exists() else []
    found = {row["name"]: row for row in known if again or row["commit"] == about["commit"]}
    seconds = json.loads((ROOT / "tests" / "durations.json").read_text())["files"]
    last = sorted(seconds, key=seconds.get, reverse=True)[:LAST]
    left = [mutant for mutant in chosen if again or mutant.name not in found]
    with progress("breaking", len(left)) as advance:
        for mutant in left:
            text = (ROOT / mutant.file).read_text()
            about_it = {"name": mutant.name, "file": mutant.file, "function": mutant.function(text)}
            about_it |= {"broken": mutant.broken, "room": mutant.room, "reason": mutant.reason}
            found[mutant.name] = about_it | trials.tried(mutant, last) | {"commit": about["commit"]}
            rows = [found[one.name] for one in read_mutants() if one.name in found]
            result = about | {"seconds": trials.seconds, "fail anyway": trials.fail_anyway, "mutants": rows}
            write_atomically(out, json.dumps(result, indent=1) + "\n")
            advance(f"{sum(row['outcome'] != SEEN for row in rows)} not seen")
    return [found[one.name] for one in read_mutants() if one.name in found]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """What came out, for people: by room, then what was not seen."""
    from flowrl.rendering.terminal_text import align

    lines = []
    for room in [*dict.fromkeys(row["room"] for row in rows), "all"]:
        own = [row["outcome"] for row in rows if room in (row["room"], "all")]
        lines.append([room, str(len(own)), str(own.count(SEEN)), str(len(own) - own.count(SEEN))])
    unseen = [row for row in rows if row["outcome"] != SEEN]
    told = [
        f"{row['name']} ({row['file']} {row['function']}): {row['broken']}; {row['outcome']} within {row['seconds']:g} "
        f"s, {row['tests']} tests run{'. ' + row['reason'] if row['reason'] else ''}"
        for row in unseen
    ]
    return "\n".join([align(["room", "made", "seen", "not seen"], lines), "", *told])


if __name__ == "__main__":
    raise SystemExit(main())
