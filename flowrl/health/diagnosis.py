"""The findings of `flowrl doctor` as data. Nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

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
    """The findings of `flowrl.doctor`.

    Attributes:
        examinations: those of the machine and of the configuration, or that of the run.
        of_run: whether it is about a run.
    """

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
