"""A wheel in an environment that has nothing else: does flowrl train and evaluate there, and are its pages whole?

The environment is empty but for the wheel and what it depends on, without any extra; work is done in an empty folder
that is no checkout. Packages come from where uv is told to look, as for `make setup`.
"""

from __future__ import annotations

import json
import shutil
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from release_part import ROOT, UV, Broken, run

SMALL = ("num_iterations=2", "prompts_per_step=2", "group_size=4", "threads=1", "eval.num_prompts=4",
         "eval.num_images=4", "eval.batch_size=4", "micro_batch_size=8")  # fmt: skip
TRAIN = ("train", "tiny_grpo_geneval", "out=run", *SMALL)
EVALUATE = ("eval", "run", "--num-prompts", "6", "--samples", "1", "--batch-size", "6", "--out", "evaluation")
VOID = frozenset(("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"))


class Page(HTMLParser):
    """What a page is made of: headings, images, what it would load from elsewhere, and tags that were not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.images, self.elsewhere = 0, []  # type: int, list[str]
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        source = given.get("src", "") or (given.get("href", "") if tag == "link" else "")
        self.images += tag == "img"
        if source and not source.startswith("data:"):
            self.elsewhere.append(source)
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("h1", "h2"):
            self.headings.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            while self.open.pop() != tag:  # HTML lets some, such as p and li, end with what holds them
                pass

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h1", "h2"):
            self.headings[-1] += data.strip()


def whole(path: Path) -> dict[str, Any]:
    """What a page holds.

    Raises:
        Broken: it is not whole, or would load something from elsewhere.
    """
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    page.close()
    if page.open or page.elsewhere or not page.images or not page.headings:
        raise Broken(
            f"{path}: open {page.open}, from elsewhere {page.elsewhere}, {page.images} images, {page.headings}"
        )
    return {"megabytes": round(path.stat().st_size / 1e6, 2), "images": page.images, "headings": page.headings}


def constraints(libraries: str, python: Path, folder: Path) -> Path | None:
    """A file with the versions that an environment is to have: of the lock, the lowest of pyproject.toml, or none, the
    newest.

    Raises:
        Broken: no lowest versions fit each other.
    """
    if libraries == "lowest":
        options = ("--quiet", "--no-header", "--no-annotate", "--resolution", "lowest-direct")
        file = folder / "lowest.txt"
        run(UV, "pip", "compile", *options, "--python", python, ROOT / "pyproject.toml", "-o", file, cwd=folder)
        return file
    return ROOT / "requirements.lock" if libraries == "lock" else None


def try_wheel(wheel: Path, interpreter: Path, libraries: str, folder: Path) -> dict[str, Any]:
    """Installs a wheel alone, trains, evaluates, reads both pages; what came of it.

    Args:
        wheel: the file.
        interpreter: whose Python the environment has.
        libraries: lock, lowest or newest.
        folder: is made, and removed at the end: gigabytes.

    Raises:
        Broken: what did not work.
    """
    folder.mkdir()
    try:
        environment, work = folder / "environment", folder / "work"
        work.mkdir()
        run(UV, "venv", "--quiet", "--python", interpreter, environment, cwd=folder)
        python, flowrl = environment / "bin" / "python", environment / "bin" / "flowrl"
        told: dict[str, Any] = {"libraries": libraries}

        def timed(what: str, *command: str | Path) -> str:
            begun = time.perf_counter()
            said = run(*command, cwd=work, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
            told[f"{what}_seconds"] = round(time.perf_counter() - begun, 1)
            return said

        asked = constraints(libraries, python, folder)
        asked_words: list[str | Path] = [] if asked is None else ["--constraint", asked]
        timed("install", UV, "pip", "install", "--quiet", "--python", python, *asked_words, wheel)
        found = json.loads(run(UV, "pip", "list", "--format=json", "--python", python, cwd=folder))
        told["packages"] = {item["name"]: item["version"] for item in found}
        told["version"] = run(flowrl, "--version", cwd=work).strip()
        for words in ((), ("train",), ("eval",)):
            if "flowrl" not in timed("help", flowrl, *words, "--help"):
                raise Broken(f"flowrl {' '.join(words)} --help says nothing")
        timed("train", flowrl, *TRAIN)
        timed("report", flowrl, "report", "run")
        timed("evaluate", flowrl, *EVALUATE)
        told["report"], told["page"] = whole(work / "run" / "report.html"), whole(work / "evaluation" / "page.html")
        rows = [json.loads(line) for line in (work / "run" / "metrics.jsonl").read_text().splitlines()]
        told["rewards"] = [row["reward"] for row in rows if "reward" in row]
        if len(told["rewards"]) != 2:
            raise Broken(f"of two iterations there are rewards of {len(told['rewards'])}")
        return told
    finally:
        shutil.rmtree(folder)
