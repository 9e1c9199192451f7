"""Claims of papers: a verdict follows from the interval and from all rows together, and every row has one."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from page_parts import committed, fill, is_uncommitted, lowered, table
from scipy import stats
from write_claims import (
    COLORS,
    FOLDER,
    LOST,
    OPEN,
    PAGE,
    REFUSED,
    REFUTED,
    REPRODUCED,
    TAKEN_BACK,
    Claim,
    Effect,
    corrected,
    effect_of,
    read_claims,
    rows_of,
    students,
    verdict_of,
)

from flowrl.config.strict_yaml import ConfigError

DOCS = FOLDER.parent


def effect(low: float, high: float, p: float = 0.01) -> Effect:
    return Effect(mean=(low + high) / 2, low=low, high=high, p=p, detectable=0.1, seeds="3")


def claim(name: str, p: float, **settings: Any) -> Claim:
    words: dict[str, Any] = dict.fromkeys(("source", "says", "experiment", "unit", "command", "evidence"), "words")
    return Claim(name=name, **words, effect=effect(0.1, 0.2, p), **settings)


@pytest.mark.parametrize(
    ("low", "high", "holm", "verdict"),
    [
        (0.01, 0.2, 0.049, REPRODUCED),
        (-0.2, -0.01, 0.049, REFUTED),
        (0.01, 0.2, 0.05, LOST),
        (-0.2, -0.01, 0.9, LOST),
        (-0.1, 0.1, 0.001, OPEN),
        (0.0, 0.2, 0.001, OPEN),
        (0.01, 0.2, math.nan, LOST),
        (math.nan, math.nan, math.nan, OPEN),
    ],
)
def test_the_verdict_is_where_the_interval_lies_if_it_holds_after_correction(
    low: float, high: float, holm: float, verdict: str
) -> None:
    assert verdict_of(effect(low, high), holm) == verdict


def test_holm_over_the_page_by_hand() -> None:
    """Of four rows the smallest p counts four times, the next three times, and none less than the one before."""
    found = corrected([claim("a", 0.04), claim("b", 0.01), claim("c", 0.015), claim("d", 0.9)])
    assert {row.name: row.holm for row in found} == pytest.approx({"b": 0.04, "c": 0.045, "a": 0.08, "d": 0.9})
    assert [row.verdict for row in found] == [LOST, REPRODUCED, REPRODUCED, LOST]
    assert found[0].why == "not established after correction (p 0.040, Holm 0.080)"
    assert found[1].why == "**reproduced** (Holm p 0.040)"


def test_rows_that_are_refused_or_taken_back_make_none_of_the_others_easier() -> None:
    alone = corrected([claim("a", 0.02), claim("b", 0.02)])
    assert [row.holm for row in alone] == [0.04, 0.04]
    found = corrected(
        [claim("a", 0.02), claim("b", 0.001, uncommitted=True), claim("c", 0.001, taken_back="other units")]
    )
    assert found[0].holm == pytest.approx(0.06)
    assert [row.verdict for row in found] == [LOST, REFUSED, TAKEN_BACK]
    assert all(math.isnan(row.holm) for row in found[1:])
    assert found[1].why == "from an uncommitted tree, not counted"
    assert found[2].why == "not judged: other units"


@pytest.mark.parametrize(
    ("evidence", "uncommitted"),
    [
        ({"commit": "b1bf48e8a8cb-dirty"}, True),
        ({"commit": "b1bf48e8a8cb"}, False),
        ({"origin": {"commit": "59bdcb6-dirty"}}, True),
        ({"commit": "0a58e3c, with what followed not committed yet"}, True),
        ({"provenance": ["budget: nfe=40k", "commit: 1a06f72f8a11; 1a06f72f8a11-dirty"]}, True),
        (
            {"provenance": ["commit: 1a06f72f8a11", "versions: flowrl-toolkit 0.1.dev881+g1a06f72f8, torch 2.15.0"]},
            False,
        ),
        ({"provenance": ["versions: flowrl-toolkit 0.1.dev917+gd256caf04.d20261124, torch 2.15.0"]}, True),
    ],
)
def test_evidence_from_an_uncommitted_tree_is_refused(
    tmp_path: Path, evidence: dict[str, Any], uncommitted: bool
) -> None:
    assert is_uncommitted(evidence) == uncommitted
    path = tmp_path / "noise.json"
    path.write_text(json.dumps(evidence))
    if uncommitted:
        with pytest.raises(ValueError, match="comes from an uncommitted tree: commit, and run its command again"):
            committed(path)
    else:
        assert committed(path) == evidence


def test_a_script_gives_a_number_for_each_seed() -> None:
    evidence = {"effects": {"noise": {"per_seed": [1.0, 2.0, 3.0]}}}
    found = effect_of(evidence, {"effect": "noise", "most": 9})
    half = 4.302652729911275 / math.sqrt(3)  # Student's t at two degrees, s = 1
    assert (found.mean, found.seeds) == (2.0, "3")
    assert (found.low, found.high) == pytest.approx((2 - half, 2 + half))
    assert found.p == pytest.approx(stats.ttest_1samp([1.0, 2.0, 3.0], 0).pvalue)
    assert found.detectable == pytest.approx(5.65 / math.sqrt(3), abs=0.01)
    assert effect_of(evidence, {"effect": "noise", "most": 4}).high == 4.0  # no effect is larger than there can be
    with pytest.raises(ConfigError, match=r"effect 'silence' is none of noise"):
        effect_of(evidence, {"effect": "silence", "most": 9})
    with pytest.raises(ConfigError, match="'noise' has one seed"):
        effect_of({"effects": {"noise": {"per_seed": [1.0]}}}, {"effect": "noise", "most": 9})


def test_small_effects_of_one_sign_keep_their_lower_end() -> None:
    """They lie between 0 and 1 as shares do, and their bounds are not cut at 0 all the same."""
    assert students([0.01, 0.2, 0.5], most=1).low < 0


def test_seeds_that_chose_a_row_give_no_verdict() -> None:
    evidence = {"effects": {"noise": {"per_seed": [9.0, 9.0, 1.0, 2.0]}}}
    found = effect_of(evidence, {"effect": "noise", "most": 99, "chosen_by": [0, 1]})
    assert (found.mean, found.seeds) == (1.5, "2")
    methods: dict[str, Any] = {
        "a": {"difference": None, "each_seed": {"0": 0.5, "1": 0.5, "2": 0.5}},
        "b": {"difference": {"mean": 0.3}, "each_seed": {"0": 0.9, "1": 0.6, "2": 0.8}},
    }
    named = {"method": "b", "most": 1, "chosen_by": [0]}
    found = effect_of({"baseline": "a", "methods": methods}, named)
    assert found.mean == pytest.approx(0.2)
    assert found.seeds == "2"
    assert found.p == pytest.approx(stats.ttest_1samp([0.1, 0.3], 0).pvalue)


def test_trainings_of_unlike_seeds_have_welchs_test() -> None:
    first, second = [0.8, 0.7, 0.9], [0.5, 0.6, 0.4, 0.5]
    wanted = stats.ttest_ind(first, second, equal_var=False)
    low, high = wanted.confidence_interval(0.95)
    named = {"sides": ["a", "b"], "under": "after", "most": 1}
    found = effect_of({"after": {"a": first, "b": second}}, named)
    assert (found.mean, found.low, found.high, found.p) == pytest.approx((0.3, low, high, wanted.pvalue))
    assert found.seeds == "3 and 4"
    curves = {name: [[[0, 0, 0.1], [9, 9, score]] for score in side] for name, side in (("a", first), ("b", second))}
    of_curves = effect_of({"curves": curves}, {"sides": ["a", "b"], "under": "curves", "at": 1, "most": 1})
    assert of_curves == found
    with pytest.raises(ConfigError, match="sides a and b need several seeds each"):
        effect_of({"after": {"a": first, "b": second}}, named | {"chosen_by": [0, 1]})


def test_a_comparison_gives_a_difference_to_its_baseline() -> None:
    one: dict[str, Any] = {"mean": 0.1, "interval": [0.02, 0.18], "p": 0.04, "detectable": 0.09, "seeds": [0.0, 0.2]}
    methods: dict[str, Any] = {
        "a": {"difference": None, "each_seed": {"0": 0.5}},
        "b": {"difference": one, "gain": one | {"mean": 0.15}, "each_seed": {"0": 1, "1": 2}},
    }
    named = {"method": "b", "most": 1}
    found = effect_of({"methods": methods}, named)
    assert found == Effect(mean=0.1, low=0.02, high=0.18, p=0.04, detectable=0.09, seeds="2")
    assert effect_of({"methods": methods}, named | {"measure": "gain"}).mean == 0.15
    less = effect_of({"methods": methods}, named | {"measure": "deficit"})
    assert less == replace(found, mean=-0.1, low=-0.18, high=-0.02)
    assert effect_of({"methods": methods}, named | {"most": 0.15}).high == 0.15
    for name in ("a", "c"):
        with pytest.raises(ConfigError, match="has no difference"):
            effect_of({"methods": methods}, {"method": name, "most": 1})
    methods["b"]["difference"] = one | {"detectable": None}
    with pytest.raises(ConfigError, match="has one seed"):
        effect_of({"methods": methods}, named)


def test_a_claim_is_a_row(tmp_path: Path) -> None:
    entry: dict[str, Any] = dict.fromkeys(("name", "source", "says", "experiment", "unit", "command"), "words")
    entry |= {"evidence": "noise.json", "effect": "less", "most": 1}
    (tmp_path / "claims.yaml").write_text(yaml.safe_dump([entry]))
    commit, effects = "b1bf48e8a8cb", {"less": {"per_seed": [0.10, 0.11, 0.12]}}
    for mark, verdict in (("", "**reproduced** (Holm p 0.003)"), ("-dirty", "from an uncommitted tree, not counted")):
        (tmp_path / "noise.json").write_text(json.dumps({"commit": commit + mark, "effects": effects}))
        row = rows_of(read_claims(tmp_path))[0]
        assert row[2:6] == ["+0.110 (+0.085 to +0.135) words", "3", "0.033", verdict]


def test_the_claims_of_the_page_have_numbers_from_several_seeds_and_it_is_written_from_them() -> None:
    claims = read_claims(FOLDER)
    assert len({claim.name for claim in claims}) == len(claims) >= 18
    assert all(math.isfinite(claim.effect.low + claim.effect.high) for claim in claims)
    page = PAGE.read_text(encoding="utf-8")
    for claim in claims:
        assert claim.verdict in COLORS
        assert any(claim.name in line and claim.why in line for line in page.splitlines())


def test_no_further_results_come_from_an_uncommitted_tree() -> None:
    """Those of claims are refused row by row; those of trials are to be made again when their code is touched."""
    found = {
        str(path.relative_to(DOCS))
        for path in sorted(DOCS.rglob("*.json"))
        if isinstance(held := json.loads(path.read_text(encoding="utf-8")), dict) and is_uncommitted(held)
    }
    trials = {"generic_classes", "generic_speed", "lora_forms", "quantised_bases", "serving_load"}
    trials |= {"full_training"}
    claims = {"adversarial", "dpo_scaling", "g2rpo", "grpo_scaling", "guard", "out_of_domain", "resolution"}
    claims |= {"rlg_scale", "verdict_alone"}
    assert found <= {f"trials/{name}.json" for name in trials} | {f"claims/{name}.json" for name in claims}


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
