"""Writes a diagnosis for a terminal of 80 columns: a marked line per check, and below it what to change."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from flowrl.health.diagnosis import Check, Examination, State
from flowrl.rendering.markup import plural
from flowrl.rendering.terminal_text import COLUMNS

_MARKS: Mapping[State, str] = {"ok": "✓", "note": "-", "warning": "!", "fault": "✗"}
_PLAIN: Mapping[State, str] = {"ok": "+", "note": "-", "warning": "!", "fault": "X"}


def as_text(diagnosis: Examination, encoding: str | None = "utf-8") -> str:
    """A diagnosis in lines; `encoding` is the terminal's, which may lack the marks."""
    marks, arrow = _MARKS, "→"
    try:
        "✓✗→".encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        marks, arrow = _PLAIN, "->"
    width = max((len(check.name) for check in diagnosis.checks), default=0)
    lines = [textwrap.fill(diagnosis.about, COLUMNS, break_on_hyphens=False, break_long_words=False), ""]
    for check in diagnosis.checks:
        indent = " " * (width + 6)
        lines += _filled(check.found, f"  {marks[check.state]} {check.name:<{width}}  ", indent)
        if check.cure:
            lines += _filled(check.cure, f"{indent}{arrow} ", f"{indent}{' ' * len(arrow)} ")
    return "\n".join(lines)


def last_words(checks: Sequence[Check]) -> str:
    """One line that says whether anything stops a run."""
    faults = sum(check.state == "fault" for check in checks)
    warnings = sum(check.state == "warning" for check in checks)
    said = f"{plural(faults, 'fault')} to fix first" if faults else "Nothing here would stop a run"
    more = f"; {plural(warnings, 'warning')}" if warnings else ""
    return f"{said}{more}."


def _filled(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text, COLUMNS, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
