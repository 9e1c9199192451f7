"""The entries that docs/rewards.md gives for published uses are entries that a configuration may hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from flowrl.rewards.base.specs import validate_reward_specs

PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"


def test_entries_for_published_uses_are_valid() -> None:
    pytest.importorskip("rapidfuzz")
    block = PAGE.read_text().split("## Entries for published uses", 1)[1].split("```yaml\n", 1)[1].split("```", 1)[0]
    entries = yaml.safe_load(block)["rewards"]
    checked = validate_reward_specs(entries)
    assert [one.entry.name for one in checked] == [entry["name"] for entry in entries]
    assert checked[0].entry.frames is not None
    assert checked[0].entry.frames.reducer == "top_frac"
