"""docs/generic.md's table of every stock pipeline, against the installed classes."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_parts import fill
from write_pipelines import PAGE, PART, outcome, text

pytestmark = pytest.mark.slow  # diffusers imports each class


def test_each_outcome_is_that_of_loading_a_folder_of_the_class() -> None:
    names = ("Flux", "AuraFlow", "Latte", "CosmosTextToWorld", "DDPM")
    found = {name: outcome(f"{name}Pipeline", {"AuraFlowPipeline"}) for name in names}
    assert found == {
        "Flux": "a family loads it",
        "AuraFlow": "generic route, tried here",
        "Latte": "refused by the test at load",
        "CosmosTextToWorld": "refused at load: stock cannot be made without NVIDIA's guardrail",
        "DDPM": "refused: no family, and its call or class lacks what the generic route passes in",
    }


def test_the_page_has_this_table(tmp_path: Path) -> None:
    copy = tmp_path / "generic.md"
    copy.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    fill(copy, PART, text())
    assert copy.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8"), "run write_pipelines.py again"
