"""What rows of evaluations are paired by."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from toy_pipeline import quick_run, toy_config, write_toy

from flowrl.pipelines import PIPELINES
from flowrl.prompts.identity import asked_for
from flowrl.prompts.loading import Prompt
from flowrl.runs.evaluation_rows import read_rows, score_rows
from flowrl.runs.held_out_result import held_out
from flowrl.statistics.means import partners

METRIC = "eval/reward/brightness"


def _evaluated(folder: Path, lines: list[str], *overrides: str) -> list[dict[str, Any]]:
    """Rows of an evaluation of some prompts, each seen twice, before training."""
    folder.mkdir()
    (folder / "held_out.txt").write_text("\n".join(lines) + "\n")
    config = toy_config(
        write_toy(folder), f"prompts.eval={folder / 'held_out.txt'}", "eval_every=1", "eval.samples_per_prompt=2",
        "eval.num_images=0", *overrides,
    )  # fmt: skip
    quick_run(config, folder)
    return read_rows(folder, 0)


def test_rows_are_paired_by_prompt_and_seed_whatever_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PIPELINES, "sd3", "toy_pipeline")
    one = _evaluated(tmp_path / "one", ["a cat", "a dog", "a fox"])
    other = _evaluated(tmp_path / "other", ["a fox", "an owl", "a cat"])
    mine, theirs = partners(score_rows(one, METRIC), score_rows(other, METRIC))
    assert {row.prompt for row in mine} == {"a cat", "a fox"}
    assert [row.prompt for row in mine] == [row.prompt for row in theirs]
    assert [row.value for row in mine] == pytest.approx([row.value for row in theirs])  # the same images
    assert len(mine) == 4
    reseeded = _evaluated(tmp_path / "reseeded", ["a cat", "a dog", "a fox"], "eval.seed=1")
    assert partners(score_rows(one, METRIC), score_rows(reseeded, METRIC)) == [[], []]


def test_edits_of_different_images_are_different_prompts() -> None:
    prompts = [Prompt(text="make it blue", metadata={}, sources=(f"/images/{name}.png",)) for name in "ab"]
    rows = [
        {"prompt_id": 0, "prompt": prompt.text, "key": asked_for(prompt), "seed": 5, "rewards": {"brightness": 0.5}}
        for prompt in prompts
    ]
    assert len(score_rows(rows, METRIC)) == 2
    assert json.loads(asked_for(prompts[0]))[0] == "make it blue"


def test_images_that_have_no_partner_are_counted() -> None:
    """Of three images before and five after, one each is of a seed that the other side lacks, and one has no value."""
    before: list[dict[str, Any]] = [{"key": "a", "seed": seed, "rewards": {"one": 0.5}} for seed in (1, 2, 3)]
    after: list[dict[str, Any]] = [{"key": "a", "seed": seed, "rewards": {"one": 0.75}} for seed in (2, 3, 4, 5)]
    after.append({"key": "a", "seed": 6, "rewards": {"one": None}})
    rows = [{"iteration": 0, "eval/reward/one": 0.5}, {"iteration": 4, "eval/reward/one": 0.75}]
    run: Any = SimpleNamespace(evaluations=rows, image_rows={0: before, 4: after}, config={})
    found = held_out(run)
    assert found is not None
    assert (found.num_pairs, found.num_unpaired, found.change) == (2, 3, 0.25)
