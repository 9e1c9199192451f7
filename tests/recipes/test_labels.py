"""Verdicts as labels (`shaping: real`): a run learns from groups of one label, and its advantages are not cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_runs import TinyRuns, metrics
from torch import Tensor
from toy_pipeline import toy_runs

from flowrl.config.train import load_config
from flowrl.recipes import grpo

pytestmark = pytest.mark.usefixtures("numbers_alone")

ONE_LABEL_EACH = """
def reward(images, prompts, metadata):
    first = min(prompts)
    return [float(prompt == first) for prompt in prompts]
"""
FIRST_OF_ALL = """
def reward(images, prompts, metadata):
    values = images.mean((1, 2, 3)).tolist()
    return [float(value == max(values)) for value in values]
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRuns]:
    settings: dict[str, Any] = {
        "shaping": {"name": "real"}, "prompts_per_step": 2, "group_size": 12, "adv_clip_range": 12.0, "eval_every": 0,
    }  # fmt: skip
    yield from toy_runs(tmp_path_factory.mktemp("labels"), **settings)


def test_groups_of_one_label_teach(runs: TinyRuns) -> None:
    rows = metrics(runs.train("one-label", runs.rewards(ONE_LABEL_EACH), "num_iterations=12"))
    assert all(row["grad_norm"] > 0 for row in rows)
    assert not any("equal_groups" in row.get("warnings", {}) for row in rows)


def test_a_lone_right_image_weighs_what_the_loss_gives_it(runs: TinyRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    plain = grpo.rows_of

    def look(*args: Any, **kwargs: Any) -> Any:
        found = plain(*args, **kwargs)
        seen.append(found.advantage)
        return found

    monkeypatch.setattr(grpo, "rows_of", look)
    runs.train("lone", runs.rewards(FIRST_OF_ALL), "num_iterations=1", "prompts_per_step=1", "rollout_batch_size=12")
    # G = 12 of R = 1 and W = 11 at tau = 1/2: 12 / (1/2 * 2) and -12 / (1/2 * 12)
    assert torch.cat(seen).unique().tolist() == pytest.approx([-2.0, 12.0])


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("adv_clip_range=5",), "set it to 12 or more"),
        (("adv_eps=0.1",), "does not read adv_eps"),
        (("rewards.0.weight=2",), "one reward of weight 1"),
    ],
)
def test_what_labels_do_not_read_is_refused(runs: TinyRuns, overrides: tuple[str, ...], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        grpo.check(load_config(runs.config, [*overrides]))
