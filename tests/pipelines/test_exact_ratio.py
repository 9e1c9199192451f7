"""The importance ratio starts at exactly 1, whatever is combined: a part of `tests/trials/exact_ratio.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from exact_ratio import FAMILIES, GUIDANCE, WORDS, cases, measure


@pytest.mark.slow
def test_a_rollout_and_an_update_see_the_same_velocity(tmp_path: Path) -> None:
    """Every family in both dtypes, in each of which words and guidance take turns; eager, of which all is seen."""
    eager, chosen = [case for case in cases() if not case.compiled], []
    for place, name in enumerate(FAMILIES):
        for dtype, words in WORDS.items():
            own = [case for case in eager if (case.family, case.dtype) == (name, dtype)]
            for turn, (scale, way) in enumerate(GUIDANCE):
                word = words[(place + turn) % len(words)]
                chosen += [c for c in own if (c.attention, c.scale, c.train_negative) == (word, scale, way)]
    assert len(chosen) == 2 * len(FAMILIES) * len(GUIDANCE)
    assert {result["max_difference"] for result in measure(chosen, tmp_path)} == {0.0}
