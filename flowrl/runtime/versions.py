"""Which flowrl this is, and with which libraries; read from their metadata, nothing heavy is imported."""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

PACKAGES = ("flowrl-toolkit", "torch", "diffusers", "transformers", "peft", "accelerate")

TESTED: Mapping[str, tuple[str, str]] = {
    "torch": ("2.11.0", "2.15.0"),
    "diffusers": ("0.41.0", "0.42.1"),
    "transformers": ("5.5.0", "5.23.0"),
    "peft": ("0.19.0", "0.21.2"),
    "accelerate": ("1.10.1", "1.15.0"),
}
"""The oldest and the newest tested release of each library: what pyproject.toml allows, and what the lock file has."""


def versions() -> dict[str, str | None]:
    """Versions of flowrl and of the libraries that its numbers depend on; None for what is not installed."""
    return {package: version_of(package) for package in PACKAGES}


def untested(installed: Mapping[str, str | None]) -> dict[str, str]:
    """What is said of the `installed` versions outside the tested ones, by library; nothing of a release's fixes."""
    found = {}
    for name, (oldest, newest) in TESTED.items():
        version = installed.get(name)
        own = [] if version is None else numbers(version)
        if own and not (numbers(oldest) <= own and own[:2] <= numbers(newest)):
            found[name] = f"{name} {version} is installed, and {oldest} to {newest} were tested"
    return found


def untested_line(installed: Mapping[str, str | None]) -> str | None:
    """One line for whoever starts a run with such versions; None where there are none."""
    if not (found := untested(installed)):
        return None
    return f"{'; '.join(found.values())}: numbers may differ, docs/versions.md"


def numbers(version: str) -> list[int]:
    """The numbers of a version, without what stands behind a plus or after a letter."""
    return [int(part) for part in re.match(r"[\d.]*", version)[0].split(".") if part]  # type: ignore[index]


@cache
def git_commit() -> str | None:
    """The commit of the checkout that flowrl runs from, as first found by this process, which has imported its code
    before; None for an installed wheel, whatever checkout it lies in."""
    # Without the tags: the commit alone, where `describe` would otherwise name the release and the distance from it.
    own = _git("rev-parse", "--show-prefix") == "flowrl/"
    return (_git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*") or None) if own else None


def _git(*arguments: str) -> str:
    """What git says in the folder of this file; nothing where it fails or is not installed."""
    command = ["git", "-C", str(Path(__file__).parents[1]), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    except OSError:
        return ""


def version_text() -> str:
    """What `flowrl --version` prints: one line."""
    own, *libraries = [f"{name} {number or 'not installed'}" for name, number in versions().items()]
    if commit := git_commit():
        own += f" (commit {commit})"
    return ", ".join([own.replace("-toolkit", ""), f"Python {platform.python_version()}", *libraries])


@cache
def version_of(package: str) -> str | None:
    """The version of an installed package; None where it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
