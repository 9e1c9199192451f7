"""The page of an evaluation: one file that needs no network, light and dark, and prints."""

from __future__ import annotations

from collections.abc import Sequence

from flowrl.evaluation.benchmark import Result
from flowrl.rendering.bars import Mark, forest, forest_of_two
from flowrl.rendering.charts import WIDER
from flowrl.rendering.document import document
from flowrl.rendering.markup import card, code, esc, facts_table, fold, notes_box, section, titled_table


def render(result: Result, *, title: str, names: Sequence[str], command: str) -> str:
    """The whole page as HTML.

    Args:
        result: what the benchmark found.
        title: of the page.
        names: of the subject and, if there is one, of the base.
        command: that made it.
    """
    tables = "".join(titled_table(part.title, part.head, part.rows, part.note) for part in result.tables)
    listed = facts_table("Judge, settings and times", ["Key", "Value"], result.facts)
    sides, said = (result.base_intervals, result.intervals), "scores with intervals"
    scores = forest_of_two(*sides, (names[-1], names[0]), x_label="score", description=said, wide=WIDER)
    changed = [(name.replace("_", " "), [Mark(interval=interval)]) for name, interval in result.differences.items()]
    label, said = "change with 95 % interval", "changes with intervals"
    changes = forest(changed, x_label=label, description=said, sign=True, words=True, wide=WIDER)
    body = "".join([
        f'<p class="summary">{esc(result.headline)}</p>',
        notes_box(result.notes),
        section("scores", "Scores with 95 % intervals", card(scores, style=" one"),
                f"Intervals cover {esc(result.claim)}."),
        section("differences", f"Change from {names[-1]} to {names[0]}", card(changes, style=" one"),
                "Pairs of the same prompt and sample. Right of the line is better; an interval that crosses the line "
                "leaves the sign open."),
        section("tables", "Tables", f'<div class="tables">{tables}</div>'),
        *result.sections,
        section("settings", "Command and settings", code(command) + fold("Judge, settings and times", listed)),
    ])  # fmt: skip
    return document(title, body, footer="Written by <code>flowrl eval</code>.")
