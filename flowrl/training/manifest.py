"""`manifest.json` of a run folder: what ran, with which versions, on what, and how it ended."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flowrl.capabilities import capabilities
from flowrl.files import read_json, write_atomically
from flowrl.versions import git_commit, versions


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
        "git_commit": git_commit(),
        "versions": versions(),
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
