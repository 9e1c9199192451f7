"""Arguments of `flowrl reward published`; nothing heavy is imported here."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl reward published` takes: nothing."""
    parser.description = (
        "Print docs/published.md: what each reward and benchmark with a published name reproduces, and against what "
        "that was checked."
    )
