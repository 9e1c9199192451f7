"""Transition kernels, densities and divergences against closed forms, torch.distributions and worked numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl.samplers import KERNELS, Transition, gaussian_log_prob
from flowrl.samplers.parametrization import noise_from_velocity
from flowrl.samplers.schedules import diffusers_sigmas, dynamic_sigmas, linspace_sigmas, unipc_flow_sigmas

X = torch.tensor([[0.30, -1.20, 0.75, 2.00]], dtype=torch.float64)
V = torch.tensor([[-0.40, 0.90, -0.10, 1.50]], dtype=torch.float64)
X_NEXT = torch.tensor([[0.40, -1.35, 0.70, 1.65]], dtype=torch.float64)
SIGMA, SIGMA_NEXT = 0.8, 0.7

# kernel: mean, std, and the mean over dimensions of the Gaussian log-density.
STEPS: dict[str, tuple[list[float], float, float]] = {
    "ode": ([0.34, -1.29, 0.76, 1.85], 0.0, math.nan),
    "flow_sde": ([0.31305, -1.16505, 0.670575, 1.56825], 0.4427188724, -0.1355695614),
    "dance_sde": ([0.3387625, -1.2842625, 0.75589375, 1.8370625], 0.0948683298, 0.7948276439),
    "cps": ([0.2335886, -0.7966381, 0.4069077, 0.7375174], 0.6657395614, -0.8653094281),
    "ddim_flow": ([0.2758333, -0.9925, 0.5470833, 1.1791667], 0.5685630034, -0.5044401893),
    "wan_sde": ([0.3318899, -1.2523987, 0.7330893, 1.7652128], 0.2428629243, 0.4358483792),
    "dpm_sde": ([0.2758333, -0.9925, 0.5470833, 1.1791667], 0.5685630034, -0.5044401893),
}


def coefficients(name: str, sigma: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """(k, std) of all steps of a grid, read off the kernel with clean = 0 and noise = 1, that is x = s, v = 1."""
    s, s_next = sigma[:-1].double(), sigma[1:].double()
    step = KERNELS[name](s[:, None], torch.ones(len(s), 1).double(), s, s_next, **options)
    return step.mean[:, 0], step.std[:, 0]


@pytest.mark.parametrize("name", KERNELS)
def test_worked_step(name: str) -> None:
    mean, std, per_dim = STEPS[name]
    step = KERNELS[name](X, V, SIGMA, SIGMA_NEXT, sigma_max=0.96)  # the default noise levels are the table's
    torch.testing.assert_close(step.mean, torch.tensor([mean], dtype=torch.float64), rtol=0, atol=6e-8)
    assert float(step.std) == pytest.approx(std, abs=6e-11)
    if std > 0:
        assert float(gaussian_log_prob(X_NEXT, step)) / 4 == pytest.approx(per_dim, abs=6e-11)


def test_worked_flow_details() -> None:
    step = KERNELS["flow_sde"](X, V, SIGMA, SIGMA_NEXT, noise_level=0.7)
    assert float(gaussian_log_prob(X_NEXT, step)) == pytest.approx(-0.5422782457, abs=6e-11)
    per_dim = [float(gaussian_log_prob(X_NEXT[:, i], Transition(step.mean[:, i], step.std))) for i in range(4)]
    assert per_dim == pytest.approx([-0.123405, -0.191380, -0.106327, -0.121167], abs=6e-7)


def test_worked_first_step_is_clamped_at_sigma_max() -> None:
    step = KERNELS["flow_sde"](X, V, 1.0, 0.960129, noise_level=0.7, sigma_max=0.960129)
    wanted = torch.tensor([[0.242448, -0.941884, 0.570237, 1.450194]], dtype=torch.float64)
    torch.testing.assert_close(step.mean, wanted, rtol=0, atol=6e-7)
    assert float(step.std) == pytest.approx(0.7, abs=1e-12)
    assert float(step.std) / math.sqrt(1 - 0.960129) == pytest.approx(3.5056574, abs=6e-7)
    assert float(gaussian_log_prob(X_NEXT, step)) / 4 == pytest.approx(-0.6255651978, abs=6e-7)


def test_clamp_covers_grids_that_start_below_one() -> None:
    sigma = unipc_flow_sigmas(20, 3.0)
    _, std = coefficients("flow_sde", sigma, noise_level=0.7, sigma_max=float(sigma[1]))
    unclamped = 0.7 * math.sqrt(float(sigma[0]) / (1 - float(sigma[0])) * float(sigma[0] - sigma[1]))
    assert unclamped > 5
    assert float(std[0]) == pytest.approx(0.7, rel=0.01)
    # A second sigma that is itself close to 1 is not clamped again, however fine the grid.
    fine = torch.linspace(1, 0, 5001, dtype=torch.float64)
    _, std = coefficients("flow_sde", fine, noise_level=0.7, sigma_max=float(fine[1]))
    s, s_next = fine[1:-1], fine[2:]
    torch.testing.assert_close(std[1:], 0.7 * (s * (s - s_next) / (1 - s)).sqrt())


SD3 = diffusers_sigmas(10, 3.0)
FLUX = dynamic_sigmas(6, 0.63)
DANCE = linspace_sigmas(16, 3.0)
QWEN = dynamic_sigmas(10, 0.538710, terminal=0.02)
WAN = unipc_flow_sigmas(20, 3.0)

# kernel, grid, noise level, steps, and (std, k) of each step
TABLE: list[tuple[str, Tensor, float, list[int], list[tuple[float, float]]]] = [
    ("flow_sde", SD3, 0.7, list(range(10)), [
        (0.700000, 0.715129), (0.742964, 0.625890), (0.536152, 0.700327), (0.445897, 0.674462), (0.391794, 0.610170),
        (0.352797, 0.514161), (0.319070, 0.380341), (0.282007, 0.192512), (0.225360, -0.082400), (0.006278, -0.002207),
    ]),
    ("flow_sde", FLUX, 0.9, list(range(6)), [
        (0.900000, 0.498736), (0.931196, 0.309959), (0.646043, 0.388231), (0.505883, 0.288110), (0.400768, 0.107154),
        (0.288167, -0.152086),
    ]),
    ("flow_sde", QWEN, 1.2, [0, 1, 2, 5, 8, 9], [
        (1.200000, 0.208970), (1.208004, 0.066059), (0.837025, 0.355219), (0.467863, 0.263523), (0.229734, -0.123965),
        (0.024244, -0.014694),
    ]),
    ("dance_sde", DANCE, 0.3, [0, 1, 2, 13, 14, 15], [
        (0.044233, 0.977283), (0.046199, 0.953455), (0.048349, 0.927347), (0.099087, 0.288000), (0.109545, 0.146667),
        (0.122474, -0.045000),
    ]),
    ("cps", SD3, 0.8, [0, 1, 8, 9], [(0.913137, 0.296696), (0.868646, 0.282240), (0.008492, 0.002759), (0.0, 0.0)]),
    ("wan_sde", WAN, 1.0, [0, 10, 19], [(0.128976, 0.974099), (0.146315, 0.695873), (0.049403, -0.008957)]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "sigma", "level", "steps", "wanted"), TABLE)
def test_coefficient_tables(
    name: str, sigma: Tensor, level: float, steps: list[int], wanted: list[tuple[float, float]]
) -> None:
    k, std = coefficients(name, sigma, noise_level=level, sigma_max=float(sigma[1]))
    # Six decimals of a table that was computed from an already rounded grid.
    torch.testing.assert_close(torch.stack([std, k], 1)[steps], torch.tensor(wanted).double(), rtol=0, atol=1.2e-6)


def test_flow_coefficients_in_the_papers_expanded_form() -> None:
    s, s_next, a = 0.8, 0.7, 0.7
    g2, h = a**2 * s / (1 - s), s - s_next
    mean = X * (1 - g2 * h / (2 * s)) - V * (1 + g2 * (1 - s) / (2 * s)) * h
    torch.testing.assert_close(KERNELS["flow_sde"](X, V, s, s_next, noise_level=a).mean, mean, rtol=0, atol=1e-14)
    score = -noise_from_velocity(X, V, s) / s
    dance = X - h * V + 0.3**2 / 2 * score * h
    torch.testing.assert_close(KERNELS["dance_sde"](X, V, s, s_next).mean, dance, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ["flow_sde", "dance_sde", "wan_sde"])
def test_excess_noise(name: str) -> None:
    k, std = coefficients(name, SD3, sigma_max=float(SD3[1]))
    s, s_next = SD3[:-1].double(), SD3[1:].double()
    excess = std**2 * (s - s_next) / s + (std**2 / (2 * s)) ** 2  # std^2 = g^2 h
    torch.testing.assert_close(k**2 + std**2 - s_next**2, excess, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["cps", "ddim_flow", "dpm_sde"])
@pytest.mark.parametrize("level", [0.0, 0.3, 1.0])
def test_coefficients_preserved(name: str, level: float) -> None:
    k, std = coefficients(name, SD3, noise_level=level)
    torch.testing.assert_close(k**2 + std**2, SD3[1:].double() ** 2, rtol=0, atol=1e-14)
    assert float(std[-1]) == 0


@pytest.mark.parametrize("name", ["ddim_flow", "dpm_sde"])
def test_ancestral_ddim_is_sde_dpm_solver(name: str) -> None:
    sigma = SD3[1:-1].double()  # log-SNR is infinite at both ends
    k, std = coefficients(name, sigma, noise_level=1.0)
    log_snr = ((1 - sigma) / sigma).log()
    h = log_snr[1:] - log_snr[:-1]
    torch.testing.assert_close(k, sigma[1:] * (-h).exp(), rtol=0, atol=1e-13)
    torch.testing.assert_close(std, sigma[1:] * (1 - (-2 * h).exp()).sqrt(), rtol=0, atol=1e-13)
    k, std = coefficients("flow_sde", sigma, noise_level=math.sqrt(2))
    torch.testing.assert_close(k, sigma[1:] - (sigma[:-1] - sigma[1:]) / (1 - sigma[:-1]), rtol=0, atol=1e-13)


@pytest.mark.parametrize(("sigma", "after"), [(1.0, 0.75), (0.75, 0.5), (0.5, 0.25), (0.25, 0.0)])
def test_cps_at_full_level_noises_the_predicted_data_again(sigma: float, after: float) -> None:
    """The sampler of consistency models; RTDMD's level is 0.9, by which its first step has a std of 0.7408."""
    step = KERNELS["cps"](X, V, sigma, after, noise_level=1.0)
    torch.testing.assert_close(step.mean, (1 - after) * (X - sigma * V), rtol=0, atol=1e-14)
    assert float(step.std) == pytest.approx(after, abs=1e-15)
    assert float(KERNELS["cps"](X, V, 1.0, 0.75, noise_level=0.9).std) == pytest.approx(0.7408, abs=5e-5)


