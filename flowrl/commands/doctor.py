"""`flowrl doctor`: checks the machine, a configuration or a run; prints what is wrong and what to change."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

import flowrl
from flowrl.commands.sampling_arguments import config_and_settings
from flowrl.runtime.files import plain
from flowrl.runtime.scrubbing import say as print

if TYPE_CHECKING:
    from flowrl.health.diagnosis import Examination


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl doctor` takes."""
    parser.description = (
        "Say what would stop a run, and what to change. Without an argument it checks this machine: driver, torch, "
        "kernels, versions, disk, processes, hub. With a configuration also its settings, prompts, model, licences, "
        "reward servers, and one real step. With a run folder: what went wrong in that run, and when. The exit code "
        "is 1 if something would stop a run, or has made it worthless."
    )
    add = parser.add_argument
    add(
        "arguments",
        nargs="*",
        default=[],
        metavar="[CONFIG|RUN] key=value",
        help="a YAML file, the name of a shipped configuration, or a run folder; then settings that replace a file's",
    )
    add("--no-step", dest="step", action="store_false", help="for a configuration: load no model and train no step")
    add("--offline", action="store_true", help="do not ask the hub")
    add("--json", action="store_true", help="print JSON instead of text")


def run(parsed: argparse.Namespace) -> int:
    """Prints the findings; returns 1 if something would stop a run, or has made one worthless."""
    from flowrl.cli import in_flags
    from flowrl.health.diagnosis import as_data, as_text, last_words

    before = ""

    def show(one: Examination) -> None:
        nonlocal before
        if not parsed.json:
            print(before + in_flags(as_text(one, getattr(sys.stdout, "encoding", None)), "doctor"), flush=True)
        before = "\n"

    looked_at, settings = config_and_settings(parsed.arguments, flowrl.doctor)
    found = flowrl.doctor(looked_at, step=parsed.step, offline=parsed.offline, on_examination=show, **settings)
    if parsed.json:
        print(in_flags(json.dumps(plain(as_data(found)), indent=1), "doctor"))
    elif not found.of_run:
        print(f"\n{last_words(found.checks)}")
    return int(found.stops)
