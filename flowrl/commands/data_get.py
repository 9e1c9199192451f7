"""`flowrl data get NAME`: fetches a published prompt set into the files that configurations name."""

from __future__ import annotations

import argparse
from pathlib import Path

import flowrl
from flowrl.commands.sampling_arguments import add_out
from flowrl.runtime.scrubbing import say as print


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl data get` takes."""
    parser.add_argument("name", metavar="NAME", help="a set from 'flowrl data list'")
    add_out(parser, "folder", Path("data"))


def run(parsed: argparse.Namespace) -> int:
    """Fetches the files and prints their names."""
    fetched = flowrl.fetch_prompts(**vars(parsed))
    for path in fetched.kept:
        print(f"{path} is there already and stays as it is")
    for path, count in fetched.files.items():
        print(f"wrote {path}: {count:,} prompts")
    return 0
