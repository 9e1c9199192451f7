"""Progress on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.segment import ControlType, Segment
from rich.text import Text

Advance = Callable[[str], None]

_LINE_EVERY = 15.0  # seconds between lines where there is not a terminal
_bars: list[Progress] = []  # those that a terminal shows, the newest last


class _WithLines(Progress):
    """A bar with lines of text below."""

    def __init__(self, *columns: ProgressColumn, console: Console, more: Callable[[], Sequence[str]] | None) -> None:
        self._more = more  # read by the first drawing, which the parent's __init__ makes
        super().__init__(*columns, console=console, transient=False)

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from super().get_renderables()
        if self._more is not None:
            yield from (Text(line, no_wrap=True, overflow="ellipsis") for line in self._more())


class _Drawn:
    """Free rows, and at the first of them whatever an escape sequence draws."""

    def __init__(self, rows: int, sequence: str) -> None:
        self._rows, self._sequence = rows, sequence

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        yield from [Segment.line()] * self._rows
        there_and_back = f"\x1b[{self._rows}A{self._sequence}\x1b[{self._rows}B"
        yield Segment(there_and_back, None, [(ControlType.CURSOR_UP, self._rows)])  # a control: it has no width


def draw_above(rows: int, sequence: str) -> None:
    """Draws above the bar that is shown, in so many rows, by an escape sequence that leaves the cursor where it was.

    Nothing is drawn where no bar is shown.
    """
    for bar in _bars[-1:]:
        bar.console.print(_Drawn(rows, sequence), end="")


@contextmanager
def progress(
    label: str, total: int, done: int = 0, *, enabled: bool = True, more: Callable[[], Sequence[str]] | None = None
) -> Iterator[Advance]:
    """A bar with time left; yields `advance(note)`, called once per unit.

    Where standard error is not a terminal, a line is printed every 15 seconds and at the end instead, so that logs stay
    readable. `enabled=False` shows nothing (other processes than the main one). `more` gives lines that a terminal
    shows below the bar; it is called several times a second, from another thread.
    """
    if not enabled:
        yield lambda note: None
    elif sys.stderr.isatty():
        columns = (
            TextColumn("{task.description}"), BarColumn(bar_width=18), MofNCompleteColumn(),
            TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
        )  # fmt: skip
        with _WithLines(*columns, console=Console(stderr=True), more=more) as bar:
            task = bar.add_task(label, total=total, completed=done, note="")
            _bars.append(bar)
            try:
                yield lambda note: bar.update(task, advance=1, note=note)
            finally:
                _bars.remove(bar)
    else:
        yield _lines(label, total, done)


def _lines(label: str, total: int, done: int) -> Advance:
    start = last = time.monotonic()
    count = done

    def advance(note: str) -> None:
        nonlocal count, last
        count += 1
        now = time.monotonic()
        if now - last >= _LINE_EVERY or count == total:
            last = now
            left = (now - start) / (count - done) * (total - count)
            print(f"{label} {count}/{total}  left {clock(left)}  {note}".rstrip(), file=sys.stderr, flush=True)

    return advance


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"
