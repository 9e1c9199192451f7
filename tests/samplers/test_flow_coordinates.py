"""Diffusion models as flow models: closed forms, inverses, DDIM's Gaussians, diffusers' own tables and timesteps."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler
from torch import Tensor

from flowrl.runtime.randomness import counter_normal
from flowrl.samplers import KERNELS
from flowrl.samplers.flow_coordinates import (
    PredictionType,
    alpha_bars,
    diffusion_schedule,
    diffusion_timesteps,
    flow_levels,
    flow_sigma,
    prediction_of,
    sigma_at,
    timestep_at,
    velocity_from_prediction,
    vp_scale,
)

SD1: dict[str, Any] = {
    "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1,
    "num_train_timesteps": 1000, "clip_sample": False,
}  # fmt: skip
ZERO_SNR = {**SD1, "rescale_betas_zero_snr": True, "prediction_type": "v_prediction"}
PREDICTIONS: tuple[PredictionType, ...] = ("epsilon", "v_prediction", "sample")


def normal(*key: str) -> Tensor:
    return counter_normal((3, 2, 4), *key).double()


def ddim(x: Tensor, output: Tensor, a: float, a_next: float, eta: float, kind: str) -> tuple[Tensor, float]:
    """Mean and std of a DDIM step (arXiv 2010.02502, eq. 12 and 16) from alpha_bar a to a_next, in float64."""
    x, output = x.double(), output.double()
    signal, share = math.sqrt(a), math.sqrt(1 - a)
    clean = {"epsilon": (x - share * output) / signal, "v_prediction": signal * x - share * output, "sample": output}
    noise = (x - signal * clean[kind]) / share
    std = eta * math.sqrt((1 - a_next) / (1 - a) * (1 - a / a_next))
    return math.sqrt(a_next) * clean[kind] + math.sqrt(max(1 - a_next - std**2, 0)) * noise, std


# ---- levels ----------------------------------------------------------------------------------------------------------


def test_closed_forms_of_the_change_of_coordinates() -> None:
    """At alpha_bar 1/2 both shares are equal; at 16/25 signal and noise are 4/5 and 3/5."""
    a = torch.tensor([1.0, 0.5, 16 / 25, 0.0], dtype=torch.float64)
    torch.testing.assert_close(flow_sigma(a), torch.tensor([0, 0.5, 3 / 7, 1], dtype=torch.float64))
    c = torch.tensor([1, math.sqrt(2), 7 / 5, 1], dtype=torch.float64)
    torch.testing.assert_close(vp_scale(flow_sigma(a)), c)
    clean, noise = normal("clean"), normal("noise")
    for level in (0.9, 0.5, 0.01):
        level_ = torch.tensor(level, dtype=torch.float64)
        sigma = float(flow_sigma(level_))
        vp = math.sqrt(level) * clean + math.sqrt(1 - level) * noise
        torch.testing.assert_close(vp / vp_scale(flow_sigma(level_)), (1 - sigma) * clean + sigma * noise)


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"beta_schedule": "linear", "beta_start": 0.0001, "beta_end": 0.02},
        {"beta_schedule": "squaredcos_cap_v2"},
        {"trained_betas": [0.1, 0.2, 0.3]},
        {"rescale_betas_zero_snr": True, "prediction_type": "v_prediction"},
    ],
    ids=["scaled_linear", "linear", "cosine", "trained", "zero_snr"],
)
def test_tables_are_diffusers(extra: dict[str, Any]) -> None:
    scheduler = DDIMScheduler(**{**SD1, **extra})
    found, wanted = alpha_bars(scheduler.config), scheduler.alphas_cumprod.double()
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=5e-5)  # theirs is a float32 product of 1000 factors
    if "rescale_betas_zero_snr" in extra:
        assert float(found[-1]) == 0


def test_published_numbers_of_stable_diffusion_1() -> None:
    a, levels = alpha_bars(SD1), flow_levels(SD1)
    assert float(a[0]) == pytest.approx(0.99915, abs=1e-9)
    product = np.prod(1 - np.linspace(math.sqrt(0.00085), math.sqrt(0.012), 1000) ** 2)
    assert float(a[-1]) == pytest.approx(product, rel=1e-9)
    assert levels.shape == (1001,)
    assert float(levels[0]) == 0
    # sqrt(.00085) / (sqrt(.99915) + sqrt(.00085)): what is missing of data at timestep 0
    assert float(levels[1]) == pytest.approx(0.0283405, abs=1e-6)
    assert bool((levels[1:] > levels[:-1]).all())


@pytest.mark.parametrize("config", [SD1, ZERO_SNR], ids=["sd1", "zero_snr"])
def test_timesteps_and_levels_are_inverse_and_exact_at_integers(config: dict[str, Any]) -> None:
    levels = flow_levels(config)
    assert torch.equal(sigma_at(torch.arange(-1.0, 1000.0), levels), levels)
    assert torch.equal(timestep_at(levels, levels), torch.arange(-1, 1000).double())
    timestep = torch.linspace(-1, 999, 4321, dtype=torch.float64)
    torch.testing.assert_close(timestep_at(sigma_at(timestep, levels), levels), timestep, atol=1e-9, rtol=0)
    half = sigma_at(torch.tensor([-0.5, 41.5]), levels)
    torch.testing.assert_close(half, torch.stack([levels[1] / 2, (levels[42] + levels[43]) / 2]))
    single = sigma_at(timestep, levels).float()  # what recipes hold
    assert timestep_at(single, levels).dtype == torch.float32
    torch.testing.assert_close(sigma_at(timestep_at(single, levels), levels), single.double(), atol=1e-7, rtol=0)


# ---- predictions and steps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_the_true_prediction_gives_the_true_velocity(prediction: PredictionType) -> None:
    clean, noise = normal("clean"), normal("noise")
    a = torch.tensor([0.9, 0.5, 0.02], dtype=torch.float64)
    signal, share = (root[:, None, None] for root in (a.sqrt(), (1 - a).sqrt()))
    output = {"epsilon": noise, "v_prediction": signal * noise - share * clean, "sample": clean}[prediction]
    sigma = flow_sigma(a)
    x = (1 - sigma)[:, None, None] * clean + sigma[:, None, None] * noise
    torch.testing.assert_close(velocity_from_prediction(x, output, sigma, prediction), noise - clean)
    low = velocity_from_prediction(x.float(), output.bfloat16(), sigma, prediction)
    assert low.dtype == torch.float32


@pytest.mark.parametrize("eta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_steps_in_flow_coordinates_are_ddims(prediction: PredictionType, eta: float) -> None:
    """The same Gaussian divided by c of the next level; eta 0 is the Euler step; any output, not only a true one."""
    table, levels = alpha_bars(SD1), flow_levels(SD1)
    x, output = normal("x").float(), normal("output").float()
    for timestep, following in ((981, 961), (501, 481), (21, 1), (1, -1)):
        a, a_next = float(table[timestep]), float(table[following]) if following >= 0 else 1.0
        mean, std = ddim(x, output, a, a_next, eta, prediction)
        sigma, sigma_next = levels[timestep + 1], levels[following + 1]
        c, c_next = float(vp_scale(sigma)), float(vp_scale(sigma_next))
        flow = x / c
        velocity = velocity_from_prediction(flow, output, sigma, prediction)
        for kernel in ("ddim_flow", *(["ode"] if eta == 0 else [])):
            found = KERNELS[kernel](flow, velocity, sigma, sigma_next, noise_level=eta)
            torch.testing.assert_close(found.mean.double() * c_next, mean, atol=1e-6, rtol=2e-6)
            assert float(found.std) * c_next == pytest.approx(std, abs=1e-6, rel=1e-6)


@pytest.mark.parametrize(
    ("prediction", "output"),
    [
        ("epsilon", [0.1, -0.8, 0.5, 1.1]),
        ("v_prediction", [-0.296415, 0.422888, -0.264305, -1.149763]),
        ("sample", [0.409709, -0.98936, 0.61835, 2.027796]),
    ],
)
def test_worked_step_of_stable_diffusion_1(prediction: PredictionType, output: list[float]) -> None:
    """Ancestral from timestep 501 to 481; mean and std are those of the latent before the division."""
    levels, x = flow_levels(SD1), torch.tensor([[0.30, -1.20, 0.75, 2.00]], dtype=torch.float64)
    sigma, sigma_next = levels[502], levels[482]
    flow, c_next = x / vp_scale(sigma), vp_scale(sigma_next)
    velocity = velocity_from_prediction(flow, torch.tensor([output], dtype=torch.float64), sigma, prediction)
    step = KERNELS["ddim_flow"](flow, velocity, sigma, sigma_next)
    wanted = torch.tensor([[0.303418, -1.169197, 0.730748, 1.974606]], dtype=torch.float64)
    torch.testing.assert_close(step.mean * c_next, wanted, rtol=0, atol=2e-6)  # outputs are given to 6 decimals
    assert float(step.std * c_next) == pytest.approx(0.2947845403, abs=6e-11)


def test_a_schedule_in_float32_steps_as_the_table_does() -> None:
    """Levels of a schedule are rounded once more than those of the conversion; near sigma 1 that must not show."""
    schedule, levels, table = diffusion_schedule(SD1, 20), flow_levels(SD1), alpha_bars(SD1)
    x, output = normal("x").float(), normal("output").float()
    alpha_bar = [float(table[int(timestep)]) for timestep in schedule.timestep] + [1.0]
    for step, (a, a_next) in enumerate(pairwise(alpha_bar)):
        exact = sigma_at(schedule.timestep[step], levels)
        flow = (x / float(vp_scale(exact))).float()
        velocity = velocity_from_prediction(flow, output, exact, "epsilon")
        found = KERNELS["ode"](flow, velocity, schedule.sigma[step], schedule.sigma[step + 1]).mean
        wanted = ddim(x, output, a, a_next, 0.0, "epsilon")[0] / vp_scale(schedule.sigma[step + 1].double())
        torch.testing.assert_close(found.double(), wanted, atol=1e-6, rtol=2e-6)


def test_zero_terminal_snr_starts_at_noise_alone() -> None:
    schedule = diffusion_schedule({**ZERO_SNR, "timestep_spacing": "trailing"}, 4)
    assert schedule.timestep.tolist() == [999, 749, 499, 249]
    assert (float(schedule.sigma[0]), schedule.start_scale) == (1.0, 1.0)
    x, output = normal("x").float(), normal("output").float()
    velocity = velocity_from_prediction(x, output, schedule.sigma[0], "v_prediction")
    torch.testing.assert_close(velocity, output + x)  # noise is x, and v is minus the clean data


# ---- schedules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [1, 2, 7, 20, 30, 50])
@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
def test_timesteps_are_diffusers(spacing: Any, num_steps: int) -> None:
    scheduler = DDIMScheduler(**SD1, timestep_spacing=spacing)
    scheduler.set_timesteps(num_steps)
    assert diffusion_timesteps(num_steps, 1000, spacing, 1) == scheduler.timesteps.tolist()


def test_schedule_of_stable_diffusion_1() -> None:
    """981, 961 ... 1 as DDPO samples, then clean data; standard normal noise divided by c at the start."""
    schedule, a = diffusion_schedule(SD1, 50), alpha_bars(SD1)
    assert schedule.timestep.tolist() == list(range(981, 0, -20))
    assert schedule.sigma.dtype == schedule.timestep.dtype == torch.float32
    assert schedule.sigma.shape == (51,)
    assert float(schedule.sigma[-1]) == 0
    first = float(a[981])
    assert schedule.start_scale == pytest.approx(1 / (math.sqrt(first) + math.sqrt(1 - first)))
    assert float(schedule.sigma[0]) == pytest.approx(math.sqrt(1 - first) * schedule.start_scale)
    assert diffusion_schedule(SD1, 3, grid="linspace").timestep.tolist() == [999, 500, 0]
    assert prediction_of({}) == "epsilon"


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_train_timesteps": 1000, "shift": 3.0}, r"beta_schedule is None.*another family"),
        ({**SD1, "beta_schedule": "sigmoid"}, r"beta_schedule is 'sigmoid'.*scaled_linear"),
        ({**SD1, "clip_sample": True}, r"clip_sample is not supported.*set it to false"),
        ({**SD1, "use_karras_sigmas": True}, r"use_karras_sigmas is not supported"),
        ({**SD1, "prediction_type": "flow_prediction"}, r"prediction_type 'flow_prediction' is not one of epsilon"),
        ({**ZERO_SNR, "prediction_type": "epsilon"}, r"noise alone.*v_prediction"),
    ],
)
def test_schedulers_that_are_not_built_here_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flow_levels(config)


def test_steps_levels_and_predictions_out_of_range_are_refused() -> None:
    levels = flow_levels(SD1)
    with pytest.raises(ValueError, match=r"num_steps must lie in 1 \.\. 1000, the training timesteps, got 1001"):
        diffusion_schedule(SD1, 1001)
    with pytest.raises(ValueError, match=r"timesteps 1 \.\. 1000 leave 0 \.\. 999: steps_offset 1"):
        diffusion_schedule(SD1, 1000)
    with pytest.raises(ValueError, match=r"unknown timestep_spacing 'log'"):
        diffusion_schedule({**SD1, "timestep_spacing": "log"}, 4)
    with pytest.raises(ValueError, match=r"unknown grid 'unipc_flow' of a diffusion model"):
        diffusion_schedule(SD1, 4, grid="unipc_flow")
    for wrong in (0.94, -0.01):
        with pytest.raises(ValueError, match=r"knows noise levels of 0 to 0\.93\d+"):
            timestep_at(torch.tensor([0.5, wrong]), levels)
    with pytest.raises(ValueError, match=r"unknown prediction 'noise'"):
        velocity_from_prediction(normal("x"), normal("y"), 0.5, "noise")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"output must have the shape of x"):
        velocity_from_prediction(normal("x"), normal("y")[:1], 0.5, "epsilon")