@pytest.mark.parametrize("name", ["ddim_flow", "dpm_sde"])
def test_full_ancestral_noise_at_both_ends(name: str) -> None:
    """From sigma 1 all noise is drawn afresh; the step to sigma 0 is the predicted data."""
    start = KERNELS[name](X, V, 1.0, 0.9, noise_level=1.0)
    torch.testing.assert_close(start.mean, 0.1 * (X - V), rtol=0, atol=1e-14)
    assert float(start.std) == pytest.approx(0.9, abs=1e-15)
    end = KERNELS[name](X, V, 0.2, 0.0, noise_level=1.0)
    torch.testing.assert_close(end.mean, X - 0.2 * V, rtol=0, atol=1e-14)
    assert float(end.std) == 0


def test_dpm_noise_level_scales_the_diffusion() -> None:
    """Two half steps at level a add up to one whole step if the predicted data stays: exact for constant data."""
    s = torch.tensor([0.8, 0.7, 0.55], dtype=torch.float64)
    k, std = coefficients("dpm_sde", s, noise_level=0.5)
    whole_k, whole_std = coefficients("dpm_sde", s[[0, 2]], noise_level=0.5)
    # From x = sigma * noise the second step maps noise to k / sigma of it.
    assert float(k[0] / s[1] * k[1]) == pytest.approx(float(whole_k), abs=1e-14)
    spread = float(std[1] ** 2 + (k[1] / s[1] * std[0]) ** 2)
    assert spread == pytest.approx(float(whole_std) ** 2, abs=1e-14)
    assert float(k[0]) == pytest.approx(0.6117545928, abs=1e-10)  # .7 q^(1/4), q = .7 / 1.2
    assert float(k[0]) != pytest.approx(float(coefficients("ddim_flow", s, noise_level=0.5)[0][0]), abs=1e-3)


