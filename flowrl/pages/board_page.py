"""The page of a leaderboard: one file that needs no internet and links to the images and pages in their folders."""

from __future__ import annotations

import base64
import hashlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from flowrl.evaluation.board.board import (
    claims,
    digits_of,
    format_value,
    name_of,
    pairing_text,
    range_of,
    rank_text,
    summary,
    title,
)
from flowrl.evaluation.board.comparable import describe_conditions
from flowrl.evaluation.board.standings import Ranking
from flowrl.pages.strips import Room, strips_of
from flowrl.rendering.bars import Mark, forest
from flowrl.rendering.charts import WIDER
from flowrl.rendering.document import POLICY, document
from flowrl.rendering.markup import DASH, card, code, esc, fold, notes_box, plural, section, table

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


HEAD = ("model", "rank", "score", "to first")


def render(rankings: Sequence[Ranking], *, heading: str, command: str, out: Path) -> str:
    """The whole page as HTML; the page lies in `out`, and `command` made it."""
    room = Room()
    body = "".join([
        f'<p class="summary">{esc(summary(rankings))}</p>',
        notes_box(claims(rankings)),
        section("overview", "Overview", _overview(rankings),
                "Score and possible ranks of every model in each table; a dash where it has no such result."),
        *(_section(place, ranking, out, room) for place, ranking in enumerate(rankings)),
        section("settings", "Command", code(command)),
        ELEMENT,
    ])  # fmt: skip
    footer = "Written by <code>flowrl eval --compare</code>."
    return document(heading, body, footer=footer, policy=SORTING_POLICY)


def _overview(rankings: Sequence[Ranking]) -> str:
    if len(rankings) < 2:
        return ""
    names = dict.fromkeys(line.name for ranking in rankings for line in ranking.standings)
    rows = []
    for name in names:
        cells = []
        for ranking in rankings:
            line = next((line for line in ranking.standings if line.name == name), None)
            if line is None:
                cells.append(cell(float("nan"), DASH))
            else:
                mean = line.score.mean
                cells.append(cell(mean, format_value(mean, digits_of(ranking)), f"rank {rank_text(line)}"))
        rows.append([esc(name), *cells])
    links = "".join(
        f'<li><a href="#table-{place}">{esc(title(ranking))}</a>'
        f"{', apart from the others' if ranking.group.apart else ''}</li>"
        for place, ranking in enumerate(rankings)
    )
    head = [title(ranking).replace(": ", " ") + (" (apart)" if ranking.group.apart else "") for ranking in rankings]
    return f"<ol>{links}</ol>{sortable_table('Overview', ['model', *head], rows)}"


def _section(place: int, ranking: Ranking, out: Path, room: Room) -> str:
    digits = digits_of(ranking)
    rows = []
    for line in ranking.standings:
        behind, low = line.behind, line.rank[0]
        middle = (low + line.rank[1]) / 2 + low / 1000  # equal middles by the better end
        mean = float("nan") if behind is None else behind.mean
        below = "" if behind is None else range_of(behind, digits, sign=True)
        links = []  # to the pages of its evaluations
        for number, entry in enumerate(line.entries, start=1):
            page = entry.folder / "page.html"
            if page.is_file():
                words = "page" if len(line.entries) == 1 else f"page {number}"
                links.append(f'<a href="{esc(quote(os.path.relpath(page.resolve(), out.resolve())))}">{words}</a>')
        rows.append([
            f"{esc(name_of(line))} <small>{' '.join(links)}</small>",
            cell(middle, rank_text(line)),
            cell(line.score.mean, format_value(line.score.mean, digits), range_of(line.score, digits)),
            cell(mean, format_value(mean, digits, sign=True), below),
        ])  # fmt: skip
    intervals = [(name_of(line), [Mark(interval=line.score)]) for line in ranking.standings]
    chart = forest(intervals, x_label=ranking.group.metric.replace("_", " "), around=(), words=False, wide=WIDER,
                   description=f"scores of {title(ranking)} with intervals")  # fmt: skip
    apart = [f"Apart from the first table of this benchmark: {ranking.group.apart}."] if ranking.group.apart else []
    same = [[esc(key.replace("_", " ")), esc(value)] for key, value in describe_conditions(ranking.group.conditions)]
    strips = strips_of(ranking, out, room)
    if strips:
        said = (
            "The same prompt, and the same start noise where it is shared, in each row; below a sample its value. "
            "Samples link to their files."
        )
        strips = f'<div class="tables"><h3>Samples side by side</h3><p class="muted">{said}</p>{strips}</div>'
    body = "".join(
        [
            notes_box([*apart, *ranking.notes]),
            sortable_table(title(ranking), HEAD, rows),
            card(chart, style=" one"),
            strips,
            fold("What is the same for all of this table", table("Conditions", ["condition", "value"], same)),
        ]
    )
    lead = f"{plural(len(ranking.standings), 'model')}. {pairing_text(ranking)}"
    return section(f"table-{place}", title(ranking) + (" (apart)" if ranking.group.apart else ""), body, esc(lead))
