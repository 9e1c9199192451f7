"""`flowrl bench [CONFIG]`: times the phases of an iteration on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

import flowrl
from flowrl.commands.sampling_arguments import add_out, config_and_settings, count
from flowrl.planning.throughput import FILE
from flowrl.profiling.result import MINUTES, PAGE, REPEATS, SECTIONS, read_bench
from flowrl.runtime.scrubbing import say as print

COMPARISON = "compare.html"
_OPTIONS = ("random_weights", "layers", "repeats", "minutes", "phases")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl bench` takes."""
    parser.description = (
        "Time the phases of a training iteration on this machine, beside what the machine could reach. Without CONFIG "
        "it measures the embedded model. Published checkpoints that are not in the hub's cache get random weights of "
        "their real dimensions: nothing is downloaded."
    )
    add = parser.add_argument
    add(
        "arguments",
        nargs="*",
        default=[],
        metavar="[CONFIG] key=value",
        help="as for flowrl train: a YAML file or the name of one that ships, and settings that replace the file's",
    )
    add("--random-weights", action="store_true", default=None, help="use random weights even if the checkpoint is here")
    add(
        "--layers",
        type=count,
        metavar="N",
        help="random weights with at most N blocks of each kind, to try a large family on a small machine",
    )
    add("--repeats", type=count, metavar="N", help=f"repeats of a phase (default: {REPEATS})")
    add(
        "--minutes",
        type=float,
        metavar="M",
        help=f"leave out phases that would begin later, and name them (default: {MINUTES:g})",
    )
    add("--phases", metavar="LIST", help=f"only these, of {','.join(SECTIONS)} (default: all)")
    add_out(parser, "folder of bench.json and bench.html", "runs/bench-<config>-<n>")
    add(
        "--compare",
        nargs=2,
        metavar="RESULT",
        help="compare two benches, folders or bench.json files, and measure nothing",
    )


def run(parsed: argparse.Namespace) -> int:
    """Measures, or compares two benches; returns 1 if results are wrong (`Bench.wrong`), 130 if cut off."""
    from flowrl.profiling.text import as_comparison, as_text
    from flowrl.runtime.files import write_atomically

    words: list[str] = parsed.arguments
    given = {name: value for name in _OPTIONS if (value := getattr(parsed, name)) is not None}
    if parsed.compare is not None:
        unread = [*map(repr, words), *(f"`{name}`" for name in given)]
        if unread:
            raise ValueError(f"`compare` measures nothing, so {unread[0]} has no place beside it")
        from flowrl.pages.bench_page import render_comparison
        from flowrl.profiling.bench import bench_folder

        paths = [Path(path).expanduser() for path in parsed.compare]
        first, second = map(read_bench, paths)
        found = [path.name if path.is_dir() else path.resolve().parent.name for path in paths]
        names = (found[0], found[1]) if found[0] != found[1] else ("A", "B")
        with bench_folder(parsed.out, "comparison") as place:
            write_atomically(place / COMPARISON, render_comparison(first, second, names))
            print(f"{as_comparison(first, second, names)}\n\nPage      {place / COMPARISON}")
        return 0
    config, settings = config_and_settings(words, flowrl.bench)
    made = flowrl.bench(config, out=parsed.out, **given, **settings)
    folder = made.folder
    assert folder is not None
    print(f"\n{as_text(made)}\n\nNumbers   {folder / FILE}\nPage      {folder / PAGE}")
    return int(made.wrong) if made.finished else 130
