"""Pairs, their losses, and what the images of a group say about one another."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from derivatives import finite_difference, gradient
from torch import Tensor

from flowrl.objectives.preference_losses import (
    best_of_group,
    centred_distillation,
    d3po,
    diffusion_dpo,
    group_gate,
    pairs_of_groups,
    reward_weights,
)

WIN, LOSE = torch.tensor([0]), torch.tensor([1])


def double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def with_errors(errors: list[float]) -> Tensor:
    """Predictions of three elements whose mean squared error against 0 is given."""
    return double(errors).sqrt()[:, None] * torch.tensor([[1.0, -1.0, 1.0]], dtype=torch.float64)


# ---- pairs -----------------------------------------------------------------------------------------------------------


def test_pairs_are_the_best_and_the_worst_of_each_group() -> None:
    value = torch.tensor([0.2, 0.9, 0.1, 0.5, 0.9, 0.5, -1.0, 0.5])
    group = torch.tensor([7, 3, 7, 5, 3, 5, 3, 9])  # 5 is tied, 9 is alone
    winner, loser = pairs_of_groups(value, group)
    assert winner.tolist() == [1, 0]  # of the two best of group 3, the first
    assert loser.tolist() == [6, 2]
    valid = torch.tensor([True, False, True, True, True, True, True, True])
    assert pairs_of_groups(value, group, valid=valid)[0].tolist() == [4, 0]
    value[6], valid[6] = math.nan, False
    assert [index.tolist() for index in pairs_of_groups(value, group, valid=valid)] == [[0], [2]]


def test_no_pair_where_nothing_differs() -> None:
    winner, loser = pairs_of_groups(torch.ones(4), torch.tensor([0, 0, 1, 1]))
    assert winner.shape == loser.shape == (0,)
    assert winner.dtype == torch.long
    loss, _ = d3po(torch.zeros(4), winner, loser)
    assert loss.shape == (0,)
    _, metrics = d3po(torch.zeros(2), WIN, LOSE)
    assert metrics["accuracy"].tolist() == [0.0]  # of equal scores neither is named


# ---- DPO -------------------------------------------------------------------------------------------------------------


def test_dpo_worked_values_and_gradient() -> None:
    prediction, reference, target = with_errors([0.10, 0.20]), with_errors([0.12, 0.19]), torch.zeros(2, 3).double()
    loss, metrics = diffusion_dpo(prediction, reference, target, WIN, LOSE, beta=100)
    assert float(metrics["margin"]) == pytest.approx(1.5, abs=1e-12)
    assert float(loss) == pytest.approx(0.2014132780, abs=1e-10)
    assert float(metrics["winner_reward"]) == pytest.approx(1.0)
    assert float(metrics["loser_reward"]) == pytest.approx(-0.5)
    assert metrics["accuracy"].tolist() == [1.0]
    swapped, mirrored = diffusion_dpo(prediction, reference, target, LOSE, WIN, beta=100)
    assert float(mirrored["margin"]) == pytest.approx(-1.5, abs=1e-12)
    assert float(swapped) == pytest.approx(0.2014132780 + 1.5, abs=1e-10)
    slope = gradient(lambda v: diffusion_dpo(v, reference, target, WIN, LOSE, beta=100)[0], prediction)
    by_error = slope / (2 * prediction / 3)
    push = 50 / (1 + math.exp(1.5))
    assert torch.allclose(by_error, double([[push], [-push]]).expand(2, 3), atol=1e-10)


def test_dpo_at_the_reference_is_log_two() -> None:
    prediction, target = with_errors([0.3, 0.1]), torch.zeros(2, 3).double()
    for beta in (1.0, 5000.0):
        assert float(diffusion_dpo(prediction, prediction, target, WIN, LOSE, beta=beta)[0]) == math.log(2)
        slope = gradient(
            lambda v, beta=beta: diffusion_dpo(v, prediction, target, WIN, LOSE, beta=beta)[0],  # type: ignore[misc]
            prediction,
        )
        by_error = slope / (2 * prediction / 3)
        assert torch.allclose(by_error, beta / 4 * double([[1.0], [-1.0]]).expand(2, 3))


def test_dpo_does_not_see_what_both_networks_share() -> None:
    reference, target = with_errors([0.12, 0.19]), torch.zeros(2, 3).double()
    first = diffusion_dpo(with_errors([0.10, 0.20]), reference, target, WIN, LOSE, beta=100)[0]
    harder = diffusion_dpo(with_errors([0.40, 0.20]), with_errors([0.42, 0.19]), target, WIN, LOSE, beta=100)[0]
    assert float(harder) == pytest.approx(float(first), abs=1e-12)


def test_dpo_gradient_against_finite_differences_over_several_pairs() -> None:
    generator = torch.Generator().manual_seed(0)
    prediction, reference, target = torch.randn(3, 5, 2, 2, generator=generator, dtype=torch.float64)
    winner, loser = torch.tensor([4, 0]), torch.tensor([1, 3])

    def loss(v: Tensor) -> Tensor:
        return diffusion_dpo(v, reference, target, winner, loser, beta=3.0)[0]

    found = gradient(loss, prediction)
    assert torch.allclose(found, finite_difference(loss, prediction), atol=1e-7)
    assert found[2].abs().max() == 0  # in no pair
    single, metrics = diffusion_dpo(prediction.bfloat16(), reference, target, winner, loser, beta=3.0)
    assert single.dtype == metrics["margin"].dtype == torch.float32
    frozen = reference.clone().requires_grad_()
    assert not diffusion_dpo(prediction, frozen, target, winner, loser, beta=3.0)[0].requires_grad


def test_d3po_worked_value_and_clipping() -> None:
    log_ratio = double([0.02, -0.05])
    assert float(d3po(log_ratio, WIN, LOSE)[0]) == pytest.approx(0.6896533055, abs=1e-10)
    assert torch.equal(d3po(log_ratio, WIN, LOSE)[0], d3po(log_ratio, WIN, LOSE, clip=None)[0])
    far = double([0.3, -0.3])
    z = 0.1 * (math.log(1.1) - math.log(0.9))
    assert float(d3po(far, WIN, LOSE)[1]["margin"]) == pytest.approx(z, abs=1e-15)
    assert gradient(lambda v: d3po(v, WIN, LOSE)[0], far).tolist() == [0.0, 0.0]
    for values in (log_ratio, far):
        found = gradient(lambda v: d3po(v, WIN, LOSE, beta=2.0)[0], values)
        assert torch.allclose(found, finite_difference(lambda v: d3po(v, WIN, LOSE, beta=2.0)[0], values), atol=1e-8)


# ---- groups ----------------------------------------------------------------------------------------------------------

D, D_REF = double([0.10, 0.20, 0.15, 0.12]), double([0.12, 0.18, 0.15, 0.15])
A = double([1.0, -1.0, 0.5, -0.5])


def test_gate_worked_group_and_its_preference_gradient() -> None:
    group = torch.zeros(4, dtype=torch.long)
    assert group_gate(D, D_REF, A, group, beta=100).tolist() == pytest.approx([0.3486451353] * 4, abs=1e-10)

    def preference(error: Tensor) -> Tensor:
        """-log sigmoid(-S)."""
        return torch.nn.functional.softplus(100 / 4 * (A * (error - D_REF)).sum())

    gated = group_gate(D, D_REF, A, group, beta=100) * A
    assert torch.allclose(gradient(preference, D), 100 / 4 * gated)  # the factor beta / K
    assert not group_gate(D.clone().requires_grad_(), D_REF, A, group, beta=100).requires_grad


RHO, R = double([0.3, -0.1, 0.2, 0.0]), double([0.7, 0.3, 1.0, 0.5])
ONE_GROUP = torch.zeros(4, dtype=torch.long)


def test_centred_distillation_worked_values() -> None:
    loss = centred_distillation(RHO, R, ONE_GROUP, beta=1.0)
    score, wanted = np.array([0.2, -0.2, 0.1, -0.1]), np.array([0.075, -0.325, 0.375, -0.125])
    assert np.allclose(loss, np.square(score - wanted), atol=1e-15)
    assert float(loss.mean()) == pytest.approx(0.026875, abs=1e-15)
    moved = centred_distillation(RHO + 3, R - 0.2, ONE_GROUP, beta=1.0)
    assert torch.allclose(moved, loss, atol=1e-14)
    entropy = centred_distillation(RHO, R, ONE_GROUP, beta=2.0, loss="cross_entropy")
    p, q = 1 / (1 + np.exp(-wanted)), 1 / (1 + np.exp(-2 * score))
    assert np.allclose(entropy, -p * np.log(q) - (1 - p) * np.log(1 - q), atol=1e-14)


def test_centred_distillation_about_two_centres() -> None:
    rho, r = RHO.numpy(), R.numpy()

    def about(weight: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        weight = weight / weight.sum()
        return np.asarray(np.square((rho - weight @ rho) - (r - weight @ r)))

    both = centred_distillation(RHO, R, ONE_GROUP, beta=1.0, temperature=0.5)
    assert np.allclose(both, (about(np.exp(r / 0.5)) + about(np.exp(-r / 0.5))) / 2, atol=1e-14)
    for wrong in (0.0, -0.5):  # at 0 the two centres would be those of r > 0 and of r < 0, which there is not
        with pytest.raises(ValueError, match="temperature of crd must be above 0"):
            centred_distillation(RHO, R, ONE_GROUP, beta=1.0, temperature=wrong)


@pytest.mark.parametrize("temperature", [None, 0.3])
def test_groups_are_centred_apart(temperature: float | None) -> None:
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    rho, r = torch.cat([RHO, 2 * RHO + 1])[order], torch.cat([R, R.flip(0)])[order]
    loss = centred_distillation(rho, r, (order >= 4).long() + 3, beta=0.5, temperature=temperature)
    apart = [
        centred_distillation(RHO, R, ONE_GROUP, beta=0.5, temperature=temperature),
        centred_distillation(2 * RHO + 1, R.flip(0), ONE_GROUP, beta=0.5, temperature=temperature),
    ]
    assert torch.allclose(loss, torch.cat(apart)[order], atol=1e-14)


def test_weights_of_rewards() -> None:
    reward, group = torch.tensor([0.0, 1.0, 2.0, 5.0]), torch.tensor([1, 1, 0, 0])
    weight = reward_weights(reward, group, temperature=0.5)
    assert weight.tolist() == pytest.approx([2 / (1 + math.e**2), 2 / (1 + math.e**-2), 2 / (1 + math.e**6),
                                             2 / (1 + math.e**-6)], rel=1e-6)  # fmt: skip
    assert torch.equal(reward_weights(reward, group, weights="raw"), reward)
    assert best_of_group(torch.tensor([1.0, 1.0, 3.0, 2.0]), group).tolist() == [1.0, 1.0, 1.0, 0.0]
    assert reward_weights(torch.tensor([1e4, -1e4]), torch.tensor([0, 0])).tolist() == [2.0, 0.0]  # no overflow


def test_preferences_refuse_what_does_not_fit() -> None:
    one, two, ids = torch.zeros(1), torch.zeros(2), torch.tensor([0, 0])
    with pytest.raises(ValueError, match="one shape"):
        pairs_of_groups(one, ids)
    with pytest.raises(ValueError, match="finite"):
        pairs_of_groups(torch.tensor([0.0, math.nan]), ids)
    with pytest.raises(ValueError, match="finite"):
        pairs_of_groups(two, ids, valid=torch.tensor([True]))
    with pytest.raises(ValueError, match="one shape"):
        d3po(two, WIN, ids)
    for beta, clip in ((0.0, 0.1), (0.1, 1.0), (0.1, -0.1)):
        with pytest.raises(ValueError, match="d3po needs"):
            d3po(two, WIN, LOSE, beta=beta, clip=clip)
    image = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="beta of dpo"):
        diffusion_dpo(image, image, image, WIN, LOSE, beta=-1.0)
    with pytest.raises(ValueError, match="without broadcasting"):
        diffusion_dpo(image, image[:1], image, WIN, LOSE, beta=1.0)
    with pytest.raises(ValueError, match="one shape"):
        group_gate(two, two, one, ids, beta=1.0)
    with pytest.raises(ValueError, match="raw weights"):
        reward_weights(torch.tensor([-1.0, 1.0]), ids, weights="raw")
