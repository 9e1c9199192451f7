"""Tables that you sort by a click on a head: a few lines of script, allowed by their hash in the page's policy."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

from flowrl.rendering.document import POLICY
from flowrl.rendering.markup import esc, table

SCRIPT = (Path(__file__).parent / "sorting.js").read_text(encoding="utf-8")
ELEMENT = f"<script>{SCRIPT}</script>"
_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode("ascii")
SORTING_POLICY = f"{POLICY}; script-src 'sha256-{_HASH}'"
"""Policy of a page with sortable tables: it may load nothing, and run only this script."""


def sortable_table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose heads are buttons; head is text, cells are HTML, numbers those of `cell`."""
    return table(caption, [f'<button type="button">{esc(name)}</button>' for name in head], rows)


def cell(value: float, shown: str, below: str = "") -> str:
    """A number for sorting, its text, and smaller text below it."""
    key = f"{value:.10g}" if math.isfinite(value) else ""
    return f'<data value="{key}">{esc(shown)}</data>{f"<small>{esc(below)}</small>" if below else ""}'
