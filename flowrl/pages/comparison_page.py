"""The page of a comparison: one file that needs no network, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flowrl.comparing.comparison_result import Results
from flowrl.comparing.comparison_table import conclusion, heading, metric_name, tables
from flowrl.pages.comparison_figures import forest, key, reward_chart, scatter, score_chart, shots
from flowrl.rendering.document import document
from flowrl.rendering.markup import card, code, esc, notes_box, plural, section, titled_table
from flowrl.runtime.files import write_atomically

DISTANCE_CAPTION = (
    "Large dots are means over seeds, small ones seeds. Up and left is better: more score for less change. What the "
    "distance is, and the diversity of the images, stands under the table of the final models."
)
REWARD_CAPTION = (
    "Of each seed a Gaussian moving average over iterations (standard deviation a twentieth of them), then the mean "
    "over seeds. Methods with other rewards, or other choices of prompts, are not comparable here."
)


def write_page(folder: Path, results: Results, *, command: str, provenance: Sequence[str]) -> None:
    """Writes `compare.html` of a comparison's folder."""
    page = render(results, command=command, provenance=provenance, title=f"Comparison {folder.resolve().name}")
    write_atomically(folder / "compare.html", page)


def render(results: Results, *, command: str, provenance: Sequence[str], title: str) -> str:
    """The whole page as HTML."""
    metric = metric_name(results)
    curves = "".join(card(score_chart(results, cost)) for cost in ("nfe", "seconds"))
    notes = [*results.notes, *(f"{name} is not in the tables: {state}" for name, state in results.missing)]
    listed = "".join(titled_table(part.title, part.head, part.rows, part.note) for part in tables(results))
    distance = "".join(
        card(chart, below=f"<figcaption>{esc(words)}</figcaption>")
        for chart, words in ((scatter(results), DISTANCE_CAPTION), (reward_chart(results), REWARD_CAPTION))
    )
    body = "".join([
        f'<p class="summary">{esc(conclusion(results))}</p><p class="muted">{esc(heading(results))}</p>',
        notes_box(notes),
        section("curves", f"{metric[0].upper()}{metric[1:]} over its cost",
                f'<div class="two">{curves}</div>{key(results)}',
                "At the evaluations, mean over seeds. What evaluation costs is not counted."),
        section("differences", f"Difference to {results.label(results.baseline)} at the end",
                card(forest(results), style=" one"),
                "Same seeds, prompts and start noise on both sides. Right of the line is better than the baseline; an "
                "interval that crosses the line leaves the sign open. The table has p-values over training seeds that "
                "allow for the number of methods."),
        section("distance", "Distance from the base model, and training reward",
                f'<div class="two">{distance}</div>{key(results)}' if distance else ""),
        section("tables", "Tables", f'<div class="tables">{listed}</div>'),
        section("images", "Images", shots(results),
                "Same prompts and start noise in every row, spread evenly over the evaluation, not picked; the first "
                "seed of each method after training."),
        section("settings", "Settings and commands",
                f"{code(command)}<ul>{''.join(f'<li>{esc(line)}</li>' for line in provenance)}</ul>"),
    ])  # fmt: skip
    footer = "Written by <code>flowrl compare</code> from the files of the runs."
    runs = sum(len(row.runs) for row in results.methods)
    state = f"{plural(runs, 'finished run')} of {len(results.question.runs)}"
    lead = [plural(len(results.methods), "method"), state, esc(results.journal.get("created", ""))]
    return document(title, body, lead=" · ".join(lead), footer=footer)
