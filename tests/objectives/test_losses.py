"""The clipped surrogate and its helpers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flowrl.objectives.terms import approx_kl, clipped_above, clipped_below, clipped_surrogate

ADVANTAGE = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
RATIO = torch.tensor([0.9998, 1.0002, 0.9998, 1.0002], dtype=torch.float64)


def test_worked_values() -> None:
    loss = clipped_surrogate(RATIO.log(), ADVANTAGE, clip_low=1e-4, clip_high=1e-4)
    assert loss.tolist() == pytest.approx([-0.9998, -1.0001, 0.9999, 1.0002], abs=1e-12)


def test_gradient_is_cut_only_where_the_ratio_has_gone_far_enough() -> None:
    log_ratio = RATIO.log().requires_grad_()
    clipped_surrogate(log_ratio, ADVANTAGE, clip_low=1e-4, clip_high=1e-4).sum().backward()
    assert log_ratio.grad is not None
    assert log_ratio.grad.tolist() == pytest.approx([-0.9998, 0.0, 0.0, 1.0002], abs=1e-12)
    assert clipped_above(RATIO.log(), ADVANTAGE, clip_high=1e-4).tolist() == [False, True, False, False]
    assert clipped_below(RATIO.log(), ADVANTAGE, clip_low=1e-4).tolist() == [False, False, True, False]


@pytest.mark.parametrize("clip", [0.0, 1e-5, 0.2])
def test_on_policy_gradient_is_minus_advantage(clip: float) -> None:
    """At ratio 1 the loss is -A and its gradient -A, whatever the range, so the first update is REINFORCE."""
    advantage = torch.tensor([0.3, -2.0, 0.0])
    log_ratio = torch.zeros(3, requires_grad=True)
    loss = clipped_surrogate(log_ratio, advantage, clip_low=clip, clip_high=clip)
    loss.sum().backward()
    assert torch.equal(loss.detach(), -advantage)
    assert log_ratio.grad is not None
    torch.testing.assert_close(log_ratio.grad, -advantage)


def test_asymmetric_and_per_row_ranges() -> None:
    log_ratio = torch.tensor([1.5, 1.5, 0.5, 0.5], dtype=torch.float64).log()
    low = torch.tensor([0.1, 0.1, 0.1, 0.4], dtype=torch.float64)
    high = torch.tensor([0.2, 0.4, 0.2, 0.2], dtype=torch.float64)
    loss = clipped_surrogate(log_ratio, ADVANTAGE, clip_low=low, clip_high=high)
    assert loss.tolist() == pytest.approx([-1.2, -1.4, 0.9, 0.6])
    number = clipped_surrogate(log_ratio, ADVANTAGE, clip_low=0.1, clip_high=0.4)
    assert number.tolist() == pytest.approx([-1.4, -1.4, 0.9, 0.9])
    bound = clipped_surrogate(torch.tensor([1.0]), torch.tensor([1.0]), clip_low=1e-5, clip_high=1e-5)
    assert float(bound) == pytest.approx(-1 - 1e-5, abs=1e-7)  # resolvable in float32


def test_broadcasting_is_an_error() -> None:
    b, one = torch.zeros(4), torch.zeros(1)
    number = torch.tensor(0.1)
    cases: list[tuple[Any, Any, Any, Any]] = [
        (b, one, 0.1, 0.1),
        (one, b, 0.1, 0.1),
        (b, b, one, 0.1),
        (b, b, 0.1, one),
    ]
    for args in [*cases, (b[:, None], b, 0.1, 0.1)]:
        with pytest.raises(ValueError, match="shapes must match"):
            clipped_surrogate(args[0], args[1], clip_low=args[2], clip_high=args[3])
    with pytest.raises(ValueError, match="shapes must match"):
        clipped_surrogate(b, b, clip_low=number, clip_high=0.1)
    with pytest.raises(ValueError, match="distance"):
        clipped_surrogate(b, b, clip_low=-0.1, clip_high=0.1)


def test_approx_kl_is_unbiased_and_not_negative() -> None:
    shift, n = 0.5, 200_000
    x = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    log_ratio = shift * x - shift**2 / 2  # N(shift, 1) against N(0, 1)
    kl = approx_kl(log_ratio)
    assert bool((kl >= 0).all())
    assert abs(float(kl.mean()) - shift**2 / 2) < 4 * float(kl.std()) / math.sqrt(n)
    # Accurate where the ratio is almost 1: r - 1 - log r is (log r)^2 / 2 there.
    assert float(approx_kl(torch.tensor([1e-4], dtype=torch.float64))) == pytest.approx(5e-9, rel=1e-4)


def test_rows_without_an_advantage_are_not_cut() -> None:
    far = torch.tensor([-1.0, 1.0])
    assert not clipped_below(far, torch.zeros(2), clip_low=0.1).any()
    assert not clipped_above(far, torch.zeros(2), clip_high=0.1).any()
