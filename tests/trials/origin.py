"""Where a recorded result comes from."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch


def origin() -> dict[str, str]:
    """Date, commit, machine and command, as recorded results begin."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False,
                           cwd=Path(__file__).parent)  # fmt: skip
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"), "commit": asked.stdout.strip() or "unknown",
        "machine": f"{os.cpu_count()} {platform.machine()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}",
        "command": shlex.join(["python", f"tests/trials/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
    }  # fmt: skip
