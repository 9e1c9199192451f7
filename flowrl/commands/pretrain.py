"""`flowrl pretrain`: trains the embedded models and their scorer from scratch."""

from __future__ import annotations

import argparse

import flowrl
from flowrl.runtime.scrubbing import say as print


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl pretrain` takes."""
    parser.description = (
        "Make one of the models that ship with flowrl from scratch, in tens of minutes on two cores. The same command "
        "resumes where it stopped."
    )
    parser.add_argument(
        "arguments",
        nargs="*",
        default=[],
        metavar="[WHAT] key=value",
        help="WHAT: sd3 (default), sd15, wan, kontext, scorer, the embedded world's differentiable reward, or prompts, "
        "the lists in assets/prompts, or verifier, a judge that learns; key=value: a setting",
    )


def run(parsed: argparse.Namespace) -> int:
    """Makes the named models or prompts and prints their places."""
    words: list[str] = parsed.arguments
    named = bool(words) and "=" not in words[0]
    print(f"wrote {flowrl.pretrain(*(words if named else ['sd3', *words]))}")
    return 0
