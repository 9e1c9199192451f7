"""UniGenBench's result files: a CSV with one row per image, and a JSON summary."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.benchmarks.unigenbench.point_scores import Scores
from flowrl.benchmarks.unigenbench.replies import Reply

COLUMNS = ("index", "prompt", "testpoint", "output", "result_json", "img_path")


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """A row of the result file; `reply` is None if no answer could be read, and `output` is the last answer."""

    index: int
    prompt: str
    points: tuple[str, ...]
    output: str
    reply: Reply | None
    image: str


def results_text(rows: Iterable[Judged]) -> str:
    """The CSV; an image without scores has the literal `null` as its result."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        result: dict[str, Any] | None = None
        if row.reply is not None:
            result = {
                "prompt": row.prompt,
                "testpoint": list(row.points),
                "analysis": row.reply.analysis,
                "score": row.reply.score,
            }
        # A judge may write what JSON does not know, such as a set; it is kept as text.
        text = json.dumps(result, ensure_ascii=False, indent=4, default=str)
        writer.writerow([row.index, row.prompt, str(list(row.points)), row.output, text, row.image])
    return stream.getvalue()


def summary_text(scores: Scores) -> str:
    """The JSON summary: correct, total and accuracy, rounded to 4 digits, of the primary and the sub-dimensions."""
    groups = {"primary_dimensions": scores.primary, "sub_dimensions": dict(sorted(scores.sub.items()))}
    record: dict[str, dict[str, dict[str, float]]] = {}
    for key, group in groups.items():
        record[key] = {
            name: {"correct": tally.correct, "total": tally.total, "accuracy": round(tally.accuracy, 4)}
            for name, tally in group.items()
        }
    return json.dumps(record, ensure_ascii=False, indent=4) + "\n"


def score_rows(rows: Sequence[Judged]) -> list[tuple[Sequence[str], Sequence[Any] | None]]:
    """Rows as `aggregate` takes them."""
    return [(row.points, None if row.reply is None else row.reply.score) for row in rows]
