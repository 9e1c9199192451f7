"""The journal of a suite: a file of JSON lines that checks add to and that is read meanwhile. Imports nothing heavy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

JOURNAL = "FLOWRL_GPU_JOURNAL"
DEADLINE = "FLOWRL_GPU_DEADLINE"
"""Environment variables: the journal, and when the time is up by `time.time()`."""
SECTIONS = ("machine", "exactness", "gradients", "memory", "speed", "runs", "several")
"""In their order: what a card alone can tell comes before what takes longest."""
LOST = 70
"""Exit code of a process whose card answers no more."""


def entries(journal: Path) -> list[dict[str, Any]]:
    """What a journal says so far; a line that is being written is left out."""
    lines = journal.read_text().splitlines() if journal.is_file() else []
    found = list[dict[str, Any]]()
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def write(journal: Path, entry: Mapping[str, Any]) -> None:
    """Adds a line."""
    with journal.open("a") as file:
        file.write(json.dumps(entry, default=str) + "\n")
