"""Results as HTML for a notebook: tables, images and a curve, without a style sheet or script of their own."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from PIL import Image

from flowrl.media.reading import as_rgb
from flowrl.rendering.embedded_images import data_address
from flowrl.rendering.markup import bounds, esc, number, signed
from flowrl.statistics.bootstrap import Interval

WIDE, HIGH = 360, 90
"""Pixels of a curve."""
SHOWN = 8
"""Images of a result that are shown at most."""


def heading(text: str, below: str = "") -> str:
    """A title with a line below."""
    return f"<p><b>{esc(text)}</b>{f'<br>{esc(below)}' if below else ''}</p>"


def rows_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text; nothing without rows."""
    if not rows:
        return ""
    top = "".join(f"<th>{esc(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{esc(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def scores_table(scores: Mapping[str, Interval], differences: Mapping[str, Interval]) -> str:
    """Scores and differences with their bounds."""
    rows = [(name, number(value.mean), bounds(value)) for name, value in scores.items()]
    rows += [(f"{name}, change", signed(value.mean), bounds(value, sign=True)) for name, value in differences.items()]
    return rows_table(("", "mean", "95 %"), rows)


def images_row(images: Sequence[Image.Image], captions: Sequence[str]) -> str:
    """The first images side by side; small ones are enlarged with square pixels."""
    cells = ""
    for image, words in list(zip(images, captions, strict=True))[:SHOWN]:
        small = max(image.size) <= 96
        shown = image.resize((2 * image.width, 2 * image.height), Image.Resampling.NEAREST) if small else image.copy()
        shown.thumbnail((320, 320))
        buffer = io.BytesIO()
        as_rgb(shown).save(buffer, format="PNG")
        cells += (
            '<figure style="display:inline-block;margin:4px;max-width:160px">'
            f'<img src="{data_address(buffer.getvalue(), "image/png")}" alt="{esc(words)}" style="max-width:160px">'
            f"<figcaption>{esc(words)}</figcaption></figure>"
        )
    more = len(images) - SHOWN
    return f"<div>{cells}</div>" + (f"<p>and {more} more in <code>.images</code></p>" if more > 0 else "")


def curve(name: str, values: Sequence[float]) -> str:
    """One column as a line, with its first and last number; empty if it has fewer than two numbers."""
    points = [(place, value) for place, value in enumerate(values) if value == value]
    if len(points) < 2:
        return ""
    low, high = (end(value for _, value in points) for end in (min, max))
    across, up = (WIDE - 8) / (len(values) - 1), (HIGH - 8) / ((high - low) or 1.0)
    line = " ".join(f"{4 + place * across:.1f},{HIGH - 4 - (value - low) * up:.1f}" for place, value in points)
    said = f"{name}: {number(points[0][1])} at first, {number(points[-1][1])} at last"
    return (
        f'<figure style="margin:4px"><svg width="{WIDE}" height="{HIGH}" role="img" aria-label="{esc(said)}">'
        f'<polyline points="{line}" fill="none" stroke="#2a6fb0" stroke-width="2"/></svg>'
        f"<figcaption>{esc(said)}</figcaption></figure>"
    )
