"""DDIM steps of diffusion models against worked numbers, closed forms and diffusers' scheduler."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flowrl.samplers import (
    PREDICTIONS,
    DiffusionSchedule,
    ddim,
    gaussian_kl,
    gaussian_log_prob,
    leading_schedule,
    scaled_linear_alpha_bar,
)

X = torch.tensor([[0.30, -1.20, 0.75, 2.00]], dtype=torch.float64)
OUTPUT = torch.tensor([[0.1, -0.8, 0.5, 1.1]], dtype=torch.float64)
V_OUTPUT = torch.tensor([[-0.296415, 0.422888, -0.264305, -1.149763]], dtype=torch.float64)
CLEAN = torch.tensor([[0.409709, -0.98936, 0.61835, 2.027796]], dtype=torch.float64)
X_NEXT = torch.tensor([[0.28, -1.15, 0.73, 1.95]], dtype=torch.float64)
MEAN, SPREAD = 1.5, 0.5  # of Gaussian data


def level(timestep: int) -> float:
    """alpha_bar of SD 1.x by plain multiplication."""
    low, high, product = math.sqrt(0.00085), math.sqrt(0.012), 1.0
    for t in range(timestep + 1):
        product *= 1 - (low + (high - low) * t / 999) ** 2
    return product


def test_schedule_of_stable_diffusion() -> None:
    schedule = leading_schedule(50)
    assert schedule.num_steps == 50
    assert schedule.timestep.tolist() == list(range(981, 0, -20))
    assert schedule.timestep.dtype == torch.float32
    states = [*range(981, 0, -20), 0]  # the last step is clamped: from 1 to 0
    assert schedule.alpha_bar.tolist() == pytest.approx([level(t) for t in states], rel=1e-12)
    assert float(schedule.alpha_bar[-1]) == pytest.approx(0.999150, abs=5e-7)
    table = scaled_linear_alpha_bar()
    assert float(table[501]) == pytest.approx(0.2749991, abs=5e-8)
    assert float(table[481]) == pytest.approx(0.3022957, abs=5e-8)


@pytest.mark.parametrize("num_steps", [1, 7, 10, 30, 50, 999])
def test_schedule_agrees_with_plain_rule(num_steps: int) -> None:
    schedule = leading_schedule(num_steps)
    stride = 1000 // num_steps
    wanted = [1 + stride * i for i in reversed(range(num_steps))]
    assert schedule.timestep.tolist() == wanted
    table = scaled_linear_alpha_bar()
    follows = [max(t - stride, 0) for t in wanted]
    assert follows[:-1] == wanted[1:]  # each step leads to where the next one starts
    assert float(schedule.alpha_bar[-1]) == float(table[follows[-1]])


@pytest.mark.parametrize(("prediction", "output"), [("epsilon", OUTPUT), ("v", V_OUTPUT), ("clean", CLEAN)])
def test_worked_step(prediction: str, output: Tensor) -> None:
    step = ddim(X, output, level(501), level(481), 1.0, prediction)  # type: ignore[arg-type]
    wanted = torch.tensor([[0.303418, -1.169197, 0.730748, 1.974606]], dtype=torch.float64)
    torch.testing.assert_close(step.mean, wanted, rtol=0, atol=2e-6)  # outputs and means are given to 6 decimals
    assert float(step.std) == pytest.approx(0.2947845403, abs=6e-11)
    if prediction == "epsilon":
        assert float(gaussian_log_prob(X_NEXT, step)) / 4 == pytest.approx(0.3003813039, abs=6e-11)


@pytest.mark.parametrize(
    ("timestep", "std"),
    [(981, 0.454463), (501, 0.294785), (201, 0.184892), (41, 0.099887), (21, 0.039480), (1, 0.020648)],
)
def test_ancestral_std(timestep: int, std: float) -> None:
    # The list belongs to t -> t - 20 with the clamp at 0.
    step = ddim(X, OUTPUT, level(timestep), level(max(timestep - 20, 0)))
    assert float(step.std) == pytest.approx(std, abs=6e-7)


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_perfect_prediction_stays_on_the_path(prediction: str) -> None:
    """With eta 0 and the true noise and data, a step leads to the same pair at the next level."""
    clean, noise = X, OUTPUT
    a, a_next = 0.3, 0.6
    x = math.sqrt(a) * clean + math.sqrt(1 - a) * noise
    output = {"epsilon": noise, "clean": clean, "v": math.sqrt(a) * noise - math.sqrt(1 - a) * clean}[prediction]
    step = ddim(x, output, a, a_next, 0.0, prediction)  # type: ignore[arg-type]
    wanted = math.sqrt(a_next) * clean + math.sqrt(1 - a_next) * noise
    torch.testing.assert_close(step.mean, wanted, rtol=0, atol=1e-14)
    assert float(step.std) == 0


@pytest.mark.parametrize(("eta", "wanted"), [(0.0, 0.2280404), (1.0, 0.2057368)])
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_gaussian_data_recursion(eta: float, wanted: float, prediction: str) -> None:
    """Variance of the result on data N(1.5, .25), from the exact marginal at t = 981; the mean is kept exactly."""
    schedule = leading_schedule(50)
    variance = float(1 - (1 - SPREAD**2) * schedule.alpha_bar[0])
    for a, a_next in zip(schedule.alpha_bar[:-1], schedule.alpha_bar[1:], strict=True):
        centre = a.sqrt() * MEAN
        x = torch.stack([centre, centre + 1])[:, None]
        marginal = a * SPREAD**2 + 1 - a
        noise = (1 - a).sqrt() / marginal * (x - centre)
        clean = MEAN + a.sqrt() * SPREAD**2 / marginal * (x - centre)
        output = {"epsilon": noise, "clean": clean, "v": a.sqrt() * noise - (1 - a).sqrt() * clean}[prediction]
        step = ddim(x, output, a, a_next, eta, prediction)  # type: ignore[arg-type]
        at_centre, above = step.mean[:, 0].tolist()
        assert at_centre == pytest.approx(float(a_next.sqrt()) * MEAN, abs=1e-11)
        variance = (above - at_centre) ** 2 * variance + float(step.std) ** 2
    assert variance == pytest.approx(wanted, abs=6e-8)
    end = float(schedule.alpha_bar[-1])
    assert math.sqrt(end) * MEAN == pytest.approx(1.4993624, abs=6e-8)
    assert end * SPREAD**2 + 1 - end == pytest.approx(0.2506375, abs=6e-8)


@pytest.mark.parametrize("eta", [0.0, 0.4, 1.0])
def test_variance_preserved(eta: float) -> None:
    """Coefficient of the noise and std square to 1 - alpha_bar_next: clean 0, noise 1 is x = sqrt(1 - A), output 1."""
    a = torch.tensor([0.0047, 0.3, 0.9, 0.99], dtype=torch.float64)
    a_next = torch.tensor([0.0059, 0.5, 0.99, 1.0], dtype=torch.float64)
    step = ddim((1 - a).sqrt()[:, None], torch.ones(4, 1).double(), a, a_next, eta)
    assert step.std.shape == (4, 1)
    torch.testing.assert_close(step.mean**2 + step.std**2, (1 - a_next)[:, None], rtol=0, atol=1e-14)


def test_level_zero_for_models_that_start_from_pure_noise() -> None:
    """Rescaled schedules begin at alpha_bar 0, where v is minus the data."""
    by_v, by_clean = ddim(X, -CLEAN, 0.0, 0.2, 1.0, "v"), ddim(X, CLEAN, 0.0, 0.2, 1.0, "clean")
    torch.testing.assert_close(by_v.mean, math.sqrt(0.2) * CLEAN, rtol=0, atol=1e-14)  # all noise drawn afresh
    torch.testing.assert_close(by_clean.mean, by_v.mean, rtol=0, atol=1e-14)
    assert float(by_v.std) == pytest.approx(math.sqrt(0.8), abs=1e-15)
    kept = ddim(X, CLEAN, 0.0, 0.2, 0.0, "clean")
    torch.testing.assert_close(kept.mean, math.sqrt(0.2) * CLEAN + math.sqrt(0.8) * X, rtol=0, atol=1e-14)


def test_levels_as_numbers_or_one_a_sample_agree_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    x, output = torch.randn(2, 50, 3, 4, 4, generator=generator)
    schedule = leading_schedule(50)
    a, a_next = schedule.alpha_bar[:-1], schedule.alpha_bar[1:]
    batch = ddim(x, output, a, a_next)
    assert batch.std.shape == (50, 1, 1, 1)
    assert batch.mean.dtype == torch.float32
    for i in (0, 17, 49):
        one = ddim(x[i : i + 1], output[i : i + 1], float(a[i]), a_next[i])
        assert torch.equal(one.mean[0], batch.mean[i])
        assert torch.equal(one.std, batch.std[i, 0, 0, 0])
    low = ddim(x.bfloat16(), output.bfloat16(), a, a_next)
    assert low.mean.dtype == torch.float32


def test_gradient_of_the_density_against_finite_differences() -> None:
    output = OUTPUT.clone().requires_grad_()
    for prediction in PREDICTIONS:

        def log_prob(out: Tensor, rule: str = prediction) -> Tensor:
            return gaussian_log_prob(X_NEXT, ddim(X, out, 0.3, 0.35, 0.7, rule)).sum()  # type: ignore[arg-type]

        assert torch.autograd.gradcheck(log_prob, (output,), eps=1e-6, atol=1e-7)


def test_divergence_of_two_outputs() -> None:
    """KL = (d mean / d output)^2 |difference|^2 / (2 std^2), with the sensitivity of a noise prediction by hand."""
    a, a_next, difference = 0.3, 0.35, 0.01
    new, reference = ddim(X, OUTPUT + difference, a, a_next), ddim(X, OUTPUT, a, a_next)
    variance = (1 - a_next) / (1 - a) * (1 - a / a_next)
    slope = math.sqrt(1 - a_next - variance) - math.sqrt(a_next) * math.sqrt(1 - a) / math.sqrt(a)
    assert float(gaussian_kl(new, reference)) == pytest.approx(
        4 * (slope * difference) ** 2 / (2 * variance), rel=1e-10
    )


def test_step_without_noise_is_refused_for_scoring() -> None:
    flat = leading_schedule(50, steps_offset=0)  # timesteps 980 .. 0: the last step starts where it ends
    assert flat.timestep[-1] == 0
    last = ddim(X, OUTPUT, flat.alpha_bar[-2], flat.alpha_bar[-1])
    assert float(last.std) == 0
    torch.testing.assert_close(last.mean, X, rtol=0, atol=1e-14)
    for step in (last, ddim(X, OUTPUT, 0.3, 0.5, 0.0), ddim(X, OUTPUT, 0.3, 1.0)):
        with pytest.raises(ValueError, match="std 0"):
            gaussian_log_prob(X_NEXT, step)


def test_ddim_refuses() -> None:
    for a, a_next in [(0.5, 0.4), (-0.1, 0.4), (0.5, 1.1), (1.0, 1.0), (0.0, 0.0), (math.nan, 0.4)]:
        with pytest.raises(ValueError, match="alpha_bar"):
            ddim(X, OUTPUT, a, a_next, 1.0, "v")
    with pytest.raises(ValueError, match="noise alone"):
        ddim(X, OUTPUT, 0.0, 0.4)
    for eta in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="eta must lie"):
            ddim(X, OUTPUT, 0.3, 0.4, eta)
    with pytest.raises(ValueError, match="choose one of epsilon, v, clean"):
        ddim(X, OUTPUT, 0.3, 0.4, 1.0, "sample")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shape of x"):
        ddim(X, OUTPUT[:, :1], 0.3, 0.4)
    with pytest.raises(ValueError, match="one value a sample"):
        ddim(X, OUTPUT, torch.full((4,), 0.3), 0.4)


def test_schedules_refuse() -> None:
    for num_steps in (0, 1001):
        with pytest.raises(ValueError, match=r"1 \.\. 1000"):
            leading_schedule(num_steps)
    for offset in (-1, 1000):
        with pytest.raises(ValueError, match="steps_offset"):
            leading_schedule(50, steps_offset=offset)
    with pytest.raises(ValueError, match="beta_start"):
        scaled_linear_alpha_bar(1000, 0.02, 0.01)
    with pytest.raises(ValueError, match="rise"):
        DiffusionSchedule(alpha_bar=torch.tensor([0.5, 0.4]), timestep=torch.tensor([1.0]))
    with pytest.raises(ValueError, match=r"\[T\+1\]"):
        DiffusionSchedule(alpha_bar=torch.tensor([0.5, 0.6]), timestep=torch.tensor([1.0, 0.0]))
