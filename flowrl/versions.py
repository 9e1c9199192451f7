"""Which flowrl this is, and with which libraries; read from their metadata, nothing heavy is imported."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

PACKAGES = ("flowrl-toolkit", "torch", "diffusers", "transformers", "peft", "accelerate")


def versions() -> dict[str, str | None]:
    """Versions of flowrl and of the libraries that its numbers depend on; None for what is not installed."""
    return {package: version_of(package) for package in PACKAGES}


def git_commit() -> str | None:
    """The commit of the checkout that flowrl runs from; None for an installed wheel."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def version_text() -> str:
    """What `flowrl --version` prints: one line."""
    own, *libraries = [f"{name} {number or 'not installed'}" for name, number in versions().items()]
    if commit := git_commit():
        own += f" (commit {commit})"
    return ", ".join([own.replace("-toolkit", ""), f"Python {platform.python_version()}", *libraries])


def version_of(package: str) -> str | None:
    """The version of an installed package; None where it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
