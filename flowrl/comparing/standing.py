"""How a comparison stands: a line for every run at work, redrawn on a terminal, printed each minute elsewhere."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from flowrl.comparing.question import ComparisonQuestion
from flowrl.runtime.call import shown
from flowrl.runtime.progress import clock
from flowrl.runtime.scrubbing import say as print

SPENT_KEYS = {"nfe": "nfe/total", "images": "images", "seconds": "seconds/total"}
"""Budget -> the column of `metrics.jsonl` that counts it."""

_LINES_EVERY, _READ_EVERY = 60.0, 2.0  # seconds
_TAIL = 16_384  # bytes read from the end of metrics.jsonl


class Working(Protocol):
    """A run at work: its name, when it was started here (monotonic seconds) and what it had spent then."""

    name: str
    begun: float
    share: float


class Display:
    """Says how runs stand, on standard error; a context, so that a terminal is left in order."""

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

    def tell_end(self, name: str, entry: Mapping[str, Any]) -> None:
        """Says how a run ended."""
        error = f": {entry['error']}" if "error" in entry else ""
        self.say(f"{entry['state']:<9} {name}  {clock(entry['wall_seconds'])}{error}")

    def update(self, runs: Mapping[str, Mapping[str, Any]], working: Sequence[Working]) -> None:
        """Reads what the runs at work have spent, and shows it when it is time to."""
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
    """The lines about (name, share spent, share spent when started, seconds since) of the runs at work, and the whole.

    The time left of all is that of the runs at work and of those that wait, at the mean pace of what was measured.
    """
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
    """Share of the budget that a run has spent, from the newest whole line of its metrics."""
    path, key = run / "metrics.jsonl", SPENT_KEYS[question.budget]
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
