"""`manifest.json` of a run folder: what ran, with which versions, on what, and how it ended."""

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
from flowrl.files import read_json, write_atomically


def write_manifest(folder: Path, *, name: str, resumed: bool, device: torch.device, num_processes: int) -> None:
    """Writes the manifest of a run that starts, or adds to it that the run was resumed."""
    path = folder / "manifest.json"
    manifest = read_json(path) if resumed and path.exists() else {}
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    if manifest:
        manifest.setdefault("resumed", []).append(now)
        for ending in ("finished", "failed", "error"):
            manifest.pop(ending, None)
    else:
        manifest = {"config_name": name, "started": now}
    manifest |= {
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
    write_atomically(path, json.dumps(manifest, indent=2) + "\n")


def note_in_manifest(folder: Path, facts: Mapping[str, Any]) -> None:
    """Adds facts to the manifest."""
    path = folder / "manifest.json"
    manifest = read_json(path) | dict(facts)
    write_atomically(path, json.dumps(manifest, indent=2) + "\n")


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
