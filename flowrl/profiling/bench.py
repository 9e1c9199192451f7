"""`flowrl.bench`: measures phase by phase, writes `bench.json` after each section and the page at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.config.base import named_config
from flowrl.config.train import load_config, to_yaml
from flowrl.profiling.result import MINUTES, OUT_OF_MEMORY, REPEATS, SECTIONS, Bench, Phase, write_bench
from flowrl.runs.run_folder import make_free_folder
from flowrl.runtime.failures import out_of_memory
from flowrl.runtime.files import LOCK, is_taken, locked
from flowrl.runtime.public import public
from flowrl.runtime.scrubbing import say as print
from flowrl.session.train import DEFAULT_CONFIG

if TYPE_CHECKING:
    from flowrl.profiling.stopwatch import Stopwatch
    from flowrl.profiling.subject import BenchSubject

_WARM_UPS = {"cpu": 1, "cuda": 3}


@public
def bench(
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    random_weights: bool = False,
    layers: int | None = None,
    repeats: int = REPEATS,
    minutes: float = MINUTES,
    phases: str | None = None,
    out: str | Path | None = None,
    show: bool = True,
    page: Callable[[Bench], object] | None = None,
    **settings: Any,
) -> Bench:
    """Times the phases of a training iteration on this machine, and compares them with the machine's limits.

    A published checkpoint that is not in the hub's cache gets random weights with its real dimensions. Ctrl-C keeps the
    measurements so far (`finished` is False).

    Args:
        config: a YAML file, the name of one that ships, or a mapping of settings; None takes the embedded model.
        random_weights: take random weights even if the checkpoint is here.
        layers: random weights with at most so many blocks of each kind.
        repeats: repeats of a phase.
        minutes: after so many minutes no further phase begins; the result names those left out.
        phases: sections to time, separated by commas; None takes all.
        out: folder of `bench.json`; None takes a free one in `runs`.
        show: print a line for each phase.
        page: writes the page of the result.
        **settings: replace those of the configuration, as in `train`.

    Raises:
        ValueError: a setting is wrong, or the folder is taken.
    """
    path, name = named_config(DEFAULT_CONFIG if config is None else str(config) if isinstance(config, Path) else config)
    loaded = load_config(path, settings)
    if not minutes > 0:
        raise ValueError(f"`minutes` must be above 0, got {minutes:g}")
    sections = SECTIONS if phases is None else tuple(phases.split(","))
    if unknown := set(sections).difference(SECTIONS):
        raise ValueError(f"`phases` has no {min(unknown)!r}: give some of {','.join(SECTIONS)}")
    if continues := [k for k in ("resume", "resume_changed") if getattr(loaded, k) not in (None, False)]:
        raise ValueError(f"{continues[0]} continues a run, and a bench has none: leave it out")
    if out is not None and loaded.out is not None:
        raise ValueError(f"`out` {out} and out={loaded.out} both say where the bench goes: leave one of them out")
    loaded.resolve_batch(1)
    from flowrl.runtime.placement import torch_threads  # imports torch

    with bench_folder(loaded.out if out is None else out, name) as folder, torch_threads(loaded.threads):
        from flowrl.profiling.stopwatch import Stopwatch, storages
        from flowrl.profiling.subject import prepare

        deadline = time.monotonic() + 60 * minutes
        subject = prepare(replace(loaded, out=None), name, random_weights=random_weights, layers=layers)
        watch = Stopwatch(
            device=subject.device,
            repeats=repeats,
            warm_ups=_WARM_UPS.get(subject.device.type, 3),
            deadline=deadline,
            weights=storages(subject.pipeline.denoiser.parameters()),
            counts=loaded.pipeline.compile == "none",
        )
        facts = _facts(subject) | {"repeats": repeats}
        begun = Bench(name=name, facts=facts, config=to_yaml(subject.config), notes=subject.notes, folder=folder)
        print(f"Measuring into {folder}", flush=True)
        # Other phases are held against the ceilings, so that these always come.
        wanted = [section for section in SECTIONS if section in sections or section == "ceilings"]
        made = _measure(begun, subject, watch, wanted, f"{minutes:g}")
        write_bench(folder, made)
        if page is not None:
            page(made)
        return made


@contextmanager
def bench_folder(wanted: str | Path | None, name: str) -> Iterator[Path]:
    """A locked folder of a bench, as a context; removes a new one that stays empty. Raises ValueError: it is taken."""
    chosen = None if wanted is None else Path(wanted).expanduser()
    if chosen is not None and is_taken(chosen):
        raise ValueError(f"{chosen} is not empty, and nothing in it will be overwritten: choose another folder")
    here = chosen is not None and chosen.exists()
    folder = make_free_folder(f"bench-{name}") if chosen is None else chosen
    with locked(folder, "another bench"):
        try:
            yield folder
        finally:
            if not here and not is_taken(folder):
                (folder / LOCK).unlink(missing_ok=True)
                folder.rmdir()


def _measure(bench: Bench, subject: BenchSubject, watch: Stopwatch, sections: list[str], minutes: str) -> Bench:
    """Measures section by section, and writes the results after each."""
    from flowrl.profiling.text import progress_line

    folder = bench.folder
    assert folder is not None
    try:
        for section in sections:
            if watch.left <= 0:
                note = f"left out: the {minutes} minutes were up"
                bench = bench.with_phase(Phase(section=section, name=section, note=note))
                continue
            for phase in _phases(section, subject, watch, bench):
                bench = bench.with_phase(phase)
                print(progress_line(bench, phase), flush=True)
            write_bench(folder, bench)
    except KeyboardInterrupt:
        if not bench.phases:
            raise
        print("\nStopped: what was measured is kept.", file=sys.stderr)
        return bench
    return replace(bench, finished=True)


def _phases(section: str, subject: BenchSubject, watch: Stopwatch, bench: Bench) -> Iterator[Phase]:
    """The phases of a section, as they are measured."""
    from flowrl.profiling import ceilings, iterations, network, parts
    from flowrl.training.parts import encode_everything

    pace = None if bench.throughput is None else bench.throughput[0]
    found: dict[str, Callable[[BenchSubject, Stopwatch], Iterator[Phase]]] = {
        "ceilings": ceilings.ceilings,
        "text": parts.text,
        "network": network.network,
        "guidance": network.guidance,
        "attention": network.attention,
        "parts": parts.parts,
        "rewards": parts.rewards,
        "iteration": partial(iterations.iteration, pace=pace),
        "compile": network.measure_compiled,
    }
    try:
        yield from found[section](subject, watch)
    except (RuntimeError, MemoryError) as error:  # what is prepared for a phase, or whole iterations
        if not out_of_memory(error):
            raise
        yield Phase(section=section, name="the rest", note=OUT_OF_MEMORY)
    if section == "text" and subject.text_encoders and subject.config.pipeline.free_text_encoders:
        encode_everything(subject.pipeline, subject.pipeline, subject.prompts)


def _facts(subject: BenchSubject) -> dict[str, Any]:
    from flowrl.planning.words import in_bytes
    from flowrl.runs.manifest import session_facts

    facts = session_facts(subject.device, 1)
    pipeline, counted = subject.config.pipeline, subject.network
    return {
        "date": facts.pop("started"),
        **facts,
        "model": pipeline.model,
        "family": subject.family,
        "dtype": pipeline.dtype,
        "layers": subject.layers,
        "compile": pipeline.compile,
        "random_weights": not subject.text_encoders,
        "image": list(subject.pipeline.image_shape),
        "weights": in_bytes(subject.weight_bytes),
        "gflop_forward_row": None if counted is None else counted.forward / 1e9,
        "gflop_backward_row": None if counted is None else counted.backward / 1e9,
    }
