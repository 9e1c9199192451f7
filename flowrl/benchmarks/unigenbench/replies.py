"""UniGenBench: 600 prompts with test points, each of which a judge says is met by an image or not.

Rules of UniGenBench and UniGenBench++ (Wang et al. 2025, arXiv 2508.20751; repository CodeGoat24/UniGenBench): how a
judge's reply is read (`parse_reply`) and what its scores add up to (`aggregate`). Prompt files are read by
`flowrl.benchmarks.unigenbench.items`; `flowrl.evaluation.unigenbench.unigenbench` asks the judge.

The published judge is Gemini-2.5-Pro. Numbers of another judge, or of other words to it, are not leaderboard numbers.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Reply:
    """The two lists of a judge's reply, one entry per test point each; entries are as the judge wrote them."""

    analysis: list[Any]
    score: list[Any]


def parse_reply(text: str | None, num_points: int) -> list[Any] | None:
    """The scores of a judge's whole reply to `num_points` test points; None if there is none or it cannot be read, and
    must be asked for again. One entry per test point, of any type; `aggregate` counts those that equal 1."""
    reply = read_reply(text, num_points)
    return None if reply is None else reply.score


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
