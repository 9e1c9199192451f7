"""`manifest.json` of a run folder: the run's id, its inputs, the commands and versions, and how it ended.

run              a random id, which its checkpoints carry too
inputs           what it is made with (`flowrl.training.resume_check`)
started, ...     command, commit, versions and machine of the start
resumed          the same of every time that it was continued, with the iteration it went on from and what had
                 changed in the inputs

`flowrl.training.run`, `flowrl.training.loop` and `flowrl.session.train` add later facts.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flowrl.runs.run_folder import MANIFEST
from flowrl.runtime.call import call_words
from flowrl.runtime.capabilities import capabilities
from flowrl.runtime.files import read_json, write_atomically
from flowrl.runtime.scrubbing import settings_without_secrets
from flowrl.runtime.versions import git_commit, untested, versions


def session_facts(device: torch.device, num_processes: int) -> dict[str, Any]:
    """Facts about the current process: command, versions, machine."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": call_words(),
        "git_commit": git_commit(),
        "versions": versions(),
        "untested_versions": untested(versions()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else str(device),
        "capabilities": capabilities(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "num_processes": num_processes,
    }


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a run folder; empty if there is none. Raises ValueError: it cannot be read; names the file."""
    path = folder / MANIFEST
    advice = "restore it; without the file the run can continue, but nobody knows what it was made with"
    return read_json(path, advice) if path.exists() else {}


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Writes the manifest of a run folder without secrets; keeps `inputs` exactly, because they are compared later."""
    shown = settings_without_secrets(manifest) | {key: manifest[key] for key in ("inputs",) if key in manifest}
    write_atomically(folder / MANIFEST, json.dumps(shown, indent=2) + "\n")
