"""`flowrl compare`: trains methods to the same cost on the same prompts and seeds, and writes a table and a page."""

from __future__ import annotations

import argparse
import shlex
from functools import partial
from pathlib import Path

import flowrl
from flowrl.commands.sampling_arguments import add_count, count
from flowrl.runtime.scrubbing import say as print


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl compare` takes."""
    add = parser.add_argument
    parser.description = (
        "Train every CONFIG with every seed to the same budget, then write a table and a page. The same command "
        "resumes where it stopped; you may add methods and seeds."
    )
    add(
        "configs",
        nargs="*",
        default=[],
        metavar="CONFIG|key=value",
        help="YAML files or names of methods; settings of all runs",
    )
    add("--out", type=Path, required=True, metavar="PATH", help="folder of the comparison")
    add("--budget", metavar="UNIT=NUMBER", help="budget of each run: nfe, seconds or images")
    add("--num-seeds", type=partial(count, most=1_000), metavar="N", help="training seeds of each method (default: 5)")
    add("--evals", type=count, metavar="N", help="evaluations spread over the budget (default: 2)")
    add_count(parser, "--jobs", 1, "trainings side by side")
    add("--baseline", metavar="NAME", help="the method that others are compared with (default: the first)")
    add(
        "--metric",
        metavar="NAME",
        help="evaluation metric of the table (default: eval/geneval/score, else the first reward)",
    )
    add(
        "--targets",
        metavar="LIST",
        help="scores whose cost is tabulated, such as 0.6,0.7 (default: 1/3, 2/3 and 9/10 of the gain)",
    )
    add("--report-only", action="store_true", help="write table and page again, train nothing")


def run(parsed: argparse.Namespace) -> int:
    """Prints the tables; returns 0, 1 if a run failed, 130 if interrupted."""
    from flowrl.comparing.comparison_result import NothingFinishedError

    try:
        found = flowrl.compare(**vars(parsed))
    except KeyboardInterrupt:
        folder = shlex.quote(str(parsed.out))
        print(f"\nStopped. Continue with:\n  flowrl compare --out {folder} --jobs {parsed.jobs}")
        print(f"A table of what is there:\n  flowrl compare --out {folder} --report-only")
        return 130
    except NothingFinishedError as error:
        print("No run is finished yet, so there is no table.")
        return int(bool(error.failed))
    files = {"Page": "compare.html", "Table": "compare.md", "Numbers": "results.json"}
    print(f"\n{found.text}\n\n" + "\n".join(f"{name:<8} {found.folder / file}" for name, file in files.items()))
    return int(bool(found.failed))
