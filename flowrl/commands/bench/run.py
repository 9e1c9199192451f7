"""`flowrl bench`: measures phase by phase, writes `bench.json` after each section and `bench.html` at the end."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.commands.bench.arguments import MINUTES, REPEATS
from flowrl.config.train import TrainConfig, find_config, load_config, to_yaml
from flowrl.profiling.bench_result import OUT_OF_MEMORY, PAGE, SECTIONS, Bench, Phase, read_bench, write_bench
from flowrl.runs.run_folder import make_free_folder
from flowrl.runtime.failures import out_of_memory
from flowrl.runtime.files import LOCK, is_taken, locked, write_atomically
from flowrl.runtime.scrubbing import say as print
from flowrl.session.train import DEFAULT_CONFIG

if TYPE_CHECKING:
    from flowrl.profiling.bench_subject import Subject
    from flowrl.profiling.stopwatch import Stopwatch

_WARM_UPS = {"cpu": 1, "cuda": 3}
COMPARISON = "compare.html"
_OF_MEASURING = ("random_weights", "layers", "repeats", "minutes", "phases")


def run(parsed: argparse.Namespace) -> int:
    """Measures, or compares two benches; returns 1 where answers are wrong (`Bench.wrong`), 130 if cut off.

    Raises:
        ValueError: a setting or flag that cannot be, or a folder that is taken.
    """
    if parsed.compare is not None:
        return _compare(parsed)
    parsed.repeats = REPEATS if parsed.repeats is None else parsed.repeats
    parsed.minutes = MINUTES if parsed.minutes is None else parsed.minutes
    named = bool(parsed.arguments) and "=" not in parsed.arguments[0]
    path = find_config(parsed.arguments[0] if named else DEFAULT_CONFIG)
    config = load_config(path, parsed.arguments[1:] if named else parsed.arguments)
    if not parsed.minutes > 0:
        raise ValueError(f"--minutes must be above 0, got {parsed.minutes:g}")
    sections = _sections(parsed.phases)
    for key, given in (("resume", config.resume), ("resume_changed", config.resume_changed or None)):
        if given is not None:
            raise ValueError(f"{key} continues a run, and a bench has none: leave it out")
    config.resolve_batch(1)
    with _folder(_wanted(parsed.out, config.out), path.stem) as folder:
        return _measure(parsed, replace(config, out=None), path.stem, sections, folder)


def _sections(given: str | None) -> tuple[str, ...]:
    """The sections to measure, in their order; the ceilings are what others are held against, so they always come."""
    wanted = SECTIONS if given is None else tuple(given.split(","))
    if unknown := [name for name in wanted if name not in SECTIONS]:
        raise ValueError(f"--phases has no {unknown[0]!r}: give some of {','.join(SECTIONS)}")
    return tuple(name for name in SECTIONS if name in wanted or name == "ceilings")


def _wanted(flag: Path | None, key: str | None) -> Path | None:
    if flag is not None and key is not None:
        raise ValueError(f"--out {flag} and out={key} both say where the bench goes: leave one of them out")
    given = flag if key is None else Path(key)
    return None if given is None else given.expanduser()


@contextmanager
def _folder(wanted: Path | None, name: str) -> Iterator[Path]:
    """The folder of a bench, with nobody else at work in it."""
    if wanted is not None and is_taken(wanted):
        raise ValueError(f"{wanted} is not empty, and nothing in it will be overwritten: choose another folder")
    here = wanted is not None and wanted.exists()
    folder = make_free_folder(f"bench-{name}") if wanted is None else wanted
    with locked(folder, "another bench"):
        try:
            yield folder
        finally:
            if not here and not is_taken(folder):  # nothing was measured
                (folder / LOCK).unlink(missing_ok=True)
                folder.rmdir()


# ---- measuring -------------------------------------------------------------------------------------------------------


def _measure(parsed: argparse.Namespace, config: TrainConfig, name: str, sections: Sequence[str], folder: Path) -> int:
    import torch

    from flowrl.pages.bench_page import render
    from flowrl.profiling.bench_subject import prepare
    from flowrl.profiling.bench_text import as_text, progress_line
    from flowrl.profiling.stopwatch import Stopwatch, storages

    deadline = time.monotonic() + 60 * parsed.minutes
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    subject = prepare(config, name, random_weights=parsed.random_weights, layers=parsed.layers)
    watch = Stopwatch(
        device=subject.device, repeats=parsed.repeats, warm_ups=_WARM_UPS.get(subject.device.type, 3),
        deadline=deadline, weights=storages(subject.pipeline.denoiser.parameters()),
        counts=config.pipeline.compile == "none",
    )  # fmt: skip
    bench = Bench(name=name, facts=_facts(subject, parsed), config=to_yaml(subject.config), notes=subject.notes)
    print(f"Measuring into {folder}", flush=True)
    try:
        for section in sections:
            if watch.left <= 0:
                note = f"left out: the time was up (--minutes {parsed.minutes:g})"
                bench = bench.with_phase(Phase(section=section, name=section, note=note))
                continue
            for phase in _section(section, subject, watch, bench):
                bench = bench.with_phase(phase)
                print(progress_line(bench, phase), flush=True)
            write_bench(folder, bench)
        bench = replace(bench, finished=True)
    except KeyboardInterrupt:
        if not bench.phases:
            raise
        print("\nStopped: what was measured is kept.", file=sys.stderr)
    write_bench(folder, bench)
    write_atomically(folder / PAGE, render(bench))
    print(f"\n{as_text(bench)}\n\nNumbers   {folder / 'bench.json'}\nPage      {folder / PAGE}")
    if not bench.finished:
        return 130
    return int(bench.wrong)


def _section(name: str, subject: Subject, watch: Stopwatch, bench: Bench) -> Iterator[Phase]:
    """The phases of a section, as they are measured."""
    from flowrl.profiling import bench_subject, ceilings, compiled_phases, iterations, network_phases, part_phases

    pace = None if bench.throughput is None else bench.throughput[0]
    found: dict[str, Callable[[Subject, Stopwatch], Iterator[Phase]]] = {
        "ceilings": ceilings.ceilings, "text": part_phases.text, "network": network_phases.network,
        "guidance": network_phases.guidance, "attention": network_phases.attention, "parts": part_phases.parts,
        "rewards": part_phases.rewards, "iteration": partial(iterations.iteration, pace=pace),
        "compile": compiled_phases.compiled,
    }  # fmt: skip
    try:
        yield from found[name](subject, watch)
    except (RuntimeError, MemoryError) as error:  # what is prepared for a phase, or whole iterations
        if not out_of_memory(error):
            raise
        yield Phase(section=name, name="the rest", note=OUT_OF_MEMORY)
    if name == "text":
        bench_subject.free_encoders(subject)


def _facts(subject: Subject, parsed: argparse.Namespace) -> dict[str, Any]:
    """The machine, the software and what was measured."""
    from flowrl.profiling.bench_text import size
    from flowrl.runs.manifest import session_facts

    facts = session_facts(subject.device, 1)
    pipeline, network = subject.config.pipeline, subject.network
    return {
        "date": facts.pop("started"), **facts, "model": pipeline.model, "family": subject.family,
        "dtype": pipeline.dtype, "layers": subject.layers, "compile": pipeline.compile,
        "random_weights": not subject.text_encoders,
        "image": list(subject.pipeline.image_shape), "weights": size(subject.weight_bytes),
        "gflop_forward_row": None if network is None else network.forward / 1e9,
        "gflop_backward_row": None if network is None else network.backward / 1e9,
        "repeats": parsed.repeats,
    }  # fmt: skip


# ---- comparing -------------------------------------------------------------------------------------------------------


def _compare(parsed: argparse.Namespace) -> int:
    """Prints two benches beside each other, and writes their page."""
    from flowrl.pages.bench_page import render_comparison
    from flowrl.profiling.bench_text import as_comparison

    if parsed.arguments:
        raise ValueError(f"--compare measures nothing, so {parsed.arguments[0]!r} has no place beside it")
    given = [f"--{name.replace('_', '-')}" for name in _OF_MEASURING if vars(parsed)[name] not in (None, False)]
    if given:
        raise ValueError(f"--compare measures nothing, so {given[0]} has no place beside it")
    paths = [Path(given).expanduser() for given in parsed.compare]
    first, second = (read_bench(path) for path in paths)
    names = _names(paths)
    with _folder(_wanted(parsed.out, None), "comparison") as folder:
        write_atomically(folder / COMPARISON, render_comparison(first, second, names))
        print(f"{as_comparison(first, second, names)}\n\nPage      {folder / COMPARISON}")
    return 0


def _names(paths: Sequence[Path]) -> tuple[str, str]:
    """Short names of two benches: those of their folders, where these differ."""
    found = [path.name if path.is_dir() else path.resolve().parent.name for path in paths]
    return (found[0], found[1]) if found[0] != found[1] else ("A", "B")
