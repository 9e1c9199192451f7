"""GCPO: rewards by counting against the other side's scores, standardised on each side by itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flowrl.objectives.group_contrast import contrast_advantages, contrast_rewards

NAN = math.nan
WINNER, LOSER = torch.tensor([[8.0, 6, 7, 5]]), torch.tensor([[4.0, 6, 5, 3]])


def test_worked_example() -> None:
    winner, loser = contrast_rewards(WINNER, LOSER)
    assert winner.tolist() == [[1, 0.75, 1, 0.5]]  # 6 and 6 are equal, which is not right
    assert loser.tolist() == [[1, 0.5, 0.75, 1]]


def test_sides_are_standardised_separately() -> None:
    winner, loser = contrast_advantages(WINNER.double(), LOSER.double(), eps=0.0, correction=1)
    for got, reward in ((winner, np.array([1, 0.75, 1, 0.5])), (loser, np.array([1, 0.5, 0.75, 1]))):
        np.testing.assert_allclose(got[0].numpy(), (reward - reward.mean()) / reward.std(ddof=1), rtol=1e-12)
    shrunk, _ = contrast_advantages(WINNER.double(), LOSER.double(), eps=0.1)
    reward = np.array([1, 0.75, 1, 0.5])
    np.testing.assert_allclose(shrunk[0].numpy(), (reward - reward.mean()) / (reward.std() + 0.1), rtol=1e-12)


def test_counting_agrees_with_loops_and_pairs_are_independent() -> None:
    generator = torch.Generator().manual_seed(0)
    winner = torch.randint(0, 6, (5, 4), generator=generator).double()
    loser = torch.randint(0, 6, (5, 3), generator=generator).double()
    got_w, got_l = contrast_rewards(winner, loser)
    for p in range(5):
        for j in range(4):
            assert float(got_w[p, j]) == pytest.approx(sum(float(winner[p, j] > t) for t in loser[p]) / 3)
        for j in range(3):
            assert float(got_l[p, j]) == pytest.approx(sum(float(loser[p, j] < t) for t in winner[p]) / 4)
        alone = contrast_advantages(winner[p : p + 1], loser[p : p + 1])
        together = contrast_advantages(winner, loser)
        assert torch.equal(alone[0][0], together[0][p])
        assert torch.equal(alone[1][0], together[1][p])


def test_sides_that_all_agree_teach_nothing() -> None:
    """Three equal rewards of 2/3 have a mean that rounds, and still no advantage."""
    winner, loser = contrast_advantages(torch.full((1, 3), 2.0), torch.tensor([[1.0, 1.0, 2.0]]), eps=0.0)
    assert winner.tolist() == [[0, 0, 0]]
    assert loser[0].tolist() == pytest.approx([1 / math.sqrt(2), 1 / math.sqrt(2), -math.sqrt(2)])


def test_traces_without_a_score_are_left_out() -> None:
    winner, loser = contrast_rewards(torch.tensor([[8.0, NAN, 5.0]]), torch.tensor([[4.0, 6.0, NAN]]))
    assert winner[0, [0, 2]].tolist() == [1.0, 0.5]
    assert math.isnan(winner[0, 1])
    assert loser[0, :2].tolist() == [1.0, 0.5]
    assert math.isnan(loser[0, 2])
    advantage, _ = contrast_advantages(torch.tensor([[8.0, NAN, 5.0]]), torch.tensor([[4.0, 6.0, NAN]]), eps=0.0)
    assert advantage.tolist() == [[1.0, 0.0, -1.0]]
    nothing, lost = contrast_advantages(torch.tensor([[1.0, 2.0]]), torch.tensor([[NAN, NAN]]))
    assert nothing.tolist() == [[0.0, 0.0]]
    assert lost.tolist() == [[0.0, 0.0]]


def test_dtype_is_kept() -> None:
    winner, loser = contrast_advantages(WINNER, LOSER)
    assert winner.dtype == loser.dtype == torch.float32


def test_wrong_input_refused() -> None:
    cases = [
        ((WINNER[0], LOSER), "one row a pair"),
        ((WINNER, LOSER.repeat(2, 1)), "one row a pair"),
        ((WINNER[:, :0], LOSER), "one row a pair"),
        ((WINNER.long(), LOSER), "must be float"),
        ((WINNER / 0, LOSER), "a score is infinite"),
    ]
    for scores, message in cases:
        with pytest.raises(ValueError, match=message):
            contrast_rewards(*scores)
    for options in ({"correction": 2}, {"eps": -1.0}, {"eps": NAN}):
        with pytest.raises(ValueError, match="correction must be 0 or 1"):
            contrast_advantages(WINNER, LOSER, **options)  # type: ignore[arg-type]
