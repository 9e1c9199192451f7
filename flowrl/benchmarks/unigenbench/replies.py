"""UniGenBench: 600 prompts with test points, each of which a judge says is met by an image or not.

Rules of UniGenBench and UniGenBench++ (Wang et al. 2025, arXiv 2508.20751; repository CodeGoat24/UniGenBench): how a
judge's reply is read (`read_reply`) and what its scores add up to (`aggregate`). Prompt files are read by
`flowrl.benchmarks.unigenbench.items`; `flowrl.evaluation.unigenbench.unigenbench` asks the judge.

The published judge is Gemini-2.5-Pro. Numbers of another judge, or of other words to it, are not leaderboard numbers.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.benchmarks.unigenbench.point_scores import Scores


@dataclass(frozen=True, slots=True)
class Reply:
    """The two lists of a judge's reply, one entry per test point each; entries are as the judge wrote them."""

    analysis: list[Any]
    score: list[Any]


def read_reply(text: str | None, num_points: int) -> Reply | None:
    """The first `<analysis>` and the first `<score>` of a reply: Python lists with an entry for each test point.

    What stands around them does not matter. A reply that is one JSON object holds them under these names (judges that
    are held to a form, `structured: true`). A missing element, a list of another length, or something that is not a
    Python literal (such as text without quotes) makes the whole reply unreadable.
    """
    given = text or ""
    names = ("analysis", "score")
    try:
        record = json.loads(given)
    except (ValueError, RecursionError):
        record = None
    found: list[Any] = [record.get(name) if isinstance(record, dict) else None for name in names]
    if not all(isinstance(entries, list) for entries in found):
        found = [_tagged_list(given, name) for name in names]
    analysis, score = found
    if analysis is None or score is None or not len(analysis) == len(score) == num_points:
        return None
    return Reply(analysis, score)


def _tagged_list(text: str, tag: str) -> list[Any] | None:
    found = re.search(rf"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)
    if found is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a judge may write "\d", at which Python only frowns
        try:
            value = ast.literal_eval(found[1].strip())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # all that it documents
            return None
    return value if isinstance(value, list) else None


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
