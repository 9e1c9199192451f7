"""Calibration of raw rewards against worked numbers and the properties it is used for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flowrl.advantages.normalise import normalise
from flowrl.advantages.reward_maps import MAPS, BackwardCorrected, ForwardWeights, Logistic, log_tame

VERDICT = torch.tensor([1.0, 0.0], dtype=torch.float64)
SOURCE = {"p25": 0.2, "p50": 0.3, "p75": 0.5}


def test_logistic() -> None:
    reward = torch.tensor([0.3, 0.6, 0.0, 0.5, 0.2], dtype=torch.float64)
    wanted = [0.5, 0.952574, 0.047426, 0.880797, 0.268941]
    assert Logistic(**SOURCE)(reward).tolist() == pytest.approx(wanted, abs=6e-7)
    assert Logistic(**SOURCE)(reward.float()).dtype == torch.float32
    assert bool(Logistic(**SOURCE)(torch.tensor([math.nan])).isnan().all())
    # The source's scale does not matter.
    moved = Logistic(**{name: 4 * value - 1 for name, value in SOURCE.items()})(4 * reward - 1)
    torch.testing.assert_close(moved, Logistic(**SOURCE)(reward), rtol=0, atol=1e-12)


def test_logistic_of_a_sources_own_percentiles_is_centred() -> None:
    reward = torch.randn(401, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 20 + 7
    p25, p50, p75 = np.percentile(reward.numpy(), [25, 50, 75])
    assert float(Logistic(p25=p25, p50=p50, p75=p75)(reward).median()) == pytest.approx(0.5, abs=1e-12)


def test_backward_correction_is_unbiased() -> None:
    rho0, rho1 = 0.1, 0.2
    one, zero = BackwardCorrected(false_positive=rho0, false_negative=rho1)(VERDICT).tolist()
    assert (one, zero) == pytest.approx((1.285714, -0.142857), abs=6e-7)
    assert (1 - rho1) * one + rho1 * zero == pytest.approx(1, abs=1e-12)
    assert rho0 * one + (1 - rho0) * zero == pytest.approx(0, abs=1e-12)
    assert torch.equal(BackwardCorrected(false_positive=0.0, false_negative=0.0)(VERDICT), VERDICT)


def test_forward_weights_need_false_negatives_only() -> None:
    one, zero = ForwardWeights(false_negative=0.2)(VERDICT).tolist()
    assert (one, zero) == pytest.approx((0.2, -0.8), abs=1e-12)
    assert 0.8 * one + 0.2 * zero == pytest.approx(0, abs=1e-12)
    assert 0.1 * one + 0.9 * zero == pytest.approx(-0.7, abs=1e-12)


@pytest.mark.parametrize("name", ["backward_corrected", "forward_weights"])
def test_dividing_by_a_groups_std_cancels_equal_rates(name: str) -> None:
    observed = torch.tensor([1, 0, 0, 1, 0, 1, 1, 1], dtype=torch.float64)
    groups = torch.arange(8) // 4

    def mapped(rate: float) -> torch.Tensor:
        rates = {"false_positive": 0.1} if name == "backward_corrected" else {}
        found: torch.Tensor = MAPS[name](false_negative=rate, **rates)(observed)
        return found[None]

    plain = normalise(observed[None], groups, eps=0.0)
    torch.testing.assert_close(normalise(mapped(0.2), groups, eps=0.0), plain, rtol=0, atol=1e-12)
    # They act, but for a mere shift, where nothing divides.
    undivided = normalise(mapped(0.2), groups, scope="none") / normalise(observed[None], groups, scope="none")
    factor = 1 / 0.7 if name == "backward_corrected" else 1.0
    torch.testing.assert_close(undivided, torch.full_like(undivided, factor), rtol=0, atol=1e-12)


def test_log_tame() -> None:
    raw = torch.tensor([[0, 1, 3, 4], [0.8, 1, 1, 1.2]], dtype=torch.float64)
    wanted = [[0, 0.693147, 1.386294, 1.609438], [0.8, 1, 1, 1.2]]  # h = 0.790569 and 0.141421, delta 0.465995
    np.testing.assert_allclose(log_tame(raw).numpy(), wanted, rtol=0, atol=6e-7)
    equal = torch.stack([raw[0], raw[0]])
    assert torch.equal(log_tame(equal), equal)  # h must exceed delta
    holes = torch.cat([raw, torch.full((2, 1), math.nan, dtype=torch.float64)], 1)
    assert torch.equal(log_tame(holes)[:, :4], log_tame(raw))
    nothing_yet = torch.stack([torch.zeros(4).double(), raw[1]])  # no success so far: constant, not divided by 0
    assert torch.equal(log_tame(nothing_yet)[0], nothing_yet[0])


def test_maps_refuse() -> None:
    for p25, p50, p75 in ((0.3, 0.3, 0.3), (0.5, 0.3, 0.6), (0.2, 0.7, 0.6)):
        with pytest.raises(ValueError, match="p25"):
            Logistic(p25=p25, p50=p50, p75=p75)(VERDICT)
    with pytest.raises(ValueError, match="steepness"):
        Logistic(k=0.0, **SOURCE)(VERDICT)
    with pytest.raises(ValueError, match="verdicts"):
        BackwardCorrected(false_positive=0.1, false_negative=0.1)(VERDICT / 2)
    with pytest.raises(ValueError, match="below 1"):
        BackwardCorrected(false_positive=0.5, false_negative=0.5)(VERDICT)
    for rate in (-0.1, 1.0):
        with pytest.raises(ValueError, match="probability"):
            ForwardWeights(false_negative=rate)(VERDICT)


def test_log_tame_refuses() -> None:
    with pytest.raises(ValueError, match="positive"):
        log_tame(torch.tensor([[-1.0, 0.5]]))
