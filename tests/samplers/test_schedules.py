"""Sigma grids against published numbers and against diffusers' own schedulers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flowrl.samplers import build_schedule
from flowrl.samplers.schedules import (
    diffusers_sigmas,
    dynamic_mu,
    dynamic_sigmas,
    linspace_sigmas,
    shift_sigma,
    unipc_flow_sigmas,
)
from flowrl.trajectory import Schedule

SD3 = {"shift": 3.0, "num_train_timesteps": 1000, "use_dynamic_shifting": False}
QWEN = {"num_train_timesteps": 1000, "use_dynamic_shifting": True, "shift_terminal": 0.02, "shift": 1.0}

# Grids to six decimals: (grid, first values, last values before 0). An ellipsis in the source cuts the long ones.
REFERENCE = {
    "sd3_10": (
        diffusers_sigmas(10, 3.0),
        [1, 0.960129, 0.913349, 0.857692, 0.790368, 0.707278, 0.602151, 0.464876, 0.278049, 0.008929],
        [],
    ),
    "sd3_40": (diffusers_sigmas(40, 3.0), [1, 0.991331, 0.982356], [0.146509, 0.081046, 0.008929]),
    "linspace_10": (
        linspace_sigmas(10, 3.0),
        [1, 0.964286, 0.923077, 0.875, 0.818182, 0.75, 0.666667, 0.5625, 0.428571, 0.25],
        [],
    ),
    "flux_6": (dynamic_sigmas(6, 0.63), [1, 0.903736, 0.789705, 0.652489, 0.484218, 0.273003], []),
    "flux_28": (dynamic_sigmas(28, 0.63), [1, 0.980656, 0.960644], [0.183882, 0.126204, 0.065020]),
    "qwen_10": (
        dynamic_sigmas(10, 0.538710, terminal=0.02),
        [1, 0.928970, 0.851485, 0.766624, 0.673281, 0.570117, 0.455497, 0.327400, 0.183301, 0.02],
        [],
    ),
    "qwen_unstretched": (
        dynamic_sigmas(10, 0.538710),
        [1, 0.939114, 0.872695, 0.799954, 0.719942, 0.631512, 0.533262, 0.423459, 0.299940, 0.159961],
        [],
    ),
    "dance_16": (
        linspace_sigmas(16, 3.0),
        [1, 0.978261, 0.954545, 0.928571, 0.9, 0.868421, 0.833333, 0.794118],
        [0.75, 0.7, 0.642857, 0.576923, 0.5, 0.409091, 0.3, 0.166667],
    ),
    "dance_16_shift_5": (linspace_sigmas(16, 5.0), [1, 0.986842, 0.972222], [0.416667, 0.25]),
    "mix_25": (
        linspace_sigmas(25, 3.0),
        [
            float(number)
            for number in (
                "1 .986301 .971831 .956522 .940299 .923077 .904762 .885246 .864407 .842105 .818182 .792453 .764706 "
                ".734694 .702128 .666667 .627907 .585366 .538462 .486486"
            ).split()
        ],
        [0.428571, 0.363636, 0.290323, 0.206897, 0.111111],
    ),
    "wan_20": (unipc_flow_sigmas(20, 3.0), [0.999666, 0.982420, 0.963941, 0.944094], [0.249792, 0.136240]),
}


@pytest.mark.parametrize("name", REFERENCE)
def test_reference_grids(name: str) -> None:
    sigma, first, last = REFERENCE[name]
    assert sigma[-1] == 0
    assert bool((sigma[1:] < sigma[:-1]).all())
    torch.testing.assert_close(sigma[: len(first)], torch.tensor(first), rtol=0, atol=6e-7)  # six decimals
    if last:
        torch.testing.assert_close(sigma[-len(last) - 1 : -1], torch.tensor(last), rtol=0, atol=6e-7)


def test_shift_composes() -> None:
    u = torch.linspace(0, 1, 11, dtype=torch.float64)
    torch.testing.assert_close(shift_sigma(u, 1.0), u, rtol=0, atol=0)
    torch.testing.assert_close(shift_sigma(shift_sigma(u, 3.0), 3.0), shift_sigma(u, 9.0), rtol=0, atol=1e-15)


@pytest.mark.parametrize("num_steps", [1, 2, 7, 40])
def test_grid_names_differ_only_as_documented(num_steps: int) -> None:
    twice, once = (build_schedule(SD3, num_steps, grid=grid) for grid in ("diffusers", "linspace"))
    assert twice.num_steps == once.num_steps == num_steps
    assert float(twice.sigma[0]) == float(once.sigma[0]) == 1.0
    if num_steps > 1:  # the doubly shifted grid ends at S_3(S_3(1/1000)) = S_9(1/1000) whatever the number of steps
        assert float(twice.sigma[-2]) == pytest.approx(9e-3 / (1 + 8e-3), abs=1e-8)
        assert float(once.sigma[-2]) == pytest.approx(3 / (num_steps + 2), abs=1e-7)
    assert torch.equal(twice.timestep, 1000 * twice.sigma[:-1])
    assert twice.sigma_max == float(twice.sigma[1])


def test_dynamic_mu() -> None:
    assert dynamic_mu(32 * 32) == pytest.approx(0.63)
    assert dynamic_mu(45 * 45) == pytest.approx(0.799440, abs=1e-6)
    assert dynamic_mu(64 * 64) == pytest.approx(1.15)
    assert dynamic_mu(32 * 32, max_shift=0.9, max_tokens=8192) == pytest.approx(0.538710, abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "num_steps"),
    [(kind, n) for kind in ("static", "dynamic", "terminal") for n in (1, 6, 10, 40) if (kind, n) != ("terminal", 1)],
)
@pytest.mark.parametrize("grid", ["diffusers", "linspace"])
def test_equals_diffusers_scheduler(kind: str, grid: str, num_steps: int) -> None:
    diffusers = pytest.importorskip("diffusers.schedulers.scheduling_flow_match_euler_discrete")
    options: dict[str, Any] = {"num_train_timesteps": 1000, "shift": 3.0}
    if kind != "static":
        options |= {"use_dynamic_shifting": True, "shift": 1.0, "base_shift": 0.5, "max_shift": 0.9}
    if kind == "terminal":
        options |= {"shift_terminal": 0.02}
    mu = None if kind == "static" else 0.63
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**options)
    explicit = torch.linspace(1, 1 / num_steps, num_steps).tolist() if grid == "linspace" else None
    scheduler.set_timesteps(None if explicit else num_steps, sigmas=explicit, mu=mu)
    ours = build_schedule(dict(scheduler.config), num_steps, grid=grid, mu=mu)
    # With the scheduler's own grid the numbers are the same bits; explicit sigmas are rounded twice over there.
    tolerance = 0.0 if explicit is None and kind != "terminal" else 2.5e-7
    torch.testing.assert_close(ours.sigma, scheduler.sigmas, rtol=0, atol=tolerance)
    torch.testing.assert_close(ours.timestep, scheduler.timesteps, rtol=0, atol=1000 * tolerance)


def test_unipc_builder_truncates_timesteps() -> None:
    schedule = build_schedule({"flow_shift": 3.0}, 20, grid="unipc_flow")
    assert float(schedule.sigma[0]) == pytest.approx(0.999666, abs=6e-7)
    assert schedule.timestep[:3].tolist() == [999.0, 982.0, 963.0]
    s = float(schedule.sigma[0])
    assert math.sqrt(s / (1 - s)) == pytest.approx(54.74, abs=0.03)  # why the start needs a clamp near 1, not at 1


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (SD3, {"grid": "karras"}, "diffusers, linspace"),
        (QWEN, {}, "mu=dynamic_mu"),
        (SD3, {"mu": 0.6}, "use_dynamic_shifting"),
        ({**SD3, "use_karras_sigmas": True}, {}, "use_karras_sigmas"),
        ({**QWEN, "time_shift_type": "linear"}, {"mu": 0.6}, "time_shift_type"),
        ({**SD3, "shift": -1.0}, {}, "positive"),
        ({**SD3, "shift": "3"}, {}, "must be a number"),
    ],
)
def test_builder_refuses(config: dict[str, object], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_schedule(config, 10, **options)


def test_refuses_impossible_step_counts() -> None:
    with pytest.raises(ValueError, match="at least one step"):
        build_schedule(SD3, 0)
    with pytest.raises(ValueError, match="at least one step"):
        build_schedule(SD3, 0, grid="linspace")
    with pytest.raises(ValueError, match="stretched"):
        build_schedule(QWEN, 1, mu=0.6)


@pytest.mark.parametrize("sigma", [[1.0, 0.5, 0.5, 0.0], [1.0, 0.5], [1.2, 0.0], [0.0]])
def test_schedule_refuses(sigma: list[float]) -> None:
    with pytest.raises(ValueError, match=r"decrease|T >= 1"):
        Schedule(sigma=torch.tensor(sigma), timestep=torch.ones(len(sigma) - 1))
