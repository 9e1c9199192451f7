"""Every family with every scheduler of diffusers in its folder: its levels are visited, or it is refused in words."""

from __future__ import annotations

import warnings
from functools import cache
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from flowrl.pipelines import PIPELINES, family
from flowrl.pipelines.generic.stock_levels import Levels
from flowrl.pipelines.shared.stock_schedules import EULER, diffusion_levels

TRAINED: dict[str, Any] = {"num_train_timesteps": 60}
"""Not diffusers' 1000: some classes search a level for each when they are made."""
FLOW = {**TRAINED, "use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}
DIFFUSION = {
    **TRAINED,
    "beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "clip_sample": False, "steps_offset": 1,
    "skip_prk_steps": True, "set_alpha_to_one": False, "snr_shift_scale": 1.0,
}  # fmt: skip
CONFIGS = {"plain": TRAINED, "flow": FLOW} | {
    f"spaced {one}": {**DIFFUSION, "timestep_spacing": one} for one in ("leading", "trailing", "linspace")
}
KINDS = [name for name in sorted(dir(diffusers)) if name.endswith("Scheduler") and not name.startswith("Flax")]
STEPS = 6
DIFFUSERS = ("sd", "sdxl", "cogvideox")
MULTISTEP = (
    "sd3", "sana", "sana_video", "wan", "wan_animate", "wan_vace", "lucy_edit", "hunyuan_video", "hunyuan_video15",
    "ltx_video", "ltx2", "motif_video",
)  # fmt: skip


@cache
def made(kind: str, label: str) -> Any:
    """A scheduler in a configuration."""
    diffusers.utils.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(diffusers, kind).from_config(dict(CONFIGS[label]))


@cache
def stocks() -> dict[tuple[str, str], Any]:
    """Every scheduler in every configuration that it can be made in; that takes seconds, so only for who needs all."""
    found = {}
    for kind in KINDS:
        for label in CONFIGS:
            try:
                found[kind, label] = made(kind, label)
            except (TypeError, ImportError, ValueError, NotImplementedError):  # arguments, a library, other settings
                continue
    return found


def visited(stock: Any) -> list[float]:
    """Shares of noise that a stock scheduler visits, each once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock.set_timesteps(STEPS)
    times = np.asarray(stock.timesteps, dtype=np.float64)
    once = [i for i in range(len(times)) if i == 0 or times[i] != times[i - 1]]
    if isinstance(vars(stock).get("sigmas"), torch.Tensor) and len(stock.sigmas) == len(times) + 1:
        sigma = stock.sigmas.double().numpy()[once]
        flow = type(stock).__name__.startswith("FlowMatch") or stock.config.get("use_flow_sigmas")
        return list(sigma if flow else sigma / (1 + sigma))
    a = np.asarray(stock.alphas_cumprod, dtype=np.float64)[times[once].astype(int)]
    return list(np.sqrt(1 - a) / (np.sqrt(a) + np.sqrt(1 - a)))


def told(stock: Any) -> dict[str, Any]:
    return {"_class_name": type(stock).__name__, **stock.config}


@cache
def followed_by(check: Any, schedule: Any, shape: tuple[int, ...] | None) -> set[str]:
    """Classes whose levels are visited by the functions of a family, or of several; the others are refused."""
    followed, network = set(), SimpleNamespace(patch_size=2, patch_size_t=1)
    for (kind, label), stock in stocks().items():
        if kind == EULER:
            continue  # pipelines hand it sigmas; a test of each family holds it
        p = SimpleNamespace(
            pipe=SimpleNamespace(scheduler=stock), latent_shape=shape, grid_shape=shape, model="MODEL",
            card=SimpleNamespace(network=network, index={}, model="MODEL"),
        )  # fmt: skip
        try:
            check("MODEL", told(stock))
            levels = schedule(p, STEPS, "diffusers", None)
        except ValueError:
            continue
        followed.add(kind)
        np.testing.assert_allclose(levels.sigma[:-1].double(), visited(stock), atol=1e-5, err_msg=f"{kind} {label}")
    return followed


@pytest.mark.slow
@pytest.mark.parametrize("name", PIPELINES)
def test_levels_are_the_schedulers_own_or_it_is_refused(name: str) -> None:
    known: Any = family(name)
    shape = None if name in DIFFUSERS else (4, 3, 32, 32) if known.videos else (4, 32, 32)
    followed = followed_by(known.check_scheduler, known.schedule, shape)
    if name in DIFFUSERS:
        assert {"DDIMScheduler", "DDPMScheduler", "LCMScheduler"} <= followed
    elif name in MULTISTEP:
        assert {"UniPCMultistepScheduler", "DPMSolverMultistepScheduler"} <= followed
        assert not any("DDIM" in kind or kind.startswith("Euler") for kind in followed)
    else:
        assert followed == set()


def test_published_diffusion_schedulers_are_followed() -> None:
    for kind in ("PNDMScheduler", "EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler", "DDIMScheduler",
                 "DPMSolverMultistepScheduler", "TCDScheduler", "UniPCMultistepScheduler"):  # fmt: skip
        family("sd").check_scheduler("MODEL", told(made(kind, "spaced leading")))  # type: ignore[attr-defined]


def test_levels_between_those_of_training_are_refused() -> None:
    """Between two timesteps this setting draws another line than the usual one; ten steps meet none such, twelve do."""
    config = {**CONFIGS["spaced linspace"], "num_train_timesteps": 1000, "interpolation_type": "log_linear"}
    stock: Any = diffusers.EulerDiscreteScheduler.from_config(config)
    assert len(diffusion_levels("MODEL", stock, 10).sigma) == 11
    with pytest.raises(ValueError, match="its levels lie between those of training timesteps"):
        diffusion_levels("MODEL", stock, 12)


@pytest.mark.slow
def test_the_generic_route_follows_them_or_refuses() -> None:
    for (kind, label), stock in stocks().items():
        flow = kind.startswith("FlowMatch") or label == "flow"
        try:
            levels = Levels.of(stock).schedule(STEPS, "diffusers", None, {"num_inference_steps": STEPS})
        except (ValueError, KeyError, AssertionError):  # which loading tells as a refusal
            continue
        if kind != EULER and not (flow and "Helios" in kind):
            np.testing.assert_allclose(levels.sigma[:-1].double(), visited(stock), atol=1e-5, err_msg=f"{kind} {label}")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_karras_sigmas": True}, "use_karras_sigmas"),
        ({"prediction_type": "epsilon"}, "predicts flow_prediction"),
        ({"use_flow_sigmas": False}, "without use_flow_sigmas"),
        ({"final_sigmas_type": "sigma_min"}, "cannot be visited"),
    ],
)
def test_settings_of_flow_schedulers_that_are_not_followed(changes: dict[str, Any], said: str) -> None:
    config = {"_class_name": "DPMSolverMultistepScheduler", **FLOW, **changes}
    with pytest.raises(ValueError, match=said):
        family("sd3").check_scheduler("MODEL", config)  # type: ignore[attr-defined]
