"""Losses that compare or weigh the images of a group: DGPO, CRD, RWR, RFT and SFT, at worked values and optima."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_forward_losses import batch, double, method_gradient, minimise, two_points

from flowrl.objectives.forward_losses import Crd, Dgpo, Matched, Rft, Rwr, Sft
from flowrl.objectives.terms import mean_squared_error

# ---- DGPO, CRD -------------------------------------------------------------------------------------------------------


def with_errors(error: list[float], old: list[float] | None, reference: list[float] | None, a: list[float]) -> Matched:
    """Scalar images whose velocities have these mean squared errors."""
    target = torch.zeros(len(a), 1, dtype=torch.float64)
    away = [None if e is None else target + double(e).sqrt()[:, None] for e in (error, old, reference)]
    assert away[0] is not None
    return Matched(
        clean=target, noise=target, sigma=double([0.5] * len(a)), velocity=away[0], old=away[1], reference=away[2],
        advantage=double(a), reward=double(a), group=torch.zeros(len(a), dtype=torch.long),
    )  # fmt: skip


D, D_REF = [0.10, 0.20, 0.15, 0.12], [0.12, 0.18, 0.15, 0.15]
A = [1.0, -1.0, 0.5, -0.5]


def test_dgpo_worked_group() -> None:
    matched = with_errors(D, None, D_REF, A)
    loss, metrics = Dgpo()(matched)
    assert metrics["gate"].tolist() == pytest.approx([0.3486451353] * 4, abs=1e-10)
    assert float(loss.mean()) == pytest.approx(-0.0074087091, abs=1e-10)
    slope = method_gradient("dgpo", matched) / (2 * matched.velocity) / 4  # by the error, of the mean
    expected = [0.0871612838, -0.0871612838, 0.0435806419, -0.0435806419]
    assert slope.flatten().tolist() == pytest.approx(expected, abs=1e-10)


def test_dgpo_is_the_loss_of_tdm_r1() -> None:
    """A pair whose winner is better and whose loser is worse than the reference: S = -5."""
    loss, metrics = Dgpo()(with_errors([0.2, 0.3], None, [0.25, 0.25], [1.0, -1.0]))
    assert metrics["gate"].tolist() == pytest.approx([0.0066928509] * 2, abs=1e-10)
    assert float(loss.mean()) == pytest.approx(-0.000334642546, abs=1e-12)


def test_dgpo_groups_do_not_see_each_other() -> None:
    one, two = with_errors(D, None, D_REF, A), with_errors(D_REF, None, D, A[::-1])
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    fields = ("clean", "noise", "sigma", "velocity", "reference", "advantage", "reward")
    both = {name: torch.cat([getattr(one, name), getattr(two, name)])[order] for name in fields}
    mixed = Matched(**both, group=(order >= 4).long() * 7)
    expected = torch.cat([Dgpo()(one)[0], Dgpo()(two)[0]])[order]
    assert torch.allclose(Dgpo()(mixed)[0], expected, atol=1e-15)


def test_dgpo_stops_images_whose_ratio_has_moved() -> None:
    """exp(d_old - d) is above 1 for the first and third, below for the second and fourth."""
    old = [0.12, 0.18, 0.151, 0.119]
    matched = with_errors(D, old, D_REF, A)
    _, metrics = Dgpo(clip=5e-3)(matched)
    assert metrics["clipped"].tolist() == [1.0, 1.0, 0.0, 0.0]
    free, held = method_gradient("dgpo", matched), method_gradient("dgpo", matched, clip=5e-3)
    assert held.flatten()[:2].tolist() == [0.0, 0.0]
    assert torch.equal(held[2:], free[2:])


def test_crd_worked_group() -> None:
    rho = [0.3, -0.1, 0.2, 0.0]
    matched = with_errors([1.0 - value for value in rho], [1.0] * 4, None, [2.0, -2.0, 5.0, 0.0])
    loss, metrics = Crd(adaptive=False)(matched)
    assert metrics["implicit_reward"].tolist() == pytest.approx(rho)
    assert metrics["optimality"].tolist() == pytest.approx([0.7, 0.3, 1.0, 0.5])
    assert float(loss.mean()) == pytest.approx(0.134375, abs=1e-12)
    assert float(Crd(adaptive=False, published_scale=False)(matched)[0].mean()) == pytest.approx(0.026875, abs=1e-12)


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reward", "expected"), [((1.0, 0.0), -1.6), ((0.7, 0.3), -0.9541020561)])
def test_regression_optimum_is_the_weighted_posterior_mean(reward: tuple[float, float], expected: float) -> None:
    matched, odds = two_points((0.0, 0.0), reward)
    assert minimise("rwr", matched, odds, weights="raw") == pytest.approx(expected, abs=1e-9)
    temperature = 1 / math.log(reward[0] / reward[1]) if reward[1] else 1e-3
    ratio_as_softmax = replace(matched, reward=double([1.0, 0.0]))
    found = minimise("rwr", ratio_as_softmax, odds, weights="softmax", temperature=temperature)
    assert found == pytest.approx(expected, abs=1e-9)


def test_rft_trains_on_all_that_tie_for_best() -> None:
    matched = replace(batch(4), reward=double([0.3, 0.9, 0.7, 0.9, 0.7, 0.1]))  # groups 0, 1, 0, 1, 0, 1
    loss, metrics = Rft()(matched)
    assert metrics["weight"].tolist() == [0, 1, 1, 1, 1, 0]
    assert torch.allclose(loss, metrics["weight"] * mean_squared_error(matched.velocity, matched.target))
    matched, odds = two_points((0.0, 0.0), (1.0, 0.0))
    assert minimise("rft", matched, odds) == pytest.approx(-1.6, abs=1e-9)


def test_softmax_weights_have_mean_one_in_each_group() -> None:
    _, metrics = Rwr(temperature=0.2)(batch(5))
    weight, reward = metrics["weight"], batch(5).reward
    for group in (0, 1):
        raw = np.exp(reward[group::2].numpy() / 0.2)
        assert np.allclose(weight[group::2], raw / raw.mean(), rtol=1e-12)


def test_sft_is_rft_where_every_image_is_the_best() -> None:
    matched = replace(batch(8), group=torch.arange(6))
    (loss, metrics), (other, others) = Sft(images="")(matched), Rft()(matched)
    assert torch.equal(loss, other)
    assert all(torch.equal(value, others[name]) for name, value in metrics.items())
    found = method_gradient("sft", matched, images="")
    assert torch.equal(found, method_gradient("rft", matched))
    torch.testing.assert_close(found, 2 * (matched.velocity - matched.target) / 6, rtol=1e-12, atol=0)
