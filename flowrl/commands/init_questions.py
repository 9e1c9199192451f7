"""What `flowrl init` asks on a terminal: each answer is looked at when it is given, and asked for again."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from flowrl.migrating.answers import QUESTIONS
from flowrl.runtime.scrubbing import say as print


def ask(given: Mapping[str, str | None]) -> dict[str, str | None]:
    """Asks for what is not given, where somebody sits at a terminal; an end of the input leaves the rest unasked."""
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
