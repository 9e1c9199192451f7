"""Noise levels as stock pipelines visit them, read from their schedulers' configurations."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from flowrl.samplers.schedules import build_schedule, dynamic_mu
from flowrl.trajectory import Schedule


def with_shift(config: Mapping[str, Any], shift: float | None) -> dict[str, Any]:
    """A flow scheduler's configuration with another static shift; None leaves it."""
    return dict(config) if shift is None else {**config, "shift": shift}


def own_mu(config: Mapping[str, Any], num_tokens: int) -> float:
    """Logarithm of the shift that a flow scheduler's configuration gives a latent of so many tokens."""
    return dynamic_mu(
        num_tokens,
        base_shift=config.get("base_shift", 0.5),
        max_shift=config.get("max_shift", 1.15),
        base_tokens=config.get("base_image_seq_len", 256),
        max_tokens=config.get("max_image_seq_len", 4096),
    )


def by_image_size(p: Any, num_steps: int, grid: str, shift: float | None) -> Schedule:
    """`stock_schedule` of a pipeline whose latents `[c, h, w]` are read as tokens of 2 x 2 pixels."""
    config, (height, width) = p.pipe.scheduler.config, p.latent_shape[-2:]
    return stock_schedule(config, num_steps, grid, own_mu(config, (height // 2) * (width // 2)), shift)


def stock_schedule(
    config: Mapping[str, Any], num_steps: int, grid: str, mu: float | None, shift: float | None,
    *, visited: str = "linspace",
) -> Schedule:  # fmt: skip
    """The grid of a stock pipeline that hands `linspace(1, 1/T, T)` to its scheduler, under the name "diffusers" too.

    Args:
        config: of the scheduler.
        num_steps: T.
        grid: "diffusers" or "linspace".
        mu: logarithm of the shift, where the scheduler shifts by resolution.
        shift: takes the place of exp(mu), or of the scheduler's static shift.
        visited: the grid that "diffusers" stands for, where the stock pipeline hands over something else or nothing.

    Raises:
        ValueError: another grid, or a shift that is not positive.
    """
    if shift is not None and not shift > 0:
        raise ValueError(
            f"shift must be positive, got {shift}: 1 leaves the grid unshifted, null takes the model's own"
        )
    grid = visited if grid == "diffusers" else grid
    if not config.get("use_dynamic_shifting"):
        return build_schedule(with_shift(config, shift), num_steps, grid=grid)
    return build_schedule(config, num_steps, grid=grid, mu=mu if shift is None else math.log(shift))


def check_flow_scheduler(model: str, config: Mapping[str, Any]) -> None:
    """Refuses the configuration of a scheduler that does not step along sigmas of a flow.

    Raises:
        ValueError: says what the scheduler is.
    """
    name = str(config.get("_class_name"))
    if not name.startswith("FlowMatch") and not config.get("use_flow_sigmas"):
        raise ValueError(
            f"the scheduler of {model} is {name} without use_flow_sigmas, and this family is a flow model: take the "
            "scheduler folder of the published checkpoint"
        )


def flow_schedule(
    scheduler: Any,
    num_steps: int,
    grid: str,
    shift: float | None = None,
    *,
    sigmas: str = "diffusers",
    mu: float | None = None,
) -> Schedule:
    """Noise levels of a stock flow scheduler.

    Grid "diffusers" is what the stock pipeline visits. With FlowMatchEulerDiscreteScheduler that is the grid `sigmas`:
    "linspace" where the pipeline passes sigmas in. Multistep schedulers with flow sigmas (UniPC, DPM-Solver) are asked
    themselves, since their grid differs between versions of diffusers: now it starts at .999999, formerly, and in
    Flow-GRPO's published runs, at .99967, which is "unipc_flow". Their timesteps are whole numbers. "linspace" is
    evenly spaced and shifted once.

    Args:
        scheduler: stock scheduler.
        num_steps: T.
        grid: "diffusers", "linspace" or "unipc_flow".
        shift: replaces the scheduler's own.
        sigmas: which grid of FlowMatchEulerDiscreteScheduler the stock pipeline visits.
        mu: logarithm of the shift, for schedulers that shift by resolution.

    Raises:
        ValueError: unknown grid, or a setting that the grid cannot follow.
    """
    config = dict(scheduler.config)
    if not config.get("use_flow_sigmas"):
        if grid != "unipc_flow":
            return stock_schedule(config, num_steps, grid, mu, shift, visited=sigmas)
        own = config.get("shift", 1.0) if shift is None else shift
        return build_schedule({**config, "flow_shift": own}, num_steps, grid=grid)
    own = config["flow_shift"] if shift is None else shift
    if grid == "diffusers" and num_steps > 0:
        stock = type(scheduler).from_config(config, flow_shift=own)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # DPM-Solver hands tensors to NumPy the old way
            stock.set_timesteps(num_steps)
        return Schedule(sigma=stock.sigmas.float().cpu(), timestep=stock.timesteps.float().cpu())
    plain = {"shift": own, "flow_shift": own, "num_train_timesteps": config["num_train_timesteps"]}
    return build_schedule(plain, num_steps, grid="unipc_flow" if grid == "diffusers" else grid)
