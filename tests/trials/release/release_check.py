"""All that a release has to pass: what is right, what is wrong, and what this machine could not do, in words.

    make release-check                                       all of it, into dist/
    make release-check ARGS="--python 3.11"                  on one Python
    make release-check ARGS="--only version archives"        some parts
    make release-check ARGS="--libraries lock"               not the lowest and the newest versions of libraries

Parts: `version` (a tag gives it, the changelog has it), `archives` (both built, alike, sane, small), `licences` (a bill
of materials and a table of licences, beside the archives), `wheel` (alone, on every Python that can be found) and
`image` (the container). Nothing is tagged, committed or sent. It ends with 1 where something is wrong; what could not
be done here is told at the end, and is not wrong.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from origin import origin
from release_archives import archives, metadata, version_of_tag
from release_image import image
from release_licences import bill_and_licences
from release_part import ROOT, Broken, Part
from release_pythons import PYTHONS, wheel_alone

PARTS = ("version", "archives", "licences", "wheel", "image")
LIBRARIES = ("lock", "lowest", "newest")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts (default: all)")
    parser.add_argument("--python", nargs="+", choices=PYTHONS, default=PYTHONS, help="of the wheel (default: all)")
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=LIBRARIES, help="versions (default: all)")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where archives go, or lie (default: dist)")
    parser.add_argument("--out", type=Path, help="a file for the record, as JSON")
    asked = parser.parse_args()
    parts: list[Part] = []
    with tempfile.TemporaryDirectory(prefix="flowrl-release-") as name:
        scratch = Path(name)
        print(f"{shutil.disk_usage(scratch).free / 1e9:.0f} GB of disk are free; what is made is removed but for dist/")
        for one in PARTS:
            if one in asked.only:
                parts.append(checked(one, scratch, asked))
    told = {part.name: {"facts": part.facts, "wrong": part.wrong, "not done": part.left} for part in parts}
    if asked.out:
        asked.out.write_text(json.dumps({**origin(), **told}, indent=1) + "\n", encoding="utf-8")
    return summary(parts, [name for name in PARTS if name not in asked.only])


def checked(name: str, scratch: Path, asked: argparse.Namespace) -> Part:
    """One part; a command of it that did not work is a fault of the part, and the others go on."""
    part, begun = Part(name), time.perf_counter()
    try:
        if name == "version":
            version_of_tag(part, scratch)
        elif name == "archives":
            archives(part, scratch, asked.dist)
        else:
            wheel = next(asked.dist.glob("*.whl"), None)
            if wheel is None:
                raise Broken(f"there is no wheel in {asked.dist}: the part `archives` makes it")
            version = metadata(wheel)["Version"]
            if name == "licences":
                bill_and_licences(part, scratch, asked.dist, version)
            elif name == "wheel":
                wheel_alone(part, scratch, wheel.resolve(), asked.python, asked.libraries)
            else:
                image(part, scratch, version)
    except Broken as error:
        part.refuse(True, str(error))
    part.facts["seconds"] = round(time.perf_counter() - begun, 1)
    return part


def summary(parts: list[Part], left_out: list[str]) -> int:
    """Says what was found; the exit code."""

    def listed(head: str, lines: list[str]) -> None:
        print("\n".join([f"\n{head}", *(f"  {line}" for line in lines)]) if lines else f"\n{head} nothing")

    right: dict[str, Any] = {part.name: part.facts["seconds"] for part in parts if not part.wrong}
    listed("Right:", [f"{name} ({seconds:.0f} s)" for name, seconds in right.items()])
    listed("Wrong:", [f"{part.name}: {text}" for part in parts for text in part.wrong])
    left = [f"{part.name}: {text}" for part in parts for text in part.left]
    listed("Not done on this machine:", left + [f"{name}: not asked for" for name in left_out])
    return int(any(part.wrong for part in parts))


if __name__ == "__main__":
    sys.exit(main())
