"""The list of `tests/trials/mutants` holds: every old text stands once in its file, and the new one can be parsed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from mutants import Mutant, nearest, read_mutants

ROOT = Path(__file__).resolve().parents[1]


def test_every_mutant_can_be_made() -> None:
    mutants = read_mutants()
    assert len({mutant.name for mutant in mutants}) == len(mutants) == 100
    for mutant in mutants:
        text = (ROOT / mutant.file).read_text()
        ast.parse(mutant.changed(text))  # a SyntaxError names the line
        assert mutant.function(text), f"{mutant.name} stands in no function"


@pytest.mark.slow
def test_the_nearest_tests_come_first() -> None:
    mutant = Mutant(name="any", file="samplers/kernels.py", old="", new="", broken="")
    first, *others = nearest(mutant, ROOT, last=["tests/test_golden_toy.py"])
    assert first[0] == "tests/samplers/test_kernels.py"
    assert all(file.startswith("tests/samplers/") for file in first)
    assert "tests/samplers/test_rollout.py" in first, "which imports it by way of another file"
    ordered = [file for part in others for file in part]
    assert len(ordered) == len(set(ordered))
    assert not set(ordered) & set(first)
    assert ordered.index("tests/test_golden_toy.py") > ordered.index("tests/training/test_budget.py")
