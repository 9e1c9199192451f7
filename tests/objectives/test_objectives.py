"""Policy-gradient objectives, kernel sensitivities and ratios of whole trajectories."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from derivatives import finite_difference, gradient
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowrl.objectives.policy_gradient import (
    OBJECTIVES,
    Clip,
    Dppo,
    Guard,
    Scored,
    kernel_sensitivity,
    sequence_coefficients,
    sequence_cut,
)
from flowrl.samplers import KERNELS, Transition, gaussian_kl, gaussian_log_prob
from flowrl.samplers.schedules import build_schedule, diffusers_sigmas, dynamic_sigmas, linspace_sigmas

STD = 0.4427188724  # Flow-SDE 0.7 from .8 to .7
SENSITIVITY = -0.1245
XI = torch.tensor([[0.5, -1.0, 0.25, 0.8]], dtype=torch.float64)
DRIFT = torch.tensor([[0.004, -0.002, 0.001, 0.003]], dtype=torch.float64)


def double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def scored(new_mean: Tensor, *, advantage: list[float], xi: Tensor = XI, clip: float = 1.0, std: float = STD) -> Scored:
    """Rows whose old mean is 0; the log-ratio is per dimension."""
    old, new = Transition(torch.zeros_like(new_mean), double(std)), Transition(new_mean, double(std))
    produced, ranges = std * xi.expand_as(new_mean), torch.full((len(new_mean),), clip, dtype=torch.float64)
    log_ratio = (gaussian_log_prob(produced, new) - gaussian_log_prob(produced, old)) / new_mean[0].numel()
    return Scored(
        log_ratio=log_ratio, advantage=double(advantage), clip_low=ranges, clip_high=ranges, new=new,
        old_mean=old.mean, produced=produced, step_size=0.1, sensitivity=SENSITIVITY,
    )  # fmt: skip


# ---- sensitivity -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "level", "c", "kl"),
    [("flow_sde", 0.7, -0.1245, 1.3839509e-5), ("dance_sde", 0.3, -0.101125, 1.9884405e-4),
     ("cps", 0.8, -0.1967376208, 1.5282843e-5), ("ode", 0.0, -0.1, None)],
)  # fmt: skip
def test_sensitivity_and_the_kl_it_explains(name: str, level: float, c: float, kl: float | None) -> None:
    kernel = replace(KERNELS[name], noise_level=level)
    sensitivity = kernel_sensitivity(kernel, 0.8, 0.7)
    assert sensitivity == pytest.approx(c, abs=5e-11)
    if kl is None:
        return
    x, v = double([[0.30, -1.20, 0.75, 2.00]]), double([[-0.40, 0.90, -0.10, 1.50]])
    dv = double([[-0.02, 0.01, -0.03, 0.0]])
    new, reference = kernel(x, v, 0.8, 0.7), kernel(x, v - dv, 0.8, 0.7)
    assert float(gaussian_kl(new, reference)) / 4 == pytest.approx(kl, rel=1e-7)
    assert sensitivity**2 * float(dv.square().mean()) / (2 * float(new.std) ** 2) == pytest.approx(kl, rel=1e-7)


FLUX6 = dynamic_sigmas(6, 0.63)
SD3 = diffusers_sigmas(10, 3.0)
DANCE16 = linspace_sigmas(16, 3.0)


@pytest.mark.parametrize(
    ("name", "level", "grid", "over_std", "expected"),
    [
        ("flow_sde", 0.7, SD3, True,
         [0.056958, 0.078391, 0.129240, 0.187977, 0.264033, 0.370990, 0.535640, 0.824803, 1.486750, 1.770614]),
        ("dance_sde", 0.3, DANCE16, True,
         [0.491473, 0.513840, 0.538366, 0.565387, 0.595311, 0.628648, 0.666039, 0.708308, 0.756536, 0.812186, 0.877319,
          0.955009, 1.050265, 1.172526, 1.344963, 1.667014]),
        ("cps", 0.8, SD3, False,
         [0.039871, 0.071943, 0.107010, 0.145043, 0.185540, 0.226922, 0.265072, 0.289639, 0.273574, 0.008929]),
        ("cps", 0.8, FLUX6, False, [0.096264, 0.166560, 0.232029, 0.284543, 0.308512, 0.273003]),
    ],
)  # fmt: skip
def test_gradient_scales_of_whole_schedules(
    name: str, level: float, grid: Tensor, over_std: bool, expected: list[float]
) -> None:
    kernel = replace(KERNELS[name], noise_level=level, sigma_max=float(grid[1]))
    zero, found = torch.zeros(1, 1, dtype=torch.float64), []
    for sigma, sigma_next in pairwise(grid):
        size = abs(kernel_sensitivity(kernel, sigma, sigma_next))
        found.append(size / float(kernel(zero, zero, sigma, sigma_next).std) if over_std else size)
    assert found == pytest.approx(expected, abs=1.5e-6)  # six printed digits, of a float32 schedule


# ---- objectives ------------------------------------------------------------------------------------------------------


def test_guard_worked_values() -> None:
    rows = scored(DRIFT, advantage=[1.0])
    assert float(rows.log_ratio) == pytest.approx(0.0037360721, abs=1e-10)
    bias = float(DRIFT.square().mean()) / (2 * STD**2)
    assert bias == pytest.approx(1.9132653e-5, rel=1e-7)
    log_normalised = STD * (float(rows.log_ratio) + bias)
    assert log_normalised == pytest.approx(0.0016625, abs=1e-12)
    ratio = torch.tensor(0.0016625, dtype=torch.float64).exp()
    assert float(Guard(delta="none")(rows)) == pytest.approx(-float(ratio), abs=1e-12)
    assert float(Guard(delta="published")(rows)) == pytest.approx(-10 * float(ratio), abs=1e-11)
    assert float(Guard()(rows)) == pytest.approx(-float(ratio) / 0.1245, abs=1e-11)
    clipped = Guard(delta="none")(scored(DRIFT, advantage=[1.0], clip=2e-6))
    assert float(clipped) == pytest.approx(-1.000002, abs=1e-12)  # the range is of exp(log r^)


def test_guard_takes_the_bias_of_each_sample_and_ignores_the_log_ratio() -> None:
    both = torch.cat([DRIFT, -3 * DRIFT])
    apart = [Guard()(scored(mean[None], advantage=[a])) for mean, a in zip(both, (1.0, -2.0), strict=True)]
    assert torch.allclose(Guard()(scored(both, advantage=[1.0, -2.0])), torch.cat(apart), atol=1e-14)
    summed = scored(both, advantage=[1.0, -2.0])
    other = Scored(**{n: getattr(summed, n) for n in summed.__slots__} | {"log_ratio": 4 * summed.log_ratio})
    assert torch.equal(Guard()(other), Guard()(summed))


FLASH = [7.4770, 7.0414, 6.6112, 6.1867, 5.7682, 5.3559, 4.9502, 4.5513, 4.1596, 3.7754]
"""Flash-GRPO's factors of the losses of its first ten steps (code of arXiv 2605.15980), over their mean."""


