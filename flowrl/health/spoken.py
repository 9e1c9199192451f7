"""Turns an error's sentence into a check: what is wrong, and from the first request on, what to change."""

from __future__ import annotations

import re

from flowrl.health.diagnosis import Check
from flowrl.runtime.disk_errors import WORDS

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