def test_wan_diffusion_is_linear_in_the_level_and_the_bound() -> None:
    for level, bound in [(0.5, 0.9), (2.0, 0.45)]:
        k, std = coefficients("wan_sde", WAN, noise_level=level, sigma_max=bound)
        s, s_next = WAN[:-1].double(), WAN[1:].double()
        g = level * bound * s
        torch.testing.assert_close(std, g * (s - s_next).sqrt(), rtol=0, atol=1e-14)
        torch.testing.assert_close(k, s_next - g**2 * (s - s_next) / (2 * s), rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_noise_is_the_ode(name: str, dtype: torch.dtype) -> None:
    x, v = X.to(dtype), V.to(dtype)
    for sigma, sigma_next in [(1.0, 0.96), (0.8, 0.7), (0.01, 0.0), (1.0, 0.0)]:
        step = KERNELS[name](x, v, sigma, sigma_next, noise_level=0.0)
        assert float(step.std) == 0.0
        assert torch.equal(step.mean, KERNELS["ode"](x, v, sigma, sigma_next).mean)
        torch.testing.assert_close(step.mean, x - (sigma - sigma_next) * v, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["flow_sde", "dance_sde", "wan_sde"])
def test_ode_limit_is_second_order_in_the_noise(name: str) -> None:
    ode = KERNELS["ode"](X, V, SIGMA, SIGMA_NEXT).mean
    errors = [
        float((KERNELS[name](X, V, SIGMA, SIGMA_NEXT, noise_level=a).mean - ode).abs().max()) for a in (0.1, 0.05)
    ]
    assert errors[0] / errors[1] == pytest.approx(4, rel=1e-6)


@pytest.mark.parametrize("name", KERNELS)
def test_one_step_from_noise_to_data(name: str) -> None:
    """A schedule of one step, [1, 0], with sigma_max = 0 as its second sigma."""
    step = KERNELS[name](X, V, 1.0, 0.0, sigma_max=0.0)
    k = {"flow_sde": -(0.7**2) / 2, "dance_sde": -(0.3**2) / 2}.get(name, 0.0)
    std = {"flow_sde": 0.7, "dance_sde": 0.3}.get(name, 0.0)
    torch.testing.assert_close(step.mean, (X - V) + k * X, rtol=0, atol=1e-14)  # at sigma 1 the noise is x itself
    assert float(step.std) == pytest.approx(std, abs=1e-15)


@pytest.mark.parametrize("name", KERNELS)
def test_sigma_as_number_tensor_or_batch_agrees_to_the_bit(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, v = torch.randn(2, 10, 3, 4, 4, generator=generator)
    s, s_next = SD3[:-1], SD3[1:]
    batch = KERNELS[name](x, v, s, s_next, sigma_max=float(SD3[1]))
    assert batch.std.shape == (10, 1, 1, 1)
    for i in range(10):
        for one in (
            KERNELS[name](x[i : i + 1], v[i : i + 1], s[i], s_next[i], sigma_max=SD3[1]),
            KERNELS[name](x[i : i + 1], v[i : i + 1], float(s[i]), float(s_next[i]), sigma_max=float(SD3[1])),
        ):
            assert torch.equal(one.mean[0], batch.mean[i])
            assert torch.equal(one.std.reshape(1, 1, 1), batch.std[i])


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_low_precision_input_is_raised_first(name: str, low: torch.dtype) -> None:
    x, v = X.to(low), V.to(low)
    step = KERNELS[name](x, v, SIGMA, SIGMA_NEXT)
    assert step.mean.dtype == step.std.dtype == torch.float32
    raised = KERNELS[name](x.float(), v.float(), SIGMA, SIGMA_NEXT)
    assert torch.equal(step.mean, raised.mean)
    mixed = KERNELS[name](x.double(), v, SIGMA, SIGMA_NEXT)
    assert mixed.mean.dtype == torch.float64


def test_kernels_refuse() -> None:
    for name, level in [
        *[("cps", 1.2), ("cps", -0.1), ("ddim_flow", 1.01), ("dpm_sde", 1.01)],
        *[("flow_sde", -1.0), ("dance_sde", math.nan), ("wan_sde", math.inf)],
    ]:
        with pytest.raises(ValueError, match="noise_level of " + name):
            KERNELS[name](X, V, SIGMA, SIGMA_NEXT, noise_level=level)
    for name, kernel in KERNELS.items():
        for sigma, sigma_next in [(0.7, 0.8), (0.7, 0.7), (1.1, 0.7), (0.5, -0.1), (math.nan, 0.1)]:
            with pytest.raises(ValueError, match="sigma_next"):
                kernel(X, V, sigma, sigma_next)
        with pytest.raises(ValueError, match="shape of x"):
            kernel(X, V[:, :1], SIGMA, SIGMA_NEXT)
        with pytest.raises(ValueError, match="one value per sample"):
            kernel(X, V, torch.full((4,), 0.8), 0.7)
        assert name in STEPS
    for name in ("flow_sde", "wan_sde"):
        with pytest.raises(ValueError, match="second sigma"):
            KERNELS[name](X, V, 1.0, 0.9, sigma_max=1.0)


@pytest.mark.parametrize("name", ["cps", "ddim_flow", "dpm_sde"])
def test_a_batch_with_one_silent_step_is_refused_a_density(name: str) -> None:
    x = torch.ones(2, 3)
    transition = KERNELS[name](x, x, torch.tensor([0.8, 0.5]), torch.tensor([0.5, 0.0]))
    assert transition.std.flatten().tolist()[1] == 0 < transition.std.flatten().tolist()[0]
    with pytest.raises(ValueError, match="no density"):
        gaussian_log_prob(x, transition)
