"""An error's sentence as a check: what is wrong, and after its last colon or full stop what to change."""

from __future__ import annotations

import re

from flowrl.commands.doctor.result import Check

_CURE = re.compile(r"[:.] (?=[A-Za-z'])")
_SHORTEST = 8  # letters; "wait: false" is a setting and no cure


def divided(sentence: str) -> tuple[str, str]:
    """The two parts of "what is wrong: what to change"; the second is empty where it has no such form."""
    ends = [found.start() for found in _CURE.finditer(sentence) if found.end() + _SHORTEST <= len(sentence)]
    return (sentence[: ends[-1]], sentence[ends[-1] + 2 :]) if ends else (sentence, "")


def faulty(name: str, sentence: str) -> Check:
    """The check that such an error fails."""
    found, cure = divided(sentence)
    return Check(name=name, state="fault", found=found, cure=cure)
