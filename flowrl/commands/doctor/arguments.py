"""Arguments of `flowrl doctor`; nothing heavy is imported here."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl doctor` takes."""
    parser.description = (
        "Say what would stop a run, and what to change. Without an argument this machine is looked at: driver, torch, "
        "kernels, versions, disk, processes, hub. With a configuration also its settings, prompts, model, licences, "
        "reward servers, and one real step. With a run folder: what went wrong in that run, and when. The exit code "
        "is 1 where something would stop a run, or has made it worthless."
    )
    add = parser.add_argument
    add("arguments", nargs="*", default=[], metavar="[CONFIG|RUN] key=value",
        help="a YAML file, the name of a shipped configuration, or a run folder; then settings that replace a file's"
    )  # fmt: skip
    add("--no-step", action="store_true", help="of a configuration, load no model and train no step")
    add("--offline", action="store_true", help="do not ask the hub")
    add("--json", action="store_true", help="print JSON instead of text")
