"""Losses of a judge that learns, against their closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from flowrl.objectives.verifier import contrast_advantages, contrast_rewards, gcpo_loss, weighted_likelihood

LOG_PROB = torch.tensor([[0.5, 0.25, 0.125], [0.2, 0.5, 0.9], [0.1, 0.3, 0.3]], dtype=torch.float64).log()
MASK = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])


def test_the_first_token_has_its_weight() -> None:
    """a log p(y_0) + (1 - a) mean of the rest, over 3, 2 and 1 tokens."""
    a, ln = 0.1, math.log
    wanted = [-(a * ln(0.5) + (1 - a) / 2 * (ln(0.25) + ln(0.125))), -(a * ln(0.2) + (1 - a) * ln(0.5)), -ln(0.1)]
    assert weighted_likelihood(LOG_PROB, MASK, a).tolist() == pytest.approx(wanted)
    only = weighted_likelihood(LOG_PROB, MASK, 1.0).tolist()
    assert only == pytest.approx([-ln(0.5), -ln(0.2), -ln(0.1)])


def test_without_a_weight_it_is_the_mean() -> None:
    ln = math.log
    wanted = [-(ln(0.5) + ln(0.25) + ln(0.125)) / 3, -(ln(0.2) + ln(0.5)) / 2, -ln(0.1)]
    assert weighted_likelihood(LOG_PROB, MASK, None).tolist() == pytest.approx(wanted)
    # 1 / n for the first token is the mean as well
    assert weighted_likelihood(LOG_PROB[:1], MASK[:1], 1 / 3).item() == pytest.approx(wanted[0])


def test_what_is_masked_has_no_gradient() -> None:
    log_prob = LOG_PROB.clone().requires_grad_()
    weighted_likelihood(log_prob, MASK, 0.1).sum().backward()
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == [
        pytest.approx([-0.1, -0.45, -0.45]),
        pytest.approx([-0.1, -0.9, 0.0]),
        pytest.approx([-1.0, 0.0, 0.0]),
    ]


@pytest.mark.parametrize(
    ("winner", "loser", "of_winner", "of_loser"),
    [
        ([8, 6, 7, 5], [4, 6, 5, 3], [1, 0.75, 1, 0.5], [1, 0.5, 0.75, 1]),
        ([7, 5, 8], [4, 6, 5], [1, 1 / 3, 1], [1, 2 / 3, 2 / 3]),
        ([5, 5], [5, 5], [0, 0], [0, 0]),
        ([math.nan, 9], [math.nan, 1], [0, 0.5], [0, 0.5]),
    ],
)
def test_rewards_count_traces_that_are_ordered_rightly(
    winner: list[float], loser: list[float], of_winner: list[float], of_loser: list[float]
) -> None:
    tau = [torch.tensor([scores], dtype=torch.float64) for scores in (winner, loser)]
    found = contrast_rewards(tau[0], tau[1])
    assert found[0].tolist() == [pytest.approx(of_winner)]
    assert found[1].tolist() == [pytest.approx(of_loser)]


def test_each_side_is_standardised_by_itself() -> None:
    tau = [torch.tensor([scores], dtype=torch.float64) for scores in ([7, 5, 8], [4, 6, 5])]
    found = contrast_advantages(tau[0], tau[1])[0]
    half = math.sqrt(0.5)
    assert found[0].tolist() == pytest.approx([half, -2 * half, half], abs=1e-3)
    assert found[1].tolist() == pytest.approx([2 * half, -half, -half], abs=1e-3)


def test_the_first_gradient_is_that_of_the_policy_gradient() -> None:
    """At ratio 1 the derivative by a token is -A / T, and the loss -A."""
    log_prob, advantage = LOG_PROB.clone().requires_grad_(), torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)
    loss = gcpo_loss(log_prob, LOG_PROB, MASK, advantage, clip_range=0.2)
    assert loss.tolist() == pytest.approx([-2.0, 1.0, -0.5])
    loss.sum().backward()
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == [
        pytest.approx([-2 / 3] * 3),
        pytest.approx([0.5, 0.5, 0.0]),
        pytest.approx([-0.5, 0.0, 0.0]),
    ]


def test_ratios_are_held_token_by_token() -> None:
    """Ratios 1.5 and 1.1 of a good trace: the first counts as 1.2 and has no gradient."""
    old = torch.tensor([[0.2, 0.4]], dtype=torch.float64).log()
    new = (old + torch.tensor([[1.5, 1.1]], dtype=torch.float64).log()).requires_grad_()
    loss = gcpo_loss(new, old, torch.ones(1, 2, dtype=torch.bool), torch.tensor([1.0]).double(), clip_range=0.2)
    assert loss.item() == pytest.approx(-(1.2 + 1.1) / 2)
    loss.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == [pytest.approx([0.0, -0.55])]


def test_the_kl_is_that_of_the_token() -> None:
    """One token of two: sum_y p (q/p - 1 - log q/p) over the draws of the new policy is KL(new || reference)."""
    new, reference = torch.tensor([0.7, 0.3]).double(), torch.tensor([0.4, 0.6]).double()
    mask, zero = torch.ones(2, 1, dtype=torch.bool), torch.zeros(2).double()
    loss = gcpo_loss(
        new.log()[:, None],
        new.log()[:, None],
        mask,
        zero,
        clip_range=0.2,
        reference=reference.log()[:, None],
        kl_coef=0.5,
    )
    assert float((new * loss).sum()) == pytest.approx(0.5 * float((new * (new / reference).log()).sum()))
