"""Functions cut out of published code: how they are cut, and what pages say of the comparison."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import published_code
import pytest
import torch
from published_cutting import Checkouts, Comparison, Cut, MissingError, difference, run

ROOT = Path(__file__).parents[2]
FOUND: dict[str, Any] = json.loads((ROOT / "docs/research/trials/published_code.json").read_text())
ROWS: list[dict[str, Any]] = FOUND["functions"]
FILE = """
import nothing_of_the_kind
LEVEL: int = 3

@nothing_of_the_kind.decorate
def scaled(x: nothing_of_the_kind.Tensor) -> nothing_of_the_kind.Tensor:
    return LEVEL * x

class Trainer(nothing_of_the_kind.Base):
    @classmethod
    def halved(cls, x: nothing_of_the_kind.Tensor): return scaled(x) / cls.two

def main(_):
    loss = 0
    for batch in nothing_of_the_kind.loader:
        ratio = torch.exp(batch)
        if config.bound:
            ratio = ratio.clamp(max=2)
        loss = ratio.mean()
        loss.backward()
"""


def test_a_function_is_cut_without_its_imports_annotations_and_decorators() -> None:
    cut = Cut(FILE)
    assert cut.function("LEVEL", "scaled")(torch.tensor(2)) == 6
    two = type("Two", (), {"two": 2})
    assert cut.function("Trainer.halved", scaled=lambda x: x + 1)(two, 5) == 3
    with pytest.raises(MissingError, match="no doubled in the file"):
        cut.function("doubled")


def test_statements_are_cut_from_one_name_to_another_in_the_innermost_list() -> None:
    code = Cut(FILE).statements("main", "ratio", "loss")
    bound = type("Config", (), {"bound": True})
    assert run(code, batch=torch.tensor([0.0, 9.0]), config=bound)["loss"] == 1.5
    with pytest.raises(MissingError, match="no list of statements from ratio to gain"):
        Cut(FILE).statements("main", "ratio", "gain")


def test_a_difference_is_a_share_of_the_largest_entry() -> None:
    assert difference(torch.tensor([1.0, 100.0]), torch.tensor([1.5, 100.0])) == pytest.approx(0.005)
    assert (difference({"a"}, {"a"}), difference({"a"}, {"b"})) == (0, 1)
    assert difference(torch.tensor(float("nan")), torch.tensor(1.0)) == float("inf")


def test_a_checkout_is_read_at_the_commit_that_is_named(tmp_path: Path) -> None:
    tree = tmp_path / "fork+code"
    tree.mkdir()

    def git(*words: str) -> str:
        own = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", "-C", str(tree), *own, *words], check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    for number in (1, 2):
        (tree / "rule.py").write_text(f"def rule():\n    return {number}\n")
        git("add", "rule.py")
        git("commit", "-qm", str(number))
    first = git("rev-parse", "HEAD~").strip()

    def compare(cut: Cut, draw: torch.Generator) -> Any:
        yield "number", torch.tensor(1.0), torch.tensor(float(cut.function("rule")()))

    def row(commit: str) -> dict[str, Any]:
        one = Comparison("a rule", "djghosh13/code", commit, "rule.py", "rule", "rule", compare)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(published_code.LICENCES, "djghosh13/code", "MIT")
            return published_code.measured(one, Checkouts(tmp_path))

    assert (row(first)["agrees"], row(first)["worst"], row(first)["arrays"]) == (True, 0.0, published_code.DRAWS)
    assert (row("HEAD")["agrees"], row("HEAD")["worst"]) == (False, 0.5)
    with pytest.raises(MissingError, match="no checkout of djghosh13/code"):
        row("0" * 40)


def test_the_recorded_comparison_is_of_what_is_compared_and_agrees() -> None:
    assert "dirty" not in FOUND["commit"]
    assert [(row["repository"], row["commit"], row["file"], row["function"]) for row in ROWS] == [
        (one.repository, one.commit, one.file, one.function) for one in published_code.COMPARISONS
    ]
    assert all(row["agrees"] and row["worst"] <= row["bound"] <= 1e-4 for row in ROWS)
    assert {row["repository"] for row in ROWS} == set(published_code.LICENCES)
    assert (FOUND["not_run"], FOUND["no_public_code"]) == (published_code.NOT_RUN, list(published_code.NO_CODE))


@pytest.mark.parametrize("page", ["README.md", "docs/composing.md", "docs/research/trials.md"])
def test_pages_count_from_the_recorded_comparison(page: str) -> None:
    functions = len({(row["repository"], row["file"], row["function"]) for row in ROWS})
    repositories = len({row["repository"] for row in ROWS})
    said = re.findall(r"(\d+) functions of (\d+) repositories", (ROOT / page).read_text())
    assert said, page
    assert set(said) == {(str(functions), str(repositories))}


def test_the_readme_counts_what_has_gradients() -> None:
    with_gradient = sum(row["gradient"] for row in ROWS)
    assert f"{with_gradient} in value and gradient" in (ROOT / "README.md").read_text()


def test_the_page_lists_every_repository_with_its_functions_and_worst_difference() -> None:
    page = (ROOT / "docs/research/trials.md").read_text()
    for repository in {row["repository"] for row in ROWS}:
        own = [row for row in ROWS if row["repository"] == repository]
        licence, worst = own[0]["licence"], max(row["worst"] for row in own)
        assert f"| {repository} at {own[0]['commit'][:7]} | {licence} | {len(own)} | {worst:.0e} |" in page
    for name, why in FOUND["not_run"].items():
        assert f"{name} ({why})" in page
    assert ", ".join(FOUND["no_public_code"]) in page
