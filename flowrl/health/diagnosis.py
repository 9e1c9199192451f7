"""What a doctor finds, as data. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "note", "warning", "fault"]
"""`fault` would stop a run or has made one worthless; a `note` says what was not looked at, or need not be there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that was looked at: what was found, and what to change; `cure` is empty where nothing is."""

    name: str
    state: State
    found: str
    cure: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Everything that was looked at, in order, below a line that says what it is about."""

    about: str
    checks: tuple[Check, ...]

    @property
    def code(self) -> int:
        """The exit code: 1 where there is a fault."""
        return int(any(check.state == "fault" for check in self.checks))


def as_data(diagnoses: Sequence[Diagnosis]) -> dict[str, Any]:
    """What `--json` prints."""
    return {"stops": any(one.code for one in diagnoses), "diagnoses": [asdict(one) for one in diagnoses]}
