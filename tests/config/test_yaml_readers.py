"""YAML is read in C where PyYAML can: the same values, and nothing taken that its own reader refuses."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import yaml

from flowrl.config import strict_yaml
from flowrl.config.strict_yaml import ConfigError, parse_yaml

ROOT = Path(__file__).parents[2]
PIECES = (
    *"{}[]:,-#&*!|>'\"%@`?\n \t~", ": ", "- ", "<<: ", "\n\n", "\r\n", "\u2028", "\x85", "\ufeff", "\x00", "\x07", "é",
    "---\n", "...\n", "!!python/name:os", "!!str", "&a ", "*a", "? ", "|-\n", ">+\n", "0x1F", "01", "1e3", ".inf", "<<",
)  # fmt: skip
"""What is put into configurations to break them."""


def read(text: str) -> str:
    try:
        return repr(parse_yaml(text, "it"))
    except ConfigError as error:
        return f"refused: {error}"


@pytest.mark.skipif(not yaml.__with_libyaml__, reason="PyYAML was built without libyaml")
def test_both_readers_take_and_refuse_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole configurations, and 1,500 pieces of them with up to three changes; values and sentences are compared."""
    whole = [path.read_text() for path in sorted((ROOT / "configs").rglob("*.yaml"))]
    draw = random.Random(0)
    texts = whole[::4]
    for _ in range(1500):
        text = draw.choice(whole)
        start = draw.randrange(len(text))
        text = text[start : start + 160]
        for _ in range(draw.randint(1, 3)):
            place = draw.randrange(len(text) + 1)
            text = text[:place] + draw.choice(PIECES) + text[place + draw.choice((0, 0, 1)) :]
        texts.append(text)
    fast = [read(text) for text in texts]
    monkeypatch.setattr(strict_yaml, "_FastLoader", strict_yaml._Loader)
    assert fast == [read(text) for text in texts]
    assert 100 < sum(one.startswith("refused") for one in fast) < 1400
