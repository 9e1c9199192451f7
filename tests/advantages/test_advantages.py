"""Group advantages against worked numbers, numpy and their invariants."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowrl.advantages.normalise import group_advantages, zero_variance_groups

REWARD = torch.tensor([1.0, 2, 3, 4, 0, 0, 1, 0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("options", "first", "second"),
    [
        ({"scope": "global"}, [-1.064752, -0.354917, 0.354917, 1.064752], [-0.177459, -0.177459, 0.532376, -0.177459]),
        ({"scope": "group"}, [-1.341521, -0.447174, 0.447174, 1.341521], [-0.577217, -0.577217, 1.731651, -0.577217]),
        (
            {"scope": "group", "eps": 1e-8, "correction": 1},
            [-1.161895, -0.387298, 0.387298, 1.161895],
            [-0.5, -0.5, 1.5, -0.5],
        ),
        ({"scope": "none"}, [-1.5, -0.5, 0.5, 1.5], [-0.25, -0.25, 0.75, -0.25]),
        ({"scope": "none", "baseline": "leave_one_out"}, [-2, -2 / 3, 2 / 3, 2], [-1 / 3, -1 / 3, 1, -1 / 3]),
    ],
)
def test_worked_values(options: dict[str, Any], first: list[float], second: list[float]) -> None:
    assert group_advantages(REWARD, 4, **options).tolist() == pytest.approx(first + second, abs=1e-6)


def test_defaults_are_group_population_std_with_eps() -> None:
    assert torch.equal(group_advantages(REWARD, 4), group_advantages(REWARD, 4, "group", 1e-4, 0, "mean"))


def random_rewards(seed: int = 0, b: int = 24, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(b, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("scope", ["group", "global"])
@pytest.mark.parametrize("correction", [0, 1])
@pytest.mark.parametrize("group_size", [2, 3, 24])
def test_equals_numpy(scope: Any, correction: int, group_size: int) -> None:
    reward = random_rewards()
    groups = reward.numpy().reshape(-1, group_size)
    std = groups.std(1, ddof=correction, keepdims=True) if scope == "group" else groups.std(ddof=correction)
    wanted = (groups - groups.mean(1, keepdims=True)) / (std + 1e-4)
    got = group_advantages(reward, group_size, scope, correction=correction)
    np.testing.assert_allclose(got.numpy(), wanted.ravel(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("group_size", [2, 3, 8])
def test_leave_one_out_is_the_mean_of_the_others(group_size: int) -> None:
    reward = random_rewards()
    groups = reward.reshape(-1, group_size)
    others = (groups.sum(1, keepdim=True) - groups) / (group_size - 1)
    left_out = group_advantages(reward, group_size, "none", baseline="leave_one_out")
    torch.testing.assert_close(left_out, (groups - others).flatten())
    mean = group_advantages(reward, group_size, "none")
    torch.testing.assert_close(mean, left_out * (group_size - 1) / group_size)


@pytest.mark.parametrize("scope", ["group", "global", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_invariants(scope: Any, baseline: Any) -> None:
    reward = random_rewards().reshape(6, 4)
    advantage = group_advantages(reward.flatten(), 4, scope, 0.0, baseline=baseline).reshape(6, 4)
    torch.testing.assert_close(advantage.sum(1), torch.zeros(6, dtype=torch.float64), rtol=0, atol=1e-13)
    moved = group_advantages(2 * reward.flatten() + 5, 4, scope, 0.0, baseline=baseline).reshape(6, 4)
    torch.testing.assert_close(moved, advantage * (2 if scope == "none" else 1))
    order = torch.tensor([2, 0, 3, 1])
    permuted = group_advantages(reward[:, order].flatten(), 4, scope, 0.0, baseline=baseline)
    torch.testing.assert_close(permuted.reshape(6, 4), advantage[:, order])
    prompts = group_advantages(reward.flip(0).flatten(), 4, scope, 0.0, baseline=baseline)
    torch.testing.assert_close(prompts.reshape(6, 4), advantage.flip(0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scope", ["group", "global", "none"])
@pytest.mark.parametrize("eps", [0.0, 1e-4])
def test_constant_groups_are_exactly_zero(dtype: torch.dtype, scope: Any, eps: float) -> None:
    """The mean of 24 times 0.1 is not 0.1 in floating point; the advantage is 0 all the same, and NaN never."""
    reward = torch.cat([torch.full((24,), 0.1), torch.linspace(0, 1, 24)]).to(dtype)
    for baseline in ("mean", "leave_one_out"):
        advantage = group_advantages(reward, 24, scope, eps, baseline=baseline)  # type: ignore[arg-type]
        assert advantage.dtype == dtype
        assert torch.equal(advantage[:24], torch.zeros(24, dtype=dtype))
        assert bool((advantage[24:].abs() > 0).all())
        assert not group_advantages(reward[:24], 24, scope, eps).any()
    assert zero_variance_groups(reward, 24).tolist() == [True, False]


@pytest.mark.parametrize("scope", ["group", "global", "none"])
def test_invalid_members_take_no_part(scope: Any) -> None:
    reward = torch.tensor([0.8, 0.9, math.nan, 0.7, 0.1, math.nan, math.nan, math.nan, 0.5, 0.5, math.inf, 0.5])
    valid = reward.isfinite()
    advantage = group_advantages(reward, 4, scope, valid_B=valid)
    assert torch.equal(advantage[[2, 5, 6, 7, 10]], torch.zeros(5))
    assert not advantage[4:].any()  # one valid member, or valid members that agree
    values = np.array([0.8, 0.9, 0.7])
    everyone = np.array([0.8, 0.9, 0.7, 0.1, 0.5, 0.5, 0.5])
    std = {"group": values.std() + 1e-4, "global": everyone.std() + 1e-4, "none": 1.0}[scope]
    np.testing.assert_allclose(advantage[[0, 1, 3]].numpy(), (values - 0.8) / std, rtol=1e-5, atol=1e-6)
    left_out = group_advantages(reward, 4, "none", baseline="leave_one_out", valid_B=valid)
    np.testing.assert_allclose(left_out[[0, 1, 3]].numpy(), [0.0, 0.15, -0.15], rtol=0, atol=1e-6)
    assert zero_variance_groups(reward, 4, valid_B=valid).tolist() == [False, True, True]


def test_a_failure_counted_as_zero_would_drown_the_group() -> None:
    """Why failures are invalid and not 0: the outage becomes the lesson."""
    reward = 0.8 + 0.02 * torch.linspace(-1, 1, 16, dtype=torch.float64)
    reward[3] = 0.0
    outage = group_advantages(reward, 16, eps=0.0)
    assert float(outage[3]) == pytest.approx(-math.sqrt(15), abs=0.01)
    valid = torch.arange(16) != 3
    assert float(group_advantages(reward, 16, eps=0.0, valid_B=valid).std(correction=0)) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("group_size", [1, 0, -2, 3, 16])
def test_refuses_groups_that_do_not_divide(group_size: int) -> None:
    for call in (group_advantages, zero_variance_groups):
        with pytest.raises(ValueError, match="group_size"):
            call(REWARD, group_size)


def test_refuses() -> None:
    with pytest.raises(ValueError, match=r"\[1\] are not finite"):
        group_advantages(torch.tensor([1.0, math.nan]), 2)
    for options in ({"scope": "batch"}, {"baseline": "median"}, {"correction": 2}):
        with pytest.raises(ValueError, match="leave_one_out"):
            group_advantages(REWARD, 4, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="negative"):
        group_advantages(REWARD, 4, eps=-1.0)
    for bad in (REWARD.reshape(2, 4), REWARD.long()):
        with pytest.raises(ValueError, match="float tensor"):
            group_advantages(bad, 4)
    with pytest.raises(ValueError, match="valid_B"):
        group_advantages(REWARD, 4, valid_B=torch.ones(4, dtype=torch.bool))
