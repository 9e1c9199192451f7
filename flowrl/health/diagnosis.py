"""The findings of `flowrl doctor`: as data, from an error's sentence, and for a terminal. Nothing heavy is imported."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from flowrl.rendering.markup import plural
from flowrl.rendering.terminal_text import wrapped
from flowrl.runtime.disk_errors import WORDS

State = Literal["ok", "note", "warning", "fault"]
"""A `fault` would stop a run or has made one worthless; a `note` says what was not checked, or is optional."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check: what was found, and what to change; `cure` is empty if there is nothing to change."""

    name: str
    state: State
    found: str
    cure: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """The checks of one subject, in order, and a line that names the subject."""

    about: str
    checks: tuple[Check, ...]

    @property
    def code(self) -> int:
        """The exit code: 1 if there is a fault, otherwise 0."""
        return int(any(check.state == "fault" for check in self.checks))


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The findings of `flowrl.doctor`: `examinations` of machine and configuration or, if `of_run`, of a run."""

    examinations: tuple[Examination, ...]
    of_run: bool = False

    @property
    def checks(self) -> tuple[Check, ...]:
        """All checks, in order."""
        return tuple(check for one in self.examinations for check in one.checks)

    @property
    def stops(self) -> bool:
        """Whether something would stop a run, or has made one worthless."""
        return any(one.code for one in self.examinations)

    def _repr_html_(self) -> str:
        from flowrl.rendering.notebook import heading, rows_table

        return "".join(
            heading(one.about)
            + rows_table(("", "", "found", "what to change"), [(c.state, c.name, c.found, c.cure) for c in one.checks])
            for one in self.examinations
        )


def as_data(diagnosis: Diagnosis) -> dict[str, Any]:
    """What `flowrl doctor --json` prints."""
    return {"stops": diagnosis.stops, "diagnoses": [asdict(one) for one in diagnosis.examinations]}


_CURE = re.compile(
    rf"[:.;,] (?=(?:{'|'.join(WORDS['asking'].split())}|did you mean|allowed|the keys here are|in flowrl's folder|"
    r"'?flowrl [a-z]+|is it|are they|are line breaks)\b)",
    re.IGNORECASE,
)
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|“[^”]*”|\([^()]*\)")


def divided(sentence: str) -> tuple[str, str]:
    """Splits "what is wrong: what to change" in two; the second part is empty if nothing is requested."""
    plain = _QUOTED.sub(lambda found: "_" * len(found[0]), sentence)
    for found in _CURE.finditer(plain):
        if found[0] != ", " or not _CURE.search(plain, found.end()):  # a comma counts where nothing stronger follows
            return sentence[: found.start()], sentence[found.start() + 2 :]
    return sentence, ""


def faulty(name: str, sentence: str) -> Check:
    """A failed check for such an error."""
    return Check(name, "fault", *divided(sentence))


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
    lines = [wrapped(diagnosis.about), ""]
    for check in diagnosis.checks:
        indent = " " * (width + 6)
        lines.append(wrapped(check.found, f"  {marks[check.state]} {check.name:<{width}}  ", indent))
        if check.cure:
            lines.append(wrapped(check.cure, f"{indent}{arrow} ", f"{indent}{' ' * len(arrow)} "))
    return "\n".join(lines)


def last_words(checks: Sequence[Check]) -> str:
    """One line that says whether anything stops a run."""
    faults = sum(check.state == "fault" for check in checks)
    warnings = sum(check.state == "warning" for check in checks)
    said = f"{plural(faults, 'fault')} to fix first" if faults else "Nothing here would stop a run"
    more = f"; {plural(warnings, 'warning')}" if warnings else ""
    return f"{said}{more}."
