"""A part of the release check: what it found, what is wrong, and what this machine could not do."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
BIN = Path(sys.executable).parent
UV = str(BIN / "uv")
_MOST = 1500  # characters of a command's output that are shown, its end


class Broken(Exception):
    """A command that had to succeed and did not."""


@dataclass
class Part:
    """What one part of the check found."""

    name: str
    facts: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    """What has to change before a release."""
    left: list[str] = field(default_factory=list)
    """What this machine could not do, and why."""

    def say(self, text: str) -> None:
        print(f"{self.name}: {text}", flush=True)

    def refuse(self, found: object, text: str) -> None:
        """Notes what is wrong, where something was found."""
        if found:
            self.wrong.append(text)
            self.say(f"WRONG: {text}")

    def leave(self, text: str) -> None:
        """Notes what could not be done here."""
        self.left.append(text)
        self.say(f"not done: {text}")


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without what leads a Python or a version elsewhere."""
    left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    kept = {
        key: value for key, value in os.environ.items() if key not in left_out and not key.startswith("SETUPTOOLS_SCM_")
    }
    return {**kept, **more}


def run(*command: str | Path, cwd: Path = ROOT, timeout: float | None = None, **environment: str) -> str:
    """A command that has to succeed; what it prints.

    Raises:
        Broken: it ended with another code, cannot be started, or took too long.
    """
    words = [str(part) for part in command]
    try:
        done = subprocess.run(
            words,
            cwd=cwd,
            env=clean_environment(**environment),
            text=True,
            capture_output=True,
            timeout=timeout,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Broken(f"{' '.join(words)}: {error}") from None
    if done.returncode:
        output = (done.stdout + done.stderr).strip()
        raise Broken(f"{' '.join(words)} ended with {done.returncode}:\n{output[-_MOST:]}")
    return done.stdout
