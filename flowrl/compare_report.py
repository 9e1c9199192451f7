"""Writes the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowrl.compare import Question


def write(folder: Path, question: Question, **view: Any) -> None:
    """Nothing yet."""
