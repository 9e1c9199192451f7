"""`manifest.json` of a run folder: who it is, what it is made with, what ran, with which versions, and how it ended.

run              a random id, which its checkpoints carry too
inputs           what it is made with (`flowrl.training.seal`)
started, ...     command, commit, versions and machine of the start
resumed          the same of every time that it was continued, with the iteration it went on from and what had
                 changed in the inputs
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from flowrl.capabilities import capabilities
from flowrl.files import write_atomically

_FILE = "manifest.json"


def session_facts(device: torch.device, num_processes: int) -> dict[str, Any]:
    """What runs now: command, versions, machine."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(["flowrl", *sys.argv[1:]]),
        "git_commit": _git_commit(),
        "versions": {
            p: _version(p) for p in ("flowrl-toolkit", "torch", "diffusers", "transformers", "peft", "accelerate")
        },
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else str(device),
        "capabilities": capabilities(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "num_processes": num_processes,
    }


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a run folder; empty where there is none.

    Raises:
        ValueError: it cannot be read; names the file.
    """
    path = folder / _FILE
    if not path.exists():
        return {}
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(manifest, dict):
            raise ValueError("it holds no object")
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}): restore it; without the file the run can be continued, but nobody knows "
            "with what it was made"
        ) from error
    return manifest


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Writes the manifest of a run folder."""
    write_atomically(folder / _FILE, json.dumps(manifest, indent=2) + "\n")


def note_in_manifest(folder: Path, facts: Mapping[str, Any]) -> None:
    """Adds facts to the manifest."""
    write_manifest(folder, read_manifest(folder) | dict(facts))


def _git_commit() -> str | None:
    """The commit of the checkout that flowrl runs from; None for an installed wheel."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
