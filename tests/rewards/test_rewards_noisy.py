"""The rank of a reward, and a reward with noise on it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pairwise_fakes import close, inputs_of, register_brightness, scores

from flowrl.rewards import RewardInputs, build_reward
from flowrl.rewards.base.outputs import check_output

LEVELS = [0.2, 0.8, 0.4, 0.6, 0.0]


@pytest.fixture(autouse=True)
def _brightness(monkeypatch: pytest.MonkeyPatch) -> None:
    register_brightness(monkeypatch)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, [1, 0, 0.5, 0.5]),
        ({"ties": "order"}, [1, 0, 1 / 3, 2 / 3]),
        ({"ties": "order", "denominator": "n"}, [0.75, 0, 0.25, 0.5]),
    ],
)
def test_rank(options: dict[str, Any], wanted: list[float]) -> None:
    output = scores("rank", inputs_of([0.3, 0.1, 0.2, 0.2]), reward="brightness", **options)
    close(output.values, wanted)
    close(output.parts["score"], [0.3, 0.1, 0.2, 0.2])
    assert build_reward("rank", options={"reward": "brightness"}).kind == "groupwise"


def test_noise_is_that_of_the_sample_and_the_iteration() -> None:
    count = 2000
    inputs = inputs_of(np.linspace(0, 1, count).tolist(), [k // 20 for k in range(count)])
    reward = build_reward("noisy", options={"reward": "brightness", "std": 0.5, "bias": 2.0, "seed": 1})
    output = check_output(reward(inputs), count, "noisy")
    clean = inputs.images.mean(dim=(1, 2, 3))
    close(output.parts["clean"], clean.tolist(), atol=1e-5)
    noise = (output.values - clean - 2.0) / 0.5
    # 2000 draws: the mean has the standard error 1/45, the standard deviation 1/63.
    assert abs(float(noise.mean())) < 4 / 45
    assert abs(float(noise.std()) - 1) < 4 / 63
    assert abs(float(torch.corrcoef(torch.stack([noise[:-1], noise[1:]]))[0, 1])) < 4 / 45

    order = list(reversed(range(count)))[:50]
    assert torch.equal(reward(inputs[order]).values, output.values[order])
    assert torch.equal(reward(inputs[[7]]).values, output.values[[7]])
    assert not torch.equal(reward(replace(inputs, iteration=1)).values, output.values)
    other = build_reward("noisy", options={"reward": "brightness", "std": 0.5, "bias": 2.0, "seed": 2})
    assert not torch.equal(other(inputs).values, output.values)
    still = scores("noisy", inputs[[3, 9]], reward="brightness", std=0.0)
    close(still.values, clean[[3, 9]].tolist())
    failing = scores("noisy", inputs_of([0.1, 0.5]), reward="brightness", options={"fails_below": 0.3})
    assert failing.valid.tolist() == [False, True]
    assert failing.errors == {"too_dark": 1}
    assert (reward.kind, reward.differentiable, reward.waits) == ("pointwise", False, False)


def test_comparisons_of_noisy_scores_use_one_draw_a_sample() -> None:
    noisy = {"reward": "noisy", "options": {"reward": "brightness", "std": 0.3}}
    inputs = inputs_of(LEVELS)
    rates = scores("win_rate", inputs, comparator=noisy).values
    drawn = scores("noisy", inputs, reward="brightness", std=0.3).values
    assert rates.argsort().tolist() == drawn.argsort().tolist()
    assert sorted(rates.tolist()) == pytest.approx([0, 0.25, 0.5, 0.75, 1])


def test_a_share_of_the_scores_is_off_by_a_lot() -> None:
    images = torch.rand(4000, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    inputs = RewardInputs(
        prompts=["x"] * 4000, images=images, metadata=[{}] * 4000, group_ids=torch.zeros(4000, dtype=torch.int64),
        sample_ids=torch.arange(4000),
    )  # fmt: skip
    options = {"reward": "brightness", "std": 0.5, "outliers": 0.1, "outlier_scale": 20.0}
    output = build_reward("noisy", options=options)(inputs)
    noise = output.values - output.parts["clean"]
    expected = math.sqrt(0.9 * 0.25 + 0.1 * 100)
    assert float(noise.std()) == pytest.approx(expected, rel=0.1)
    wild = float((noise.abs() > 3).double().mean())  # six of the narrow, 0.3 of the wide standard deviations
    assert wild == pytest.approx(0.1 * 0.764, abs=0.015)
