"""Where a recorded result comes from."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

from flowrl.runtime.versions import git_commit


def origin() -> dict[str, str]:
    """Date, commit, machine and command, as recorded results begin."""
    script = Path(sys.argv[0]).resolve().relative_to(Path(__file__).resolve().parents[2])
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"), "commit": git_commit() or "unknown",
        "machine": f"{os.cpu_count()} {platform.machine()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}",
        "command": shlex.join(["python", str(script), *sys.argv[1:]]),
    }  # fmt: skip
