"""`flowrl init`: flags and answers -> `flowrl.init` -> what was written and what comes next."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

import flowrl
from flowrl.commands.sampling_arguments import add_out, settings_for
from flowrl.runtime.scrubbing import say as print


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl init` takes."""
    parser.description = (
        "Write a first configuration, which 'flowrl plan' accepts: the recommended recipe for a model, with an "
        "evaluation before and after, that fits a card and ends in time. On a terminal it asks for the rest."
    )
    add = parser.add_argument
    add("overrides", nargs="*", default=[], metavar="key=value", help="settings to write instead")
    add(
        "--from",
        dest="source",
        metavar="FILE",
        help="translate a configuration of flow_grpo or DiffusionNFT (FILE.py:FUNCTION), "
        "Flow-Factory or UniRL (YAML), verl-omni, DanceGRPO or MixGRPO (shell script)",
    )
    add("--model", metavar="MODEL", help="a published checkpoint, a diffusers folder or asset:tiny-sd3")
    add("--card", metavar="GB", help="memory of one card, such as 24 or 80, or its name, such as 4090")
    add("--reward", metavar="NAME", help="a name from 'flowrl list rewards', or your own FILE.py:FUNCTION")
    add("--prompts", metavar="FILE", help="training prompts, one per line, or JSON lines (default: some that ship)")
    add("--eval-prompts", metavar="FILE", help="held-out prompts (default: a tenth of yours)")
    add("--hours", type=float, metavar="H", help="hours after which the run ends (default: 10, an evening)")
    add_out(parser, "file to write", "my.yaml")


def run(parsed: argparse.Namespace) -> int:
    """Asks for what no flag gives, if there is a terminal; writes the file and prints the next commands."""
    from flowrl.cli import in_flags
    from flowrl.migrating.answers import QUESTIONS
    from flowrl.rendering.terminal_text import wrapped

    given = {name: value for name, value in vars(parsed).items() if name != "overrides"}
    if parsed.source is None:
        given |= ask({name: given[name] for name in QUESTIONS})
    given |= {"hours": float(given["hours"])} if given["hours"] else {}
    words = settings_for(parsed.overrides, flowrl.init)
    made = flowrl.init(**{name: value for name, value in given.items() if value is not None}, **words)
    plan, train = made.next_commands
    notes = in_flags("\n".join(made.notes), "init").splitlines()
    print("\n".join([*(wrapped(note, rest="  ") for note in notes), f"next: {plan}", f"then: {train}"]))
    return 0


def ask(given: Mapping[str, str | None]) -> dict[str, str | None]:
    """Asks for missing answers if there is a terminal; at the end of the input, the rest stays unasked."""
    from flowrl.migrating.answers import QUESTIONS

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
