"""Claims of papers: the verdict follows from the interval, and every row of the page has one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from page_parts import fill, lowered, table
from write_claims import FOLDER, OPEN, REFUTED, REPRODUCED, Effect, effect_of, read_claims, rows_of, verdict_of

from flowrl.config.strict_yaml import ConfigError


@pytest.mark.parametrize(
    ("low", "high", "verdict"), [(0.01, 0.2, REPRODUCED), (-0.2, -0.01, REFUTED), (-0.1, 0.1, OPEN), (0.0, 0.2, OPEN)]
)
def test_the_verdict_is_where_the_interval_lies(low: float, high: float, verdict: str) -> None:
    assert verdict_of(Effect(mean=(low + high) / 2, low=low, high=high, detectable=0.1, seeds=3)) == verdict


def test_a_script_gives_a_number_for_each_seed() -> None:
    evidence = {"effects": {"noise": {"per_seed": [1.0, 2.0, 3.0]}}}
    found = effect_of(evidence, {"effect": "noise"})
    half = 4.302652729911275 / math.sqrt(3)  # Student's t at two degrees, s = 1
    assert (found.mean, found.seeds) == (2.0, 3)
    assert (found.low, found.high) == pytest.approx((2 - half, 2 + half))
    assert found.detectable == pytest.approx(5.65 / math.sqrt(3), abs=0.01)
    with pytest.raises(ConfigError, match=r"effect 'silence' is none of noise"):
        effect_of(evidence, {"effect": "silence"})
    with pytest.raises(ConfigError, match="'noise' has one seed"):
        effect_of({"effects": {"noise": {"per_seed": [1.0]}}}, {"effect": "noise"})


def test_a_comparison_gives_a_difference_to_its_baseline() -> None:
    one: dict[str, Any] = {"mean": 0.1, "interval": [0.02, 0.18], "p": 0.04, "detectable": 0.09, "seeds": [0.0, 0.2]}
    methods: dict[str, Any] = {
        "a": {"difference": None, "each_seed": {"0": 0.5}},
        "b": {"difference": one, "gain": one | {"mean": 0.15}, "each_seed": {"0": 1, "1": 2}},
    }
    found = effect_of({"methods": methods}, {"method": "b"})
    assert found == Effect(mean=0.1, low=0.02, high=0.18, detectable=0.09, seeds=2)
    assert effect_of({"methods": methods}, {"method": "b", "measure": "gain"}).mean == 0.15
    less = effect_of({"methods": methods}, {"method": "b", "measure": "deficit"})
    assert less == Effect(mean=-0.1, low=-0.18, high=-0.02, detectable=0.09, seeds=2)
    for name in ("a", "c"):
        with pytest.raises(ConfigError, match="has no difference"):
            effect_of({"methods": methods}, {"method": name})
    methods["b"]["difference"] = one | {"detectable": None}
    with pytest.raises(ConfigError, match="has one seed"):
        effect_of({"methods": methods}, {"method": "b"})


def test_a_claim_is_a_row(tmp_path: Path) -> None:
    entry = dict.fromkeys(("name", "source", "says", "experiment", "unit", "command"), "words") | {
        "evidence": "noise.json", "effect": "less",
    }  # fmt: skip
    (tmp_path / "claims.yaml").write_text(yaml.safe_dump([entry]))
    (tmp_path / "noise.json").write_text(json.dumps({"effects": {"less": {"per_seed": [0.10, 0.11, 0.12]}}}))
    row = rows_of(read_claims(tmp_path))[0]
    assert row[2:6] == ["+0.110 (+0.085 to +0.135) words", "3", "0.033", "**reproduced**"]


def test_the_claims_of_the_page_have_numbers_from_several_seeds() -> None:
    claims = read_claims(FOLDER)
    assert len({claim.name for claim in claims}) == len(claims) >= 18
    assert all(claim.effect.seeds >= 3 and math.isfinite(claim.effect.low + claim.effect.high) for claim in claims)


def test_a_part_of_a_page_is_written_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n\n<!-- it -->\nold\n<!-- /it -->\n\nafter\n")
    fill(page, "it", table(("a", "b"), [("x", "1")], right=1))
    written = page.read_text()
    assert written == "before\n\n<!-- it -->\n| a | b |\n| :-- | --: |\n| x | 1 |\n<!-- /it -->\n\nafter\n"
    with pytest.raises(ValueError, match="must hold <!-- other -->"):
        fill(page, "other", "")
    assert page.read_text() == written


def test_a_report_becomes_part_of_a_page_with_lower_headings() -> None:
    assert lowered("# Title\n\ntext\n\n## Score\n| a |\n") == "\ntext\n\n### Score\n| a |"
