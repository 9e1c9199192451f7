"""A model card names every reward by its own label, and the settings that its recipe reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flowrl.config.readers import is_read
from flowrl.config.rewards import told_apart, unique_keys
from flowrl.publishing.model_card import RunCard


def training(**config: Any) -> str:
    rewards = [
        {"name": "geneval", "weight": 0.0, "options": {"credit": "graded"}},
        {"name": "geneval", "weight": 1.0, "options": {"credit": "official"}},
    ]
    versions = {"reward geneval": "geneval:graded:1", "reward geneval_2": "geneval:official:1"}
    config = {
        "rewards": rewards, "clip_range": 1e-4, "kl_coef": 0.1, "credit": {"method": "outcome"}, "seed": 3,
        "sampler": {"num_steps": 10}, **config,
    }  # fmt: skip
    run = SimpleNamespace(config=config, manifest={"inputs": {"rewards": versions}})
    return RunCard._training(SimpleNamespace(run=run))  # type: ignore[arg-type]


def test_equal_names_are_told_apart() -> None:
    text = training(recipe="grpo")
    assert "- `geneval`, weight 0; version `geneval:graded:1`" in text
    assert "- `geneval_2` (geneval), weight 1; version `geneval:official:1`" in text
    assert unique_keys(["a", "a_2", "a", "b"]) == ["a", "a_2", "a_3", "b"]
    listed: list[dict[str, Any]] = [
        {"name": "a", "options": {"x": 1, "y": 2}},
        {"label": "b", "name": "a"},
        {"name": "a", "weight": 0},
    ]
    more = [{"function": "c"}, {"name": "a", "options": {"x": 1, "y": 2}, "weight": 3}]
    assert told_apart({"rewards": listed, "eval": {"rewards": more}}) == {
        "a": "a (x: 1)",
        "b": "b",
        "a_2": "a_2",
        "c": "c",
    }
    seen: list[dict[str, Any]] = [
        {"name": "a"},
        {"name": "a", "frames": {"count": 2}},
        {"name": "a", "options": {"x": 1}},
    ]
    assert told_apart({"rewards": seen}) == {"a": "a", "a_2": "a_2", "a_3": "a_3 (x: 1)"}, "as evaluations number them"
    edited: list[dict[str, Any]] = [{"rewards": "a"}, {"rewards": [5, {"name": "a", "options": 3}], "eval": "none"}]
    assert list(map(told_apart, edited)) == [{}, {}], "a report is made of any configuration"


@pytest.mark.parametrize(
    ("recipe", "objective", "read"),
    [
        ("grpo", "", {"clip_range", "kl_coef", "credit.method"}),
        ("grpo", "dppo", {"kl_coef", "credit.method"}),
        ("forward", "nft", {"kl_coef"}),
        ("preference", "dpo", set()),
        ("backprop", "draft", set()),
    ],
)
def test_settings_that_nobody_reads_are_not_listed(recipe: str, objective: str, read: set[str]) -> None:
    text = training(recipe=recipe, objective={"name": objective} if objective else {})
    assert {key for key in ("clip_range", "kl_coef", "credit.method") if f"| `{key}` |" in text} == read
    assert "| `seed` | 3 |" in text
    assert is_read("sampler.num_steps", recipe)
