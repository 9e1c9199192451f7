"""The questions of `flowrl init` on a terminal; each answer is checked at once, and a wrong one asked for again."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from flowrl.migrating.answers import QUESTIONS
from flowrl.runtime.scrubbing import say as print


def ask(given: Mapping[str, str | None]) -> dict[str, str | None]:
    """Asks for missing answers if there is a terminal; at the end of the input, the rest stays unasked."""
    answers = dict(given)
    if sys.stdin is None or not sys.stdin.isatty():
        return answers
    for name, question in QUESTIONS.items():
        while answers[name] is None and question.asked(answers):
            usual = f" [{question.usual}]" if question.usual else ""
            print(f"{question.text}{usual}: ", end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
            answer = line.strip() or question.usual
            fault = question.fault(answer) if answer else None
            if fault is None:
                answers[name] = answer or None
                break
            print(f"  {fault}", file=sys.stderr)
            if not line:
                return answers
    return answers
