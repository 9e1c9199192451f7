"""Arguments of `flowrl init`; nothing heavy is imported here."""

from __future__ import annotations

import argparse
from pathlib import Path

from flowrl.commands.sampling_arguments import count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl init` takes."""
    parser.description = (
        "Write a first configuration, which 'flowrl plan' accepts. What no flag says is asked on a terminal; elsewhere "
        "the configuration that it builds on says it."
    )
    parser.add_argument(
        "--from", dest="source", metavar="FILE", help="translate a configuration of flow_grpo (FILE.py:FUNCTION), "
        "Flow-Factory (YAML), verl-omni or DanceGRPO (shell script)",
    )  # fmt: skip
    parser.add_argument("--model", metavar="MODEL", help="a published checkpoint, a diffusers folder or asset:tiny-sd3")
    parser.add_argument("--card", type=count, metavar="GB", help="memory of one card: 24, 40, 48, 80 or 141")
    parser.add_argument(
        "--reward", metavar="NAME", help="one of 'flowrl list rewards', or FILE.py:FUNCTION of yours (default: the one "
        "of the configuration that is built on)",
    )  # fmt: skip
    parser.add_argument("--prompts", metavar="FILE", help="training prompts, a line each, or JSON lines")
    parser.add_argument("--eval-prompts", metavar="FILE", help="held-out prompts (without: no evaluation of own ones)")
    parser.add_argument(
        "--out", type=Path, metavar="PATH", default=Path("my.yaml"), help="file to write (default: my.yaml)"
    )
