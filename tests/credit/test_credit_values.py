"""Credit on trajectories: outcome, dense, stepwise and value-anchored, against tables normalised by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from credit_tables import TABLE, advantages, close, columns, sampled_of, table_of
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.credit.dense import DenseGrpo, Outcome, Stepwise, calibrate_noise
from flowrl.credit.values import final_rewards, gains_of, norm_by_step, steps_of, values_of
from flowrl.credit.vgpo import Vgpo


def test_outcome_oracle_with_and_without_values() -> None:
    sampled, reward = table_of(TABLE)
    credit = Outcome()(sampled, reward)
    a = [1.256757, -1.450105, 0.483368, -0.290021]
    close(advantages(credit, 3), columns(a, a, a))
    a = [1.256272, -1.449544, 0.483181, -0.289909]
    close(advantages(credit, 3, eps=1e-4), columns(a, a, a))
    alone = Outcome()(sampled_of(4, 3, values=False), reward[:, 3::4])
    assert torch.equal(alone.raw, credit.raw)
    assert torch.equal(alone.norm, credit.norm)
    assert credit.scale is credit.offset is credit.weight is credit.keep is None


def test_dense_oracles() -> None:
    sampled, reward = table_of(TABLE)
    first = [-1.264911, 1.264911, 0.632456, -0.632456]
    wanted = columns(first, [0.930949, -1.647064, 0.644503, 0.071611], [1.414214, 0, -1.414214, 0])
    close(advantages(DenseGrpo()(sampled, reward), 3), wanted)
    final = [1.256757, -1.450105, 0.483368, -0.290021]
    wanted = columns(first, [0.483368, -1.450105, 1.256757, -0.290021], final)
    close(advantages(DenseGrpo(difference=False)(sampled, reward), 3), wanted)


def test_stepwise_oracle() -> None:
    wanted = [
        [-0.929929, 1.136580, 1.136580],
        [0.723278, -2.583137, 0.309976],
        [0.309976, 0.723278, -0.516627],
        [-0.516627, -0.103325, 0.309976],
    ]
    close(advantages(Stepwise()(*table_of(TABLE)), 3), wanted)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**31))
def test_gains_telescope_and_permuted_samples_permute_credit(b: int, n: int, k: int, seed: int) -> None:
    value = torch.from_numpy(np.random.default_rng(seed).normal(size=(k, b, n + 1)))
    sampled = sampled_of(b, n)
    gains = gains_of(sampled, value.reshape(k, -1))
    np.testing.assert_allclose(gains.sum(-1), value[..., -1] - value[..., 0], atol=1e-12)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(b))
    for method in (Outcome(), DenseGrpo(), Stepwise()):
        raw = method(sampled, value.reshape(k, -1)).raw.reshape(k, b, n)
        assert torch.equal(method(sampled, value[:, order].reshape(k, -1)).raw.reshape(k, b, n), raw[:, order])


def test_normalisation_sets_know_prompt_and_step_only() -> None:
    """Two processes with halves of the samples give the sets the same numbers as one process with all."""
    both = sampled_of(4, 3, [5, 5, 9, 5])
    first, second = sampled_of(2, 3, [5, 5]), sampled_of(2, 3, [9, 5])
    assert torch.equal(torch.cat([norm_by_step(first), norm_by_step(second)]), norm_by_step(both))
    assert len(norm_by_step(both).unique()) == 6
    assert norm_by_step(both).reshape(4, 3)[0].tolist() == norm_by_step(both).reshape(4, 3)[3].tolist()


def test_channels_and_missing_rewards_stay_apart() -> None:
    sampled = sampled_of(2, 2)
    reward = torch.tensor([[0.0, 1, 3, 4, float("nan"), 5], [1.0, 1, 1, 2, 4, 8]])
    dense = DenseGrpo()(sampled, reward).raw
    np.testing.assert_array_equal(dense, [[1, 2, np.nan, np.nan], [0, 0, 2, 4]])
    np.testing.assert_array_equal(Outcome()(sampled, reward).raw, [[3, 3, 5, 5], [1, 1, 8, 8]])
    assert values_of(sampled, reward).shape == (2, 2, 3)
    assert dense.dtype == torch.float32


def test_vgpo_oracle() -> None:
    """The rewards of the clean estimates are values 1 .. 3; value 0 is not used."""
    sampled, reward = table_of([[7.0, 0.2, 0.5, 0.9], [-7.0, 0.4, 0.4, 0.3]])
    credit = Vgpo(gamma=0.5, anchor=1.0, anchored_steps=3)(sampled, reward)
    assert credit.scale is not None
    assert credit.offset is not None
    close(credit.raw.reshape(2, 3).numpy(), [[0.675, 0.95, 0.9], [0.675, 0.55, 0.3]])
    close(credit.scale.reshape(2, 3).numpy(), [[0.801980, 1.128713, 1.069307], [1.327869, 1.081967, 0.590164]])
    a = [[0.541337, 2.200990, 2.031683], [0.896311, -0.486885, -0.413115]]
    close(advantages(credit, 3), a)
    # By default half the steps, rounded up, carry the absolute term; the others are omega z.
    a = [[*a[0][:2], 1.069307], [*a[1][:2], -0.590164]]
    close(advantages(Vgpo(gamma=0.5)(sampled, reward), 3), a)
    relative = advantages(Vgpo(gamma=0.5, anchor=0.0)(sampled, reward), 3)
    close(relative, [[0, 1.128713, 1.069307], [0, -1.081967, -0.590164]])


def test_vgpo_leaves_out_a_sample_whose_rewards_are_not_all_there() -> None:
    sampled, reward = table_of([[float("nan"), 0.2, 0.5, 0.9], [0.1, 0.4, float("nan"), 0.3]])
    credit = Vgpo()(sampled, reward)
    assert credit.scale is not None
    assert credit.offset is not None
    assert credit.raw.isnan().flatten().tolist() == [False] * 3 + [True] * 3
    assert credit.scale[3:].tolist() == [1, 1, 1]
    assert credit.offset[3:].tolist() == [0, 0, 0]
    whole = Vgpo()(*table_of([[0.0, 0.2, 0.5, 0.9]]))
    assert torch.equal(credit.raw[:, :3], whole.raw)


def test_vgpo_refuses_negative_rewards_and_options_out_of_range() -> None:
    sampled, reward = table_of([[0.0, 0.2, -0.5, 0.9], [0.0, 0.4, 0.1, 0.3]])
    with pytest.raises(ValueError, match=r"smallest here is -0\.5.*add a constant"):
        Vgpo()(sampled, reward)
    with pytest.raises(ValueError, match="one reward channel"):
        Vgpo()(sampled, reward.expand(2, -1))
    with pytest.raises(ValueError, match=r"0 \.\. 3"):
        Vgpo(anchored_steps=4)(sampled, reward.abs())
    for options in ({"gamma": 1.5}, {"anchor": -1.0}, {"anchored_steps": -1}):
        with pytest.raises(ValueError, match="gamma lies"):
            Vgpo(**options)(sampled, reward.abs())  # type: ignore[arg-type]


def test_vgpo_of_a_sample_that_earns_nothing_is_plain() -> None:
    credit = Vgpo()(*table_of([[1.0, 0, 0], [0.0, 1, 1]]))
    assert credit.scale is not None
    assert credit.offset is not None
    assert credit.scale[:2].tolist() == [1.0, 1.0]  # the limit of equal positive rewards
    assert credit.raw[0, :2].tolist() == credit.offset[:2].tolist() == [0.0, 0.0]


def test_calibration_oracles() -> None:
    up, down, nan = [1.0], [-1.0], [float("nan")]
    psi = torch.tensor([0.7], dtype=torch.float64)
    for gains, wanted in [
        (3 * up + 3 * down, 0.71),
        (4 * up + 2 * down, 0.69),
        (2 * up + 4 * down, 0.69),
        (3 * up + 2 * down + [0.0], 0.71),
        (3 * up + 3 * nan, 0.69),
        (6 * nan, 0.70),
    ]:
        assert calibrate_noise(psi, torch.tensor(gains)[:, None]).item() == pytest.approx(wanted, abs=1e-12)
    table = calibrate_noise(torch.tensor([0.3, 0.005]), torch.tensor([[1.0, 1], [1, 1]]), eps1=2, eps2=0.1)
    np.testing.assert_allclose(table, [0.2, 0.005], rtol=1e-6)  # a level never falls to 0
    assert calibrate_noise(torch.tensor([0.5]), torch.ones(4, 1), eps2=0.5).tolist() == [0.5]


def test_calibration_refuses_what_does_not_fit() -> None:
    for psi, gains in [(torch.ones(2), torch.ones(3, 1)), (torch.ones(1, 1), torch.ones(3, 1))]:
        with pytest.raises(ValueError, match=r"\[N, T\]"):
            calibrate_noise(psi, gains)
    with pytest.raises(ValueError, match="positive"):
        calibrate_noise(torch.zeros(1), torch.ones(3, 1))


def test_sets_of_prompts_and_steps_are_all_different() -> None:
    norm = norm_by_step(sampled_of(40, 20, range(40)))
    assert len(norm.unique()) == len(norm) == 800


def test_other_layouts_are_refused() -> None:
    sampled, reward = table_of(TABLE)
    assert steps_of(sampled).tolist() == [[0, 1, 2]] * 4
    with pytest.raises(ValueError, match="complete the trajectories"):
        values_of(sampled_of(4, 3, values=False), reward[:, ::4])
    for wrong in (reward[:, 1:], reward[0], reward.long()):
        with pytest.raises(ValueError, match=r"float \[K, 16\]"):
            final_rewards(sampled, wrong)
    shared = replace(sampled, sample=torch.full_like(sampled.sample, -1))
    branches = replace(sampled, parent=torch.full_like(sampled.parent, -1))
    for other in (shared, branches, replace(sampled, sample=sampled.sample.flip(0))):
        with pytest.raises(ValueError, match="needs trajectories"):
            Outcome()(other, reward)
    with pytest.raises(ValueError, match="sample by sample"):
        values_of(replace(sampled, finished_after=sampled.finished_after.flip(0)), reward)
    part = {name: getattr(sampled, name)[:8] for name in ("finished", "finished_group", "finished_after")}
    with pytest.raises(ValueError, match="16 with the values"):
        values_of(replace(sampled, **part), reward[:, :8])
