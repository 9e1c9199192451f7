"""Tables of a page that a click on a head sorts: a few lines of script, which the page's policy names by their hash."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence

from flowrl.rendering.document import POLICY
from flowrl.rendering.markup import esc, table

SCRIPT = """
for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => {
  const head = button.closest("th"), table = head.closest("table"), body = table.tBodies[0];
  const down = head.getAttribute("aria-sort") !== "descending", place = head.cellIndex;
  const key = (row) => {
    const cell = row.cells[place], data = cell.querySelector("data");
    return data ? (data.value === "" ? NaN : Number(data.value)) : cell.textContent;
  };
  const rows = [...body.rows].map((row) => [key(row), row]);
  rows.sort(([a], [b]) => {
    if (typeof a === "string") return (down ? -1 : 1) * a.localeCompare(b);
    if (isNaN(a) || isNaN(b)) return isNaN(a) - isNaN(b);
    return down ? b - a : a - b;
  });
  body.append(...rows.map(([, row]) => row));
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
});
"""
ELEMENT = f"<script>{SCRIPT}</script>"
_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode("ascii")
SORTING_POLICY = f"{POLICY}; script-src 'sha256-{_HASH}'"
"""What a page with sortable tables may load: nothing, and it may run this script alone."""


def sortable_table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose heads are buttons; head is text, cells are HTML, numbers those of `cell`."""
    return table(caption, [f'<button type="button">{esc(name)}</button>' for name in head], rows)


def cell(value: float, shown: str, below: str = "") -> str:
    """A number as it is sorted by, as it is shown, and smaller text below it."""
    key = f"{value:.10g}" if math.isfinite(value) else ""
    return f'<data value="{key}">{esc(shown)}</data>{f"<small>{esc(below)}</small>" if below else ""}'
