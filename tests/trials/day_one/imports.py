"""`flowrl init --from` on files of other toolkits: what becomes of their keys, whether `flowrl plan` takes it.

    python tests/trials/day_one/imports.py --out docs/research/trials/imports.json FILE...

A .py file is tried with each of its functions. Every import and every plan is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from flowrl.migrating.foreign_files import read_foreign
from flowrl.migrating.foreign_python import makers_in
from flowrl.runtime.files import write_atomically

sys.path.append(str(Path(__file__).resolve().parents[1]))
from origin import origin

COUNTED = re.compile(r"# (\d+) keys of .*: (\d+) translated, (\d+) without counterpart, (\d+) dropped")


def tried(given: str, folder: Path) -> dict[str, Any]:
    """What came of one file."""
    file = folder / "ours.yaml"
    file.unlink(missing_ok=True)
    begun = time.perf_counter()
    done = flowrl("init", "--from", given, "--out", str(file))
    seconds = time.perf_counter() - begun
    found: dict[str, Any] = {
        "file": Path(given).name,
        "toolkit": read_foreign(given).kind,
        "seconds": round(seconds, 1),
    }
    if done.returncode:
        return found | {"refused": done.stderr.replace(f"{Path(given).parent}/", "").replace(f"{folder}/", "").strip()}
    text = file.read_text(encoding="utf-8")
    counts = COUNTED.search(text)
    base = re.search(r"^base: (\S+)", text, re.MULTILINE)
    assert counts is not None
    assert base is not None
    names = ("keys", "translated", "without_counterpart", "dropped")
    plan = flowrl("plan", str(file))
    return {
        **found, **{name: int(number) for name, number in zip(names, counts.groups(), strict=True)},
        "unknown": text.count("not known of this toolkit"), "base": base[1], "plan_accepts": plan.returncode == 0,
    }  # fmt: skip


def flowrl(*words: str) -> subprocess.CompletedProcess[str]:
    """A command as a user gives it."""
    return subprocess.run([sys.executable, "-m", "flowrl.cli", *words], capture_output=True, text=True, check=False)


def main() -> None:
    """Tries all files and writes what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parsed = parser.parse_args()
    wanted = []
    for file in parsed.files:
        plain = makers_in(Path(file)) if file.endswith(".py") else []
        wanted += [f"{file}:{name}" for name in plain] or [file]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for given in wanted:
            rows.append(tried(given, Path(folder)))
            print(json.dumps(rows[-1]), flush=True)
    names = [Path(file).name for file in parsed.files]  # without the folders of this machine
    command = shlex.join(["python", "tests/trials/day_one/imports.py", "--out", str(parsed.out), *names])
    write_atomically(parsed.out, json.dumps({**origin(), "command": command, "files": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