def test_guard_is_flash_grpo_but_for_a_constant() -> None:
    """Its factor is std / abs(c); while the ratio is 1, that times the plain gradient is guard's."""
    grid = build_schedule({"flow_shift": 3.0}, 20, grid="unipc_flow").sigma
    kernel = replace(KERNELS["wan_sde"], sigma_max=float(grid[1]))
    x, factors = torch.ones(1, 4, dtype=torch.float64), list[float]()
    for sigma, sigma_next in list(pairwise(grid))[:10]:
        sensitivity = kernel_sensitivity(kernel, sigma, sigma_next)
        velocity = torch.zeros_like(x).requires_grad_()
        new = kernel(x, velocity, sigma, sigma_next)
        produced = (new.mean + new.std * XI).detach()
        factors.append(float(new.std) / abs(sensitivity))
        log_prob = gaussian_log_prob(produced, new) / 4
        rows = replace(
            scored(torch.zeros_like(x), advantage=[1.3]),
            log_ratio=log_prob - log_prob.detach(),
            new=new,
            old_mean=new.mean.detach(),
            produced=produced,
            step_size=float(sigma - sigma_next),
            sensitivity=sensitivity,
        )
        plain, guard = (
            torch.autograd.grad(loss(rows).sum(), velocity, retain_graph=True)[0] for loss in (Clip(), Guard())
        )
        torch.testing.assert_close(guard, factors[-1] * plain, rtol=1e-12, atol=0)
    assert factors == pytest.approx(FLASH, abs=1e-4)  # four printed digits, of a float32 schedule
    assert sum(factors) / 10 == pytest.approx(5.5877, abs=1e-4)  # the constant


