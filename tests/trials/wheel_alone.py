"""A wheel in an environment that has nothing else: does `flowrl train` run there, and is its report whole?

    python tests/trials/wheel_alone.py --out docs/research/trials/wheel_alone.json

Builds the source archive and from it the wheel (or takes --wheel), makes an empty environment, installs the wheel with
its own dependencies at the versions of requirements.lock, without any extra, and works from an empty folder that is no
checkout. Packages come from where uv is told to look, as for `make setup`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from origin import origin

ROOT = Path(__file__).resolve().parents[2]
UV = str(Path(sys.executable).with_name("uv"))
TRAIN = ("train", "tiny_grpo_geneval", "out=run", "num_iterations=1", "prompts_per_step=2", "group_size=4", "threads=1",
         "eval.num_prompts=4", "eval.num_images=4", "eval.batch_size=4", "micro_batch_size=8")  # fmt: skip
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


def run(*command: str | Path, cwd: Path) -> str:
    """A command that has to succeed, without the paths of this process; what it prints."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    settings = {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=settings, text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def build(out: Path) -> tuple[Path, Path]:
    """The source archive of this checkout, and the wheel that is made from it."""
    command = [UV, "build", "--quiet", "--no-build-isolation", "--python", sys.executable, "--out-dir", str(out)]
    subprocess.run(command, cwd=ROOT, check=True)
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


def report_of(path: Path) -> dict[str, Any]:
    """What the page holds; ends the trial where it is not whole."""
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    page.close()
    if page.open or page.elsewhere or not page.images or not page.headings:
        sys.exit(f"{path}: open {page.open}, from elsewhere {page.elsewhere}, {page.images} images, {page.headings}")
    return {"megabytes": round(path.stat().st_size / 1e6, 2), "images": page.images, "headings": page.headings}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--wheel", type=Path, nargs="+", help="that was built before; another file beside it is left alone"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        told: dict[str, Any] = {}
        if options.wheel:
            wheel = next(path.resolve() for path in options.wheel if path.suffix == ".whl")
        else:
            archive, wheel = build(folder / "dist")
            told["source_archive_megabytes"] = round(archive.stat().st_size / 1e6, 1)
        with zipfile.ZipFile(wheel) as content:
            told |= {
                "wheel": wheel.name,
                "wheel_megabytes": round(wheel.stat().st_size / 1e6, 1),
                "megabytes_unpacked": round(sum(item.file_size for item in content.infolist()) / 1e6, 1),
                "files": len(content.namelist()),
            }
        environment = folder / "environment"
        run(UV, "venv", "--quiet", "--python", sys.executable, environment, cwd=folder)
        python, flowrl = environment / "bin" / "python", environment / "bin" / "flowrl"
        lock = str(ROOT / "requirements.lock")
        begun = time.perf_counter()
        run(UV, "pip", "install", "--quiet", "--python", python, "--constraint", lock, wheel, cwd=folder)
        told["install_seconds"] = round(time.perf_counter() - begun, 1)
        told["packages"] = len(json.loads(run(UV, "pip", "list", "--format=json", "--python", python, cwd=folder)))
        work = folder / "work"
        work.mkdir()
        told["version"] = run(flowrl, "--version", cwd=work).strip()
        run(flowrl, "plan", "tiny_grpo_geneval", cwd=work)
        begun = time.perf_counter()
        run(flowrl, *TRAIN, cwd=work)
        told |= {"train": " ".join(("flowrl", *TRAIN)), "train_seconds": round(time.perf_counter() - begun, 1)}
        (work / "run" / "report.html").unlink()
        run(flowrl, "report", "run", cwd=work)
        told["report"] = report_of(work / "run" / "report.html")
        rows = [json.loads(line) for line in (work / "run" / "metrics.jsonl").read_text().splitlines()]
        told["reward"] = next(row["reward"] for row in rows if "reward" in row)
        told["run_files"] = sorted(path.name for path in (work / "run").iterdir())
        shutil.rmtree(environment)  # gigabytes, which a temporary folder may have to count file by file
    options.out.write_text(json.dumps({**origin(), **told}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
