"""The nearest of several names to a misspelt one; `building.py` writes the sentence about an unknown key."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def edit_distance(a: str, b: str) -> int:
    """The number of insertions, deletions, substitutions and swaps of neighbours from ``a`` to ``b``."""
    rows = [list(range(len(b) + 1))]
    for i, x in enumerate(a, start=1):
        row = [i]
        for j, y in enumerate(b, start=1):
            cost = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and y == a[i - 2]:
                cost = min(cost, rows[-2][j - 2] + 1)
            row.append(cost)
        rows.append(row)
    return rows[-1][-1]


def closest(word: str, candidates: Sequence[str]) -> str | None:
    """The candidate most like ``word``, or None if none is similar."""
    near = set(difflib.get_close_matches(word, candidates, n=5, cutoff=0.6))
    near |= {c for c in candidates if abs(len(word) - len(c)) <= 1 and edit_distance(word, c) <= 1}

    def key(candidate: str) -> tuple[int, float]:
        return edit_distance(word, candidate), -difflib.SequenceMatcher(None, word, candidate).ratio()

    return min(near, key=key, default=None)