def test_guard_gradient_does_not_depend_on_the_step() -> None:
    """d log r^ / d velocity = c xi / D, and delta takes c out: all steps pull alike on the network."""
    grid = SD3
    kernel = replace(KERNELS["flow_sde"], noise_level=0.7, sigma_max=float(grid[1]))
    x, v, xi = torch.ones(1, 4, dtype=torch.float64), torch.zeros(1, 4, dtype=torch.float64), XI
    for step in (0, 3, 8):
        sigma, sigma_next = grid[step], grid[step + 1]
        old, one = kernel(x, v, sigma, sigma_next), torch.ones(1, dtype=torch.float64)

        def loss(velocity: Tensor, old: Transition = old, sigma: Tensor = sigma, sigma_next: Tensor = sigma_next,
                 one: Tensor = one) -> Tensor:  # fmt: skip
            rows = Scored(
                log_ratio=one * 0, advantage=one, clip_low=one, clip_high=one,
                new=kernel(x, velocity, sigma, sigma_next), old_mean=old.mean, produced=old.mean + old.std * xi,
                step_size=float(sigma - sigma_next), sensitivity=kernel_sensitivity(kernel, sigma, sigma_next),
            )  # fmt: skip
            return Guard()(rows)

        # c is negative, so the sign of -A c / |c| is that of A.
        assert torch.allclose(gradient(loss, v), xi / 4, atol=1e-7)


def test_dppo_leaves_out_rows_that_are_far_and_move_on() -> None:
    far, near = double([[0.02, 0.02]]), double([[1e-5, 1e-5]])
    up = torch.ones(1, 2, dtype=torch.float64)
    means = torch.cat([far, far, far, far, near, near])
    xi = torch.cat([up, up, -up, -up, up, -up])  # ratio above 1, above, below, below, above, below
    rows = scored(means, advantage=[1.0, -1.0, 1.0, -1.0, 1.0, -1.0], xi=xi, std=0.1)
    ratio = rows.log_ratio.exp()
    assert (ratio > 1).tolist() == [True, True, False, False, True, False]
    loss = Dppo()(rows)
    left_out = [True, False, False, True, False, False]
    assert torch.equal(loss, torch.where(torch.tensor(left_out), 0.0, -rows.advantage * ratio))
    # |mean difference| .02 at std .1 is a KL of .02 per dimension; the threshold itself counts as far.
    assert float(Dppo(threshold=0.0199)(rows)[0]) == 0.0
    assert float(Dppo(threshold=0.0201)(rows)[0]) == pytest.approx(-float(ratio[0]))


def test_reinforce_has_the_value_of_the_advantage_and_its_gradient() -> None:
    means = torch.cat([DRIFT, 100 * DRIFT])
    rows = scored(means, advantage=[2.0, -3.0])
    assert OBJECTIVES["reinforce"].options()(rows).tolist() == [-2.0, 3.0]
    found = gradient(lambda mean: OBJECTIVES["reinforce"].options()(scored(mean, advantage=[2.0, -3.0])), means)
    weighted = finite_difference(lambda m: -scored(m, advantage=[2.0, -3.0]).log_ratio * double([2.0, -3.0]), means)
    assert torch.allclose(found, weighted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "options"), [("clip", {}), ("guard", {"delta": "published"}), ("dppo", {"threshold": 5e-5})]
)
def test_gradients_against_finite_differences(name: str, options: dict[str, Any]) -> None:
    means = torch.cat([DRIFT, -2 * DRIFT, 40 * DRIFT])

    def loss(mean: Tensor) -> Tensor:
        return OBJECTIVES[name].options(**options)(scored(mean, advantage=[1.0, -0.5, 2.0], clip=0.01))

    assert torch.allclose(gradient(loss, means), finite_difference(loss, means), rtol=1e-6, atol=1e-8)
    assert not torch.equal(gradient(loss, means)[:2], torch.zeros(2, 4, dtype=torch.float64))


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_before_the_first_update_every_objective_is_minus_the_advantage(name: str) -> None:
    rows = scored(torch.zeros(2, 4, dtype=torch.float64), advantage=[1.5, -0.25], clip=1e-6)
    options = {"delta": "none"} if name == "guard" else {}
    assert OBJECTIVES[name].options(**options)(rows).tolist() == [-1.5, 0.25]


