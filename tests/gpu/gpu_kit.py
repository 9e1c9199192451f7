"""A kit for a card without network: the repository and wheels in one file of less than 64 MiB.

Assumed on that machine: a Python of the version that the wheels are for, and in it a torch that drives the card, with
numpy, pillow and SciPy. Wheels hold what is small: `--wheels FOLDER` takes them from a folder, else pip fetches them.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST = 64 * 2**20
"""Bytes of the whole kit."""
LEFT_OUT = ("assets/tiny-kontext/", "docs/gallery/", "docs/notebooks/", "docs/research/")
"""What no check reads."""
TESTS = ("tests/gpu/", "tests/helpers/")
"""Of the tests, what checks are and read."""
WHEELS = (
    "accelerate",
    "annotated-doc",
    "anyio",
    "certifi",
    "charset-normalizer",
    "click",
    "diffusers",
    "filelock",
    "fsspec",
    "h11",
    "httpcore",
    "httpcore2",
    "httpx",
    "httpx2",
    "huggingface-hub",
    "idna",
    "importlib-metadata",
    "iniconfig",
    "jaxtyping",
    "markdown-it-py",
    "mdurl",
    "packaging",
    "peft",
    "pluggy",
    "psutil",
    "pygments",
    "pytest",
    "pyyaml",
    "regex",
    "requests",
    "rich",
    "safetensors",
    "shellingham",
    "tokenizers",
    "tqdm",
    "transformers",
    "typer",
    "typing-extensions",
    "urllib3",
    "wadler-lindig",
    "zipp",
)
"""What travels; what torch brings itself does not, nor what only commands beside training import."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "any")
"""Machines that wheels are fetched for."""
RUN = """#!/bin/sh
# Runs the suite on a machine without network: sh run.sh [--out FILE] [--sections machine,speed]
# Assumed: a Python {python} with a torch that drives the card, numpy, pillow and SciPy. PYTHON=... names another.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${{PYTHON:-python3}}
"$python" -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "torch sees no card here")'
if [ ! -d "$here/packages" ]; then
  "$python" -m pip install --quiet --no-index --no-deps --target "$here/packages" "$here"/wheels/*.whl
fi
export PYTHONPATH="$here/packages${{PYTHONPATH:+:$PYTHONPATH}}"
cd "$here/flowrl"
exec "$python" tests/gpu/gpu_suite.py --out "$here/gpu.json" "$@"
"""


def pack(target: Path, *, wheels: str | None, python: str) -> int:
    """Writes the kit; exit code 1, and no file, where it would be too large or a wheel is not to be had."""
    with tempfile.TemporaryDirectory(prefix="gpu-kit-") as name:
        folder = Path(name) if wheels is None else Path(wheels)
        if wheels is None and (fault := fetch(folder, python)):
            print(f"the wheels could not be fetched: {fault}", file=sys.stderr)
            return 1
        found = sorted(folder.glob("*.whl"))
        if not found:
            print(f"{folder} holds no wheel", file=sys.stderr)
            return 1
        parts: dict[str, bytes | Path] = {f"wheels/{path.name}": path.read_bytes() for path in found}
    parts |= {f"flowrl/{file}": content for file, content in repository(ROOT).items()}
    parts["run.sh"] = RUN.format(python=python).encode()
    return write(target, parts)


def write(target: Path, parts: Mapping[str, bytes | Path], most: int = MOST) -> int:
    """Writes files, or links where the content is a path, into an archive of at most so many bytes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:xz", preset=3) as archive:
        for name, content in sorted(parts.items()):
            entry = tarfile.TarInfo(f"gpu-kit/{name}")
            if isinstance(content, Path):
                entry.type, entry.linkname = tarfile.SYMTYPE, str(content)
                archive.addfile(entry)
                continue
            entry.size, entry.mode = len(content), 0o755 if name.endswith(".sh") else 0o644
            archive.addfile(entry, io.BytesIO(content))
    size = len(held.getvalue())
    if size >= most:
        print(told_too_large(parts, size, most), file=sys.stderr)
        return 1
    target.write_bytes(held.getvalue())
    print(f"{target}: {size / 2**20:.1f} MiB of {most / 2**20:.0f}; there: tar xf {target.name}, sh gpu-kit/run.sh")
    return 0


def told_too_large(parts: Mapping[str, bytes | Path], size: int, most: int) -> str:
    """Why a kit is refused, with what is largest in it."""
    sizes = {name: len(content) for name, content in parts.items() if isinstance(content, bytes)}
    largest = sorted(sizes.items(), key=lambda entry: -entry[1])[:5]
    named = ", ".join(f"{name} ({count / 2**20:.1f})" for name, count in largest)
    return (
        f"the kit would take {size / 2**20:.1f} MiB, and {most / 2**20:.0f} is the most that may travel; largest: "
        f"{named}. Leave a package out that the other machine has (--wheels FOLDER without it)"
    )


def repository(root: Path) -> dict[str, bytes | Path]:
    """Files that git knows, links as paths, without what no check reads."""
    listed = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], capture_output=True, check=True).stdout
    known = [name for name in listed.decode().split("\0") if name and not name.startswith(LEFT_OUT)]
    names = [name for name in known if name.startswith(TESTS) or not name.startswith("tests/")]
    there = [(name, root / name) for name in names if (root / name).is_symlink() or (root / name).is_file()]
    return {name: path.readlink() if path.is_symlink() else path.read_bytes() for name, path in there}


def fetch(folder: Path, python: str) -> str:
    """Has pip fetch the wheels that the lock names for a Python on Linux; what it complains of, empty where nothing."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        python,
        "--implementation",
        "cp",
        *(word for version in PLATFORMS for word in ("--platform", version)),
        "--dest",
        str(folder),
        *pinned((ROOT / "requirements.lock").read_text().splitlines()),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr.strip()[-800:]


def pinned(lock: Iterable[str], names: Iterable[str] = WHEELS) -> list[str]:
    """Requirements of the lock for some names, without their markers; what it does not name is left out."""
    found = dict[str, str]()
    for line in lock:
        requirement = line.partition(";")[0].strip()
        if (match := re.match(r"([A-Za-z0-9._-]+)==", requirement)) is not None:
            found[match[1].lower().replace("_", "-")] = requirement
    return [found[name] for name in names if name in found]
