"""The wheel alone on every Python that can be found, at the lock's versions, the lowest and the newest."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from release_part import ROOT, UV, Broken, Part, run
from wheel_alone import try_wheel

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
ROOM = 12e9
"""Bytes that an environment with torch and its CUDA libraries may take where uv cannot link its cache."""
_MAIN = ("torch", "torchvision", "diffusers", "transformers", "peft", "accelerate", "numpy", "huggingface-hub")


def wheel_alone(part: Part, scratch: Path, wheel: Path, asked: Sequence[str], libraries: Sequence[str]) -> None:
    """Tries the wheel on each Python at the lock's versions, on the oldest at the lowest, on the last at the newest."""
    found = {version: python for version in asked if (python := python_of(part, version, scratch)) is not None}
    part.refuse(not found, f"of Python {', '.join(asked)} none is here")
    part.facts["pythons"] = {version: version_of(python) for version, python in found.items()}
    tried: list[dict[str, Any]] = []
    part.facts["tried"] = tried
    for kind, versions in {"lock": list(found), "lowest": list(found)[:1], "newest": list(found)[-1:]}.items():
        for version in versions if kind in libraries else ():
            free = shutil.disk_usage(scratch).free
            if free < ROOM:
                part.leave(
                    f"Python {version}, {kind}: {free / 1e9:.0f} GB of disk are free, {ROOM / 1e9:.0f} are needed"
                )
                continue
            part.say(f"Python {version}, {kind} versions: torch for another Python is a download of a gigabyte once")
            try:
                told = try_wheel(wheel, found[version], kind, scratch / f"{version}-{kind}")
            except Broken as error:
                tried.append({"python": version, "libraries": kind, "broken": str(error)})
                part.refuse(True, f"Python {version}, {kind} versions: {error}")
                continue
            part.say(f"Python {version}, {kind} versions: {in_words(told)}")
            packages = told.pop("packages")
            tried.append({"python": version, **told, "packages": len(packages), "unlike": unlike_the_lock(packages)})


def in_words(told: dict[str, Any]) -> str:
    """What was installed and how long each step took."""
    main = ", ".join(f"{name} {told['packages'][name]}" for name in _MAIN if name in told["packages"])
    steps = ("install", "train", "report", "evaluate")
    seconds = ", ".join(f"{step} {told[f'{step}_seconds']:.0f} s" for step in steps)
    differs = unlike_the_lock(told["packages"])
    more = f"; {len(differs)} of {len(told['packages'])} packages are not the lock's" if differs else ""
    return f"works ({seconds}); {main}{more}"


def unlike_the_lock(packages: dict[str, str]) -> dict[str, str]:
    """Packages whose versions are none of the lock file's."""
    text = (ROOT / "requirements.lock").read_text()
    pinned = set(re.findall(r"(?m)^([\w.-]+)==([\w.]+)", text))
    mine = {name: version for name, version in packages.items() if name != "flowrl-toolkit"}
    return {name: version for name, version in mine.items() if (name, version.partition("+")[0]) not in pinned}


def python_of(part: Part, version: str, scratch: Path) -> Path | None:
    """An interpreter of this version that runs; None, and the reason noted, where there is none."""
    for python in candidates(version):
        if (own := version_of(python)) and own.startswith(f"{version}."):
            part.say(f"Python {own}: {python}")
            return python
    folder = scratch / "pythons"
    try:
        run(UV, "python", "install", "--install-dir", folder, version, timeout=600)
        return next(folder.glob("*/bin/python3"))
    except Broken as error:
        cause = re.sub(r"\S*://\S*", "an address", str(error).strip().splitlines()[-1].strip())
        part.leave(f"Python {version}: none on PATH, in pyenv or known to uv, and uv cannot fetch one ({cause})")
        return None


def candidates(version: str) -> Iterator[Path]:
    """Where a Python of this version may be: on PATH, among pyenv's, where uv finds it."""
    for folder in os.get_exec_path():
        yield Path(folder) / f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted((pyenv / "versions").glob(f"{version}.*/bin/python"), reverse=True)
    try:
        yield Path(run(UV, "python", "find", "--no-project", "--no-python-downloads", version).strip())
    except Broken:
        return


def version_of(python: Path) -> str | None:
    """What an interpreter says of itself; None where it does not run, as a stand-in of pyenv without its Python."""
    try:
        return run(python, "-c", "import platform; print(platform.python_version())", timeout=60).strip()
    except Broken:
        return None