def test_objectives_refuse_what_they_cannot_use() -> None:
    rows = scored(DRIFT, advantage=[1.0])
    values = {name: getattr(rows, name) for name in rows.__slots__}
    for name in ("guard", "dppo"):
        assert OBJECTIVES[name].needs_old_mean
        with pytest.raises(ValueError, match="old_mean"):
            OBJECTIVES[name].options()(Scored(**values | {"old_mean": None}))
        with pytest.raises(ValueError, match="std 0"):
            OBJECTIVES[name].options()(Scored(**values | {"new": Transition(DRIFT, double(0.0))}))
    with pytest.raises(ValueError, match="threshold"):
        Dppo(threshold=0.0)(rows)
    for wrong in ({"advantage": torch.zeros(2)}, {"produced": torch.zeros(1, 3)}, {"old_mean": torch.zeros(2, 4)}):
        with pytest.raises(ValueError, match="one shape"):
            Scored(**values | wrong)
    for number in ({"step_size": 0.0}, {"sensitivity": 0.0}):
        with pytest.raises(ValueError, match="sensitivity"):
            Scored(**values | number)


# ---- sequence ratios -------------------------------------------------------------------------------------------------

STEPS = double([0.30, -0.10, -0.14])


def coefficients(
    log_ratio: Tensor, advantage: Tensor, sample: Tensor | None = None, clip: float = 0.2, **options: Any
) -> tuple[Tensor, Tensor]:
    ranges = torch.full_like(log_ratio, clip)
    sample = torch.zeros(len(log_ratio), dtype=torch.long) if sample is None else sample
    return sequence_coefficients(log_ratio, sample, advantage, ranges, ranges, **options)


def test_sequence_ratio_worked_values() -> None:
    assert STEPS.exp().tolist() == pytest.approx([1.349859, 0.904837, 0.869358], abs=5e-7)
    coefficient, loss = coefficients(STEPS, torch.ones_like(STEPS))
    assert loss.tolist() == pytest.approx([-1.020201] * 3, abs=5e-7)
    assert coefficient.tolist() == pytest.approx([-1.020201] * 3, abs=5e-7)
    _, mixed = coefficients(STEPS, torch.ones_like(STEPS), kind="mixed")
    assert mixed.tolist() == pytest.approx([-1.110101, -0.962519, -0.944780], abs=1e-6)


def whole_objective(log_ratio: Tensor, sample: Tensor, advantage: Tensor, clip: float, kind: str) -> Tensor:
    """Sum over rows, written out sample by sample as in the papers."""
    total = log_ratio.new_zeros(())
    for number in sample.unique().tolist():
        rows = [int(i) for i in (sample == number).nonzero().flatten()]
        s = sum((log_ratio[i] for i in rows), start=log_ratio.new_zeros(())).div(len(rows)).exp()
        for i in rows:
            a, rho = advantage[i], log_ratio[i].exp()
            sequence = torch.minimum(a * s, a * s.clamp(1 - clip, 1 + clip))
            step = torch.minimum(a * rho, a * rho.clamp(1 - clip, 1 + clip))
            total = total - (sequence if kind == "sequence" else (step + sequence) / 2)
    return total


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 3), st.floats(-0.5, 0.5), st.floats(-2, 2)), min_size=1, max_size=8),
    kind=st.sampled_from(["sequence", "mixed"]),
)
def test_coefficients_are_the_gradient_of_the_whole_loss(rows: list[tuple[int, float, float]], kind: str) -> None:
    sample = torch.tensor([10 * row[0] for row in rows])
    log_ratio = double([row[1] for row in rows]).requires_grad_()
    advantage = double([row[2] for row in rows])
    if kind == "sequence":
        advantage = sample.double() / 10 - 1.5
    ranges = torch.full_like(advantage, 0.1)
    picked: Any = kind
    coefficient, loss = sequence_coefficients(log_ratio, sample, advantage, ranges, ranges, picked)
    whole = whole_objective(log_ratio, sample, advantage, 0.1, kind)
    (expected,) = torch.autograd.grad(whole, log_ratio)
    assert torch.allclose(coefficient, expected, atol=1e-12)
    assert float(loss.sum()) == pytest.approx(float(whole.detach()), abs=1e-12)
    assert not coefficient.requires_grad
    assert not loss.requires_grad


