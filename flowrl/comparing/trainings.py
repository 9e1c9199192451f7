"""Trains the runs of a comparison side by side, as ordinary `flowrl train` processes, and watches them to their end.

The run folders decide: `summary.json` marks a finished run, `config.yaml` one that can be continued. The journal only
notes what happened. The trainings inherit a lock, so that two comparisons cannot use one folder, even after a crash.

Progress has a line for every active run: redrawn on a terminal, printed each minute elsewhere.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

from flowrl.comparing.question import (
    BUDGETS,
    JOURNAL,
    ComparisonQuestion,
    base_key,
    is_finished,
    overrides_of,
    run_name,
    settings_of,
)
from flowrl.config.train import find_config
from flowrl.rendering.markup import plural
from flowrl.runtime.call import shown
from flowrl.runtime.files import locked, write_atomically
from flowrl.runtime.interrupts import on_interrupt
from flowrl.runtime.process_settings import usable_cores
from flowrl.runtime.progress import clock
from flowrl.runtime.scrubbing import say as print

_LOOK_EVERY = 0.2  # seconds between looks at the trainings


@dataclass(kw_only=True, slots=True, eq=False)
class Training:
    """A run in training: its slot, 0 .. jobs - 1, its start (monotonic seconds), and the budget share spent then."""

    name: str
    slot: int
    process: subprocess.Popen[bytes]
    begun: float
    share: float


class ComparisonRuns:
    """The runs of a question in a folder."""

    def __init__(self, folder: Path, question: ComparisonQuestion, journal: dict[str, Any]) -> None:
        """Writes the journal at once and after every event."""
        self.folder, self.question, self.journal = folder, question, journal
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "logs").mkdir(exist_ok=True)
        runs = journal["runs"]
        for method, seed in question.runs:
            name = run_name(method, seed)
            entry = runs.setdefault(name, {"method": method, "seed": seed, "wall_seconds": 0.0})
            entry["state"] = "finished" if is_finished(folder / name) else "waiting"
            entry.pop("error", None)
        self.interrupts = 0
        self.working: list[Training] = []

    def run(self, jobs: int) -> tuple[str, ...]:
        """Trains all unfinished runs, `jobs` at a time; returns those that failed. Raises ValueError: another
        comparison uses the folder. Raises KeyboardInterrupt: it was interrupted, and all have been saved."""
        busy = "another comparison, or a training that it started,"
        with (
            locked(self.folder, busy) as lock,
            on_interrupt(self._interrupt),
            Display(self.folder, self.question) as display,
        ):
            self._write()
            waiting = [name for name, entry in self._runs().items() if entry["state"] == "waiting"]
            gpus = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count())
            if note := shared_gpus(min(jobs, len(waiting)), len(gpus)):
                display.say(note)
            while self.working or (waiting and not self.interrupts):
                while waiting and len(self.working) < jobs and not self.interrupts:
                    slot = min(set(range(jobs)) - {training.slot for training in self.working})
                    place = TrainingPlace.of(slot, jobs, gpus, usable_cores())
                    self._start(waiting.pop(0), slot, place, lock, display)
                for training in list(self.working):
                    code = training.process.poll()
                    if code is not None:
                        self.working.remove(training)
                        self._record_end(training, code, display)
                display.update(self._runs(), self.working)
                if self.working:
                    time.sleep(_LOOK_EVERY)
        return self._tell()

    def _tell(self) -> tuple[str, ...]:
        """Prints the finished and failed runs; returns the failed. Raises KeyboardInterrupt: it was interrupted."""
        states = {name: entry["state"] for name, entry in self._runs().items()}
        failed = tuple(name for name, state in states.items() if state == "failed")
        done = sum(state == "finished" for state in states.values())
        print(f"\n{done} of {plural(len(states), 'run')} finished" + (f", {len(failed)} failed:" if failed else "."))
        for name in failed:
            print(f"  {name}: {self._runs()[name]['error']}\n    {self.folder / 'logs' / name}.log")
        if self.interrupts:
            raise KeyboardInterrupt(f"Stopped. The same call continues the comparison in {self.folder}.")
        return failed

    def _runs(self) -> dict[str, Any]:
        runs: dict[str, Any] = self.journal["runs"]
        return runs

    def _start(self, name: str, slot: int, place: TrainingPlace, lock: IO[Any], display: Display) -> None:
        entry, folder = self._runs()[name], self.folder / name
        config = settings_of(self.question, entry["method"], entry["seed"])
        if (folder / "config.yaml").is_file():
            arguments = ["train", f"resume={folder}", "progress=false"]
        else:
            entry["base"] = base_key(config)
            entry["initial"] = not self._base_known(name, entry["base"])
            path = find_config(self.question.methods[entry["method"]])
            initial = f"eval.initial={str(entry['initial']).lower()}"
            arguments = [
                "train",
                str(path),
                f"out={folder}",
                *overrides_of(self.question, entry["seed"], place.threads),
                initial,
            ]
        entry["state"] = "running"
        self._write()
        share = spent_share(folder, self.question)
        display.say(f"{'continues' if share else 'started':<9} {name}")
        log = self.folder / "logs" / f"{name}.log"
        chosen = ":" in config.pipeline.device  # a GPU by number, which no other variable may renumber
        process = start_process(arguments, log, lock, {} if chosen else place.environment)
        self.working.append(Training(name=name, slot=slot, process=process, begun=time.monotonic(), share=share))
        if self.interrupts:  # while it was being started
            process.send_signal(signal.SIGINT)

    def _base_known(self, name: str, key: str) -> bool:
        """Whether the evaluation before training exists, or another run will make it."""
        return any(
            entry.get("base") == key
            and entry.get("initial")
            and ((self.folder / other / "eval" / "iteration_000000.jsonl").is_file() or entry["state"] == "running")
            for other, entry in self._runs().items()
            if other != name
        )

    def _record_end(self, training: Training, code: int, display: Display) -> None:
        entry, name = self._runs()[training.name], training.name
        seconds = time.monotonic() - training.begun
        entry["wall_seconds"] = round(entry["wall_seconds"] + seconds, 1)
        if is_finished(self.folder / name):
            entry["state"] = "finished"
        elif code in (130, -signal.SIGINT, -signal.SIGTERM) and self.interrupts:
            entry["state"] = "stopped"
        else:
            entry["state"] = "failed"
            log = self.folder / "logs" / f"{name}.log"
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
            last = next((line.strip() for line in reversed(lines) if line.strip()), "")
            entry["error"] = last or f"exit code {code}"
        error = f": {entry['error']}" if "error" in entry else ""
        display.say(f"{entry['state']:<9} {name}  {clock(entry['wall_seconds'])}{error}")
        self._write()

    def _write(self) -> None:
        write_atomically(self.folder / JOURNAL, json.dumps(self.journal, indent=1) + "\n")

    def _interrupt(self) -> None:
        """Passes Ctrl-C (or SIGTERM, SIGHUP) to the trainings; the first one ends them after their iteration."""
        self.interrupts += 1
        if self.interrupts == 1:
            text = "\nStopping: trainings end after this iteration and save. Press Ctrl-C again to stop at once."
            print(text, file=sys.stderr, flush=True)
        for training in self.working:
            training.process.send_signal(signal.SIGINT if self.interrupts < 3 else signal.SIGKILL)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlace:
    """Where a training runs: its threads, and the variables that show it its GPU."""

    threads: int
    environment: Mapping[str, str]

    @staticmethod
    def of(slot: int, jobs: int, gpus: Sequence[str], cores: int) -> TrainingPlace:
        """The place of one of `jobs` slots: GPUs are dealt out in turn, cores are divided."""
        environment = {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if jobs > 1 and len(gpus) > 1 else {}
        return TrainingPlace(threads=max(1, cores // jobs), environment=environment)


def visible_gpus(variable: str | None, count: int) -> list[str]:
    """Names, as in CUDA_VISIBLE_DEVICES, of the `count` GPUs that this process can see."""
    names = [str(number) for number in range(count)] if variable is None else variable.split(",")
    return [name.strip() for name in names[:count]]


def shared_gpus(jobs: int, gpus: int) -> str:
    """A note on several trainings that share a GPU; empty if there are none."""
    if jobs <= 1 or gpus == 0 or jobs <= gpus:
        return ""
    shared = "one GPU" if gpus == 1 else f"{gpus} GPUs"
    return (
        f"{jobs} trainings share {shared}: their memory adds up and each takes longer, so compare times with care; "
        f"`jobs` {gpus} gives each a GPU of its own"
    )


def start_process(
    arguments: Sequence[str], log: Path, lock: IO[Any], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts `flowrl <arguments>` in its own process and group, so that Ctrl-C reaches it only through this process.
    Output goes to the log; it inherits the open lock file and, with some variables set, this environment."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "flowrl", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[lock.fileno()],
            env={**os.environ, **environment},
        )


_LINES_EVERY, _READ_EVERY = 60.0, 2.0  # seconds
_TAIL = 16_384  # bytes read from the end of metrics.jsonl


class Display:
    """Shows the progress of runs on standard error; a context manager, so that it leaves the terminal in order."""

    def __init__(self, folder: Path, question: ComparisonQuestion) -> None:
        """Watches the runs of a question in a folder."""
        self.folder, self.question = folder, question
        self.live: Live | None = None
        if shown() and sys.stderr.isatty():
            self.live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
        self.printed = time.monotonic()

    def __enter__(self) -> Self:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live is not None:
            self.live.stop()

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        if self.live is not None:
            self.live.console.print(text, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def update(self, runs: Mapping[str, Mapping[str, Any]], working: Sequence[Training]) -> None:
        """Reads what the active runs have spent, and shows it when the next update is due."""
        now = time.monotonic()
        every = _LINES_EVERY if self.live is None else _READ_EVERY
        if now - self.printed < every:
            return
        self.printed = now
        spent = [spent_share(self.folder / run.name, self.question) for run in working]
        at_work = [(run.name, share, run.share, now - run.begun) for run, share in zip(working, spent, strict=True)]
        lines = standing(runs, at_work)
        if self.live is not None:
            self.live.update(Text("\n".join(lines)), refresh=True)
        else:
            self.say("\n".join(lines))


def standing(runs: Mapping[str, Mapping[str, Any]], working: Sequence[tuple[str, float, float, float]]) -> list[str]:
    """Lines on all active runs, each (name, share spent, share spent when started, seconds since), and on the whole:
    the time left of active and waiting runs, at the mean measured pace."""
    width = max((len(name) for name, *_ in working), default=0)
    lines, paces, shares = [], [], 0.0
    for name, share, before, seconds in working:
        left = "left ?"
        if share > before:
            paces.append(seconds / (share - before))
            left = f"left {clock(paces[-1] * max(1 - share, 0))}"
        shares += max(1 - share, 0)
        lines.append(f"  {name:<{width}}  running {min(share, 1):>4.0%}  {left}")
    ended = [entry["wall_seconds"] for entry in runs.values() if entry["state"] == "finished"]
    paces += [seconds for seconds in ended if seconds > 0]
    count = Counter(entry["state"] for entry in runs.values())
    known = [f"{count[state]} {state}" for state in ("failed", "stopped", "waiting") if count[state]]
    total = ""
    if paces and working:
        # A pace is seconds for a whole budget while as many runs shared the machine.
        total = f"  left {clock(sum(paces) / len(paces) * (shares + count['waiting']) / len(working))}"
    return [*lines, ", ".join([f"{count['finished']} of {len(runs)} finished", *known]) + total]


def spent_share(run: Path, question: ComparisonQuestion) -> float:
    """Share of the budget that a run has spent, from the last complete line of its metrics."""
    path, key = run / "metrics.jsonl", BUDGETS[question.budget]
    if not path.is_file():
        return 0.0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        lines = file.read().splitlines()
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:  # being written, or cut by the seek
            continue
        if isinstance(row, dict) and isinstance(row.get(key), int | float):
            return float(row[key]) / question.limit
    return 0.0
