"""Arguments that several `flowrl reward` commands take; nothing heavy is imported here."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_reward(parser: argparse.ArgumentParser, name: str, metavar: str, what: str) -> None:
    """Adds the reward, or rewards, and `--option`."""
    parser.add_argument(name, metavar=metavar, help=f"{what} by name, FILE.py:FUNCTION, or YAML with a list rewards:")
    parser.add_argument(
        "--option",
        dest="options",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of the reward, with several rewards NAME.KEY=VALUE; may be repeated",
    )


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """Adds `--prompt` and `--prompts`."""
    parser.add_argument("--prompt", metavar="TEXT", help="prompt of all images")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="file of prompts: .txt with one line per image, in the order of their names, 2.png before 10.png; .jsonl "
        "with file, prompt and metadata",
    )


def add_pairs(parser: argparse.ArgumentParser) -> None:
    """Adds the file of preferences."""
    parser.add_argument(
        "pairs", type=Path, metavar="PAIRS.jsonl", help="file of lines with prompt, winner and loser (paths of images)"
    )