@pytest.mark.parametrize("kind", ["sequence", "mixed"])
def test_on_policy_coefficients_are_minus_the_advantage(kind: str) -> None:
    sample, advantage = torch.tensor([4, 0, 4, 2]), torch.tensor([1.0, -2.0, 1.0, 0.5])
    coefficient, loss = coefficients(torch.zeros(4), advantage, sample, clip=0.0, kind=kind)
    torch.testing.assert_close(coefficient, -advantage)
    torch.testing.assert_close(loss, -advantage)


def test_sequence_ratios_refuse_step_credit_and_shared_transitions() -> None:
    zero, one = torch.zeros(2), torch.ones(2)
    with pytest.raises(ValueError, match="differs within a sample"):
        coefficients(zero, torch.tensor([1.0, 2.0]))
    with pytest.raises(ValueError, match="several paths"):
        coefficients(zero, one, torch.tensor([0, -1]))
    with pytest.raises(ValueError, match="one shape"):
        coefficients(zero, torch.ones(1))
    with pytest.raises(ValueError, match="kind"):
        coefficients(zero, one, kind="token")


# ---- whose gradient is cut -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(name for name, objective in OBJECTIVES.items() if objective.cut))
def test_a_row_is_cut_where_it_has_no_gradient(name: str) -> None:
    """Whatever an objective calls cut, its loss is flat there, and nowhere else."""
    objective = OBJECTIVES[name]
    scale = torch.tensor([0.0, 0.2, 1.0, 5.0, -0.2, -1.0, -5.0, 20.0, -20.0], dtype=torch.float64)
    mean = (scale[:, None] * DRIFT).requires_grad_()
    for sign in (1.0, -1.0):
        rows = scored(mean, advantage=[sign] * len(scale), clip=1e-3)
        (slope,) = torch.autograd.grad(objective.options()(rows).sum(), mean, retain_graph=True)
        cut = objective.options().cut(rows)
        assert cut.any()
        assert not cut.all()
        assert torch.equal(cut, slope.abs().sum(1) == 0)


def test_the_range_of_guard_is_one_of_its_own_ratio() -> None:
    """log r^ is the standard deviation times the log-ratio per dimension: inside where the plain ratio is outside."""
    rows = scored(DRIFT, advantage=[1.0], clip=0.002)
    assert bool(OBJECTIVES["clip"].options().cut(rows))
    assert not bool(OBJECTIVES["guard"].options().cut(rows))
    assert (OBJECTIVES["dppo"].cut, OBJECTIVES["reinforce"].cut) == ("masked_fraction", "")


def test_rows_that_ratios_of_whole_paths_cut() -> None:
    log_ratio, sample = double([0.1, -0.3, 0.0, 0.3]), torch.tensor([0, 0, 1, 1])
    advantage, low = double([1.0, 1.0, 1.0, 1.0]), torch.full((4,), 0.05, dtype=torch.float64)
    columns = (log_ratio, sample, advantage, low, low)
    assert sequence_cut(*columns).tolist() == [0.0, 0.0, 1.0, 1.0]  # means -0.1 and 0.15
    assert sequence_cut(*columns, kind="mixed").tolist() == [0.5, 0.0, 0.5, 1.0]
    assert sequence_cut(log_ratio, sample, -advantage, low, 10 * low).tolist() == [1.0, 1.0, 0.0, 0.0]
