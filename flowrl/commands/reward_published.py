"""`flowrl reward published`: what rewards and benchmarks with a published name reproduce, as a page of Markdown."""

from __future__ import annotations

import argparse

from flowrl.runtime.scrubbing import say as print


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl reward published` takes: nothing."""
    parser.description = (
        "Print docs/published.md: what each reward and benchmark with a published name reproduces, and against what "
        "that was checked."
    )


def run(parsed: argparse.Namespace) -> int:
    """Prints the page; returns 0."""
    from flowrl.evaluation.published import published_page

    del parsed
    print(published_page(), end="")
    return 0
