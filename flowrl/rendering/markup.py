"""Small pieces of HTML and how numbers are written."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flowrl.runtime.scrubbing import without_secrets

if TYPE_CHECKING:
    from flowrl.statistics.bootstrap import Interval  # imports numpy, which `flowrl doctor` may find broken

MINUS, DASH = "\u2212", "\u2013"


def esc(text: object) -> str:
    """Text made safe for an element or a quoted attribute, without secrets."""
    return html.escape(without_secrets(str(text)), quote=True)


def settled(value: float) -> float:
    """A number without the digits that sums leave, so that 0.85 - 0.6375 is rounded as 0.2125 everywhere."""
    return float(f"{value:.12g}")


def number(value: float, digits: int = 3) -> str:
    """A plain number: fixed digits near 1, scientific far away, a dash if unknown."""
    if not math.isfinite(value):
        return DASH
    value = settled(value)
    if value != 0 and (abs(value) < 10.0**-digits or abs(value) >= 1e5):
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa}e{int(exponent)}".replace("-", MINUS)
    return f"{value:.{digits}f}".replace("-", MINUS)


def signed(value: float, digits: int = 3) -> str:
    """A difference, with its sign."""
    return f"+{number(value, digits)}" if value > 0 else number(value, digits)


def bounds(interval: Interval, *, sign: bool = False) -> str:
    """The two bounds as "0.21 to 0.34"; a dash if unknown."""
    if not interval.known:
        return DASH
    write = signed if sign else number
    return f"{write(interval.low)} to {write(interval.high)}"


def estimate(interval: Interval, *, sign: bool = False) -> str:
    """A mean with its bounds, as "0.27 (95 % 0.21 to 0.34)"; only the mean if they are unknown."""
    mean = (signed if sign else number)(interval.mean)
    return f"{mean} (95 % {bounds(interval, sign=sign)})" if interval.known else mean


def duration(seconds: float) -> str:
    """Seconds as "41 s", "12 min 5 s" or "3 h 20 min"."""
    if not math.isfinite(seconds):
        return DASH
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def plural(count: int, word: str) -> str:
    """ "1 image", "2 images", with thousands set apart."""
    return f"{count:,}".replace(",", "\u202f") + f" {word}{'' if count == 1 else 's'}"


def moment(iteration: int) -> str:
    """ "before training", "after 2 iterations"."""
    return "before training" if iteration == 0 else f"after {plural(iteration, 'iteration')}"


def facts_table(caption: str, head: Sequence[str], facts: Mapping[str, Any]) -> str:
    """A table of names with their values as code; what is no text is written as JSON."""
    said = {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        for key, value in facts.items()
    }
    return table(caption, head, [[esc(key), f"<code>{esc(text)}</code>"] for key, text in said.items()])


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column names the row. Cells are HTML; it scrolls inside its box on a narrow page."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>' for row in rows
    )
    label = f' role="region" aria-label="{esc(caption)}" tabindex="0"'
    return (
        f'<div class="scroll"{label}><table><caption>{esc(caption)}</caption>'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def tiles(cells: Sequence[tuple[str, str, str]]) -> str:
    """Key numbers: name, value and a few words each."""
    items = "".join(
        f"<div><dt>{esc(name)}</dt><dd><b>{esc(value)}</b><small>{esc(note)}</small></dd></div>"
        for name, value, note in cells
    )
    return f'<dl class="tiles">{items}</dl>' if items else ""


def notes_box(notes: Sequence[str]) -> str:
    """What a reader has to know first, in a box."""
    items = "".join(f"<li>{esc(note)}</li>" for note in notes)
    return f'<ul class="notes">{items}</ul>' if items else ""


def card(chart: str, *, title: str = "", below: str = "", style: str = "") -> str:
    """A figure: a chart, its title above and HTML below; nothing without a chart."""
    head = f"<h3>{title}</h3>" if title else ""
    return f'<figure class="card{style}">{head}{chart}{below}</figure>' if chart else ""


def code(text: str) -> str:
    """A block of commands or settings."""
    return f'<pre tabindex="0"><code>{esc(text)}</code></pre>' if text else ""


def fold(title: str, body: str) -> str:
    """A part that opens on a click."""
    return f"<details><summary>{esc(title)}</summary>{body}</details>"


def titled_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> str:
    """A table of text with its title above and a note below."""
    body = table(title, [esc(cell) for cell in head], [[esc(cell) for cell in row] for row in rows]) if rows else ""
    below = f'<p class="muted">{esc(note)}</p>' if note else ""
    return f"<h3>{esc(title)}</h3>{body}{below}"


def section(anchor: str, title: str, body: str, lead: str = "") -> str:
    """A titled part of the page; empty if there is nothing to show."""
    if not body:
        return ""
    intro = f'<p class="lead">{lead}</p>' if lead else ""
    return f'<section aria-labelledby="{anchor}"><h2 id="{anchor}">{esc(title)}</h2>{intro}{body}</section>'
