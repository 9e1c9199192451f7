"""Progress: a bar on a terminal, a line that is redrawn in a notebook, plain lines elsewhere."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.segment import ControlType, Segment
from rich.text import Text

from flowrl.runtime.call import shown
from flowrl.runtime.scrubbing import printable
from flowrl.runtime.scrubbing import say as print

Advance = Callable[[str], None]

_LINE_EVERY = 15.0  # seconds between lines where there is not a terminal
_REDRAWN_EVERY = 1.0  # seconds between drawings in a notebook
_bars: list[Progress] = []  # those that a terminal shows, the newest last
_cells: list[_InNotebook] = []  # those that a notebook shows


class _WithLines(Progress):
    """A bar with lines of text below."""

    def __init__(self, *columns: ProgressColumn, console: Console, more: Callable[[], Sequence[str]] | None) -> None:
        self._more = more  # read by the first drawing, which the parent's __init__ makes
        super().__init__(*columns, console=console, transient=False)

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from super().get_renderables()
        if self._more is not None:
            yield from (Text(printable(line), no_wrap=True, overflow="ellipsis") for line in self._more())


class _Drawn:
    """Free rows, and at the first of them whatever an escape sequence draws."""

    def __init__(self, rows: int, sequence: str) -> None:
        self._rows, self._sequence = rows, sequence

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        yield from [Segment.line()] * self._rows
        there_and_back = f"\x1b[{self._rows}A{self._sequence}\x1b[{self._rows}B"
        yield Segment(there_and_back, None, [(ControlType.CURSOR_UP, self._rows)])  # a control: it has no width


def draw_above(rows: int, sequence: str) -> None:
    """Draws above the bar that is shown, if any, in so many rows, by an escape sequence that keeps the cursor."""
    for bar in _bars[-1:]:
        bar.console.print(_Drawn(rows, sequence), end="")


class _InNotebook:
    """A line of text in a cell's output, redrawn in its place, with HTML below it."""

    def __init__(self, display: ModuleType) -> None:
        self._text = self._below = ""
        self._drawn = 0.0
        self._handle = display.display(self._bundle(), raw=True, display_id=True)

    def _bundle(self) -> dict[str, str]:
        line = f"<pre style='margin:0'>{html.escape(self._text)}</pre>"
        return {"text/plain": self._text, "text/html": line + self._below}

    def say(self, text: str, *, now: bool) -> None:
        """Draws another text, once a second at most unless it has to be now."""
        self._text = printable(text)
        if now or time.monotonic() - self._drawn >= _REDRAWN_EVERY:
            self._drawn = time.monotonic()
            self._handle.update(self._bundle(), raw=True)

    def show_below(self, markup: str) -> None:
        """Draws HTML below the line, in the place of what was there."""
        self._below = markup
        self.say(self._text, now=True)


def notebook_display() -> ModuleType | None:
    """IPython's displaying functions where this runs in a notebook, which has imported them; else None."""
    if "ipykernel" not in sys.modules or (shell := sys.modules.get("IPython")) is None:
        return None
    running = shell.get_ipython()
    return sys.modules.get("IPython.display") if running is not None and hasattr(running, "kernel") else None


def show_below(markup: str) -> None:
    """Shows HTML below the line of progress in a notebook; nothing where none is shown."""
    for cell in _cells[-1:]:
        cell.show_below(markup)


@contextmanager
def progress(
    label: str, total: int, done: int = 0, *, enabled: bool = True, more: Callable[[], Sequence[str]] | None = None
) -> Iterator[Advance]:
    """A bar with time left; yields `advance(note)`, called once per unit.

    In a notebook it is a line that is redrawn. Where standard error is no terminal either, a line is printed every 15
    seconds and at the end instead, so that logs stay readable. `enabled=False` shows nothing (other processes than the
    main one), nor does a call with `show=False`. `more` gives lines that a terminal shows below the bar; it is called
    several times a second, from another thread.
    """
    if not (enabled and shown()):
        yield lambda note: None
    elif sys.stderr.isatty():
        label_and_bar = (TextColumn("{task.description}"), BarColumn(bar_width=18), MofNCompleteColumn())
        columns = (*label_and_bar, TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
        with _WithLines(*columns, console=Console(stderr=True), more=more) as bar:
            task = bar.add_task(printable(label), total=total, completed=done, note="")
            _bars.append(bar)
            try:
                yield lambda note: bar.update(task, advance=1, note=printable(note))
            finally:
                _bars.remove(bar)
    elif (display := notebook_display()) is not None:
        cell = _InNotebook(display)
        _cells.append(cell)
        try:
            yield _lines(label, total, done, cell)
        finally:
            _cells.remove(cell)
    else:
        yield _lines(label, total, done)


def _lines(label: str, total: int, done: int, cell: _InNotebook | None = None) -> Advance:
    """Lines of standard error now and then, or that of a notebook's cell."""
    start = last = time.monotonic()
    count = done

    def advance(note: str) -> None:
        nonlocal count, last
        count += 1
        now = time.monotonic()
        left = (now - start) / (count - done) * (total - count)
        text = f"{label} {count}/{total}  left {clock(left)}  {note}".rstrip()
        if cell is not None:
            cell.say(text, now=count == total)
        elif now - last >= _LINE_EVERY or count == total:
            last = now
            print(text, file=sys.stderr, flush=True)

    return advance


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"
