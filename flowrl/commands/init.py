"""`flowrl init`: flags and answers -> `flowrl.init` -> what was written and what comes next."""

from __future__ import annotations

import argparse
from pathlib import Path

import flowrl
from flowrl.commands.sampling_arguments import count
from flowrl.runtime.scrubbing import say as print


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl init` takes."""
    parser.description = (
        "Write a first configuration, which 'flowrl plan' accepts. What no flag says is asked on a terminal; elsewhere "
        "the configuration that it builds on says it."
    )
    parser.add_argument(
        "--from",
        dest="source",
        metavar="FILE",
        help="translate a configuration of flow_grpo (FILE.py:FUNCTION), "
        "Flow-Factory (YAML), verl-omni or DanceGRPO (shell script)",
    )
    parser.add_argument("--model", metavar="MODEL", help="a published checkpoint, a diffusers folder or asset:tiny-sd3")
    parser.add_argument("--card", type=count, metavar="GB", help="memory of one card: 24, 40, 48, 80 or 141")
    parser.add_argument(
        "--reward",
        metavar="NAME",
        help="one of 'flowrl list rewards', or FILE.py:FUNCTION of yours (default: the one "
        "of the configuration that is built on)",
    )
    parser.add_argument("--prompts", metavar="FILE", help="training prompts, a line each, or JSON lines")
    parser.add_argument("--eval-prompts", metavar="FILE", help="held-out prompts (without: no evaluation of own ones)")
    parser.add_argument(
        "--out", type=Path, metavar="PATH", default=Path("my.yaml"), help="file to write (default: my.yaml)"
    )


def run(parsed: argparse.Namespace) -> int:
    """Asks for what no flag says where somebody can be asked, writes the file, and says what comes next."""
    from flowrl.cli import in_flags
    from flowrl.commands.init_questions import QUESTIONS, ask, card_fault

    given = vars(parsed)
    if parsed.source is None and not parsed.out.exists():
        given |= ask({name: given[name] for name in QUESTIONS})
        if given["model"] is None or given["card"] is None:
            raise ValueError(
                "`model` and `card` are needed where nobody can be asked, such as "
                "'flowrl init --model stabilityai/stable-diffusion-3.5-medium --card 24'"
            )
        if (fault := card_fault(str(given["card"]))) is not None:
            raise ValueError(fault)
        given["card"] = int(given["card"])
    made = flowrl.init(**given)
    plan, train = made.next_commands
    print(in_flags("\n".join([*made.notes, f"next: {plan}", f"then: {train}"]), "init"))
    return 0
