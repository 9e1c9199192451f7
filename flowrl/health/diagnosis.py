"""What a doctor finds, as data. Nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "note", "warning", "fault"]
"""`fault` would stop a run or has made one worthless; a `note` says what was not looked at, or need not be there."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at: what was found, and what to change; `cure` is empty where nothing is."""

    name: str
    state: State
    found: str
    cure: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """The checks of one thing, in order, and a line that says what they are about."""

    about: str
    checks: tuple[Check, ...]

    @property
    def code(self) -> int:
        """The exit code: 1 where there is a fault."""
        return int(any(check.state == "fault" for check in self.checks))


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The findings of `flowrl.doctor`.

    Attributes:
        examinations: that of the machine and that of the configuration, or that of the run.
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
