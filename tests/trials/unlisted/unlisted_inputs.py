"""Inputs that no list of faults holds, each with an oracle: `python tests/trials/unlisted/unlisted_inputs.py`.

Prompts, images, data files, model folders, LoRA files, processes, links and requests, made by the formats and habits of
other programs. Each is given to flowrl in a folder of its own, and ends in one of three ways: the result is right, held
against a number that was computed another way; it is refused in words that name what is wrong; or it is silent:
something else came out and nobody was told. The command fails where there is one of these, or a traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from flowrl.runtime.progress import progress

sys.path += [str(Path(__file__).resolve().parents[2] / name) for name in ("trials", "helpers", "helpers/families")]

from origin import origin
from unlisted_case import Case, Silent

ROOMS = (
    "unlisted_identity", "unlisted_images", "unlisted_checks", "unlisted_models", "unlisted_loras",
    "unlisted_processes", "unlisted_servers", "unlisted_folders", "unlisted_words",
)  # fmt: skip


def all_cases() -> list[Case]:
    """Every case of every room; their names differ."""
    cases = [case for room in ROOMS for case in importlib.import_module(room).cases()]
    twice = [name for name, count in Counter(case.name for case in cases).items() if count > 1]
    assert not twice, f"two cases have one name: {twice}"
    return cases


def outcome(case: Case, folder: Path) -> tuple[str, str]:
    """How a case ended, as "right", "refused", "silent" or "traceback", and in which words."""
    folder.mkdir()
    started, said = Path.cwd(), io.StringIO()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            word, about = case.run(folder)
    except Silent as error:
        word, about = "silent", str(error)
    except Exception:
        word, about = "traceback", traceback.format_exc(limit=-3)
    finally:
        os.chdir(started)
    if "Traceback (most recent call last)" in said.getvalue():
        word, about = "traceback", said.getvalue()[-1500:]
    return word, about.replace(str(folder), ".")


def main() -> int:
    """The command; exit code 1 where a result was wrong without a word."""
    about = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog="python tests/trials/unlisted/unlisted_inputs.py", description=about)
    parser.add_argument("--only", metavar="TEXT", help="cases whose name matches this regular expression")
    parser.add_argument("--out", type=Path, metavar="PATH", help="JSON file of all results")
    parsed = parser.parse_args()
    cases = [case for case in all_cases() if re.search(parsed.only or "", case.name)]
    rows = []
    with (
        tempfile.TemporaryDirectory() as place,
        progress("cases", len(cases), 0, enabled=sys.stderr.isatty()) as advance,
    ):
        for number, case in enumerate(cases):
            begun = time.monotonic()
            word, about = outcome(case, Path(place) / f"case-{number}")
            seconds = round(time.monotonic() - begun, 1)
            rows.append({"name": case.name, "outcome": word, "said": about[:400], "seconds": seconds})
            if word not in ("right", "refused"):
                print(f"{word.upper()} {case.name}: {about.strip()[-600:]}", flush=True)
            advance(case.name)
    counts = Counter(str(row["outcome"]) for row in rows)
    print(f"{len(rows)} inputs: " + ", ".join(f"{word} {count}" for word, count in sorted(counts.items())))
    if parsed.out is not None:
        text = json.dumps(origin() | {"counts": dict(sorted(counts.items())), "cases": rows}, indent=1)
        parsed.out.write_text(text + "\n")
    return int(bool(counts["silent"] or counts["traceback"]))


if __name__ == "__main__":
    sys.exit(main())
