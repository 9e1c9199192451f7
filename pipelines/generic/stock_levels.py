"""Noise levels of a stock scheduler in flow coordinates, and latents between the two.

A flow scheduler's latents and outputs match our samplers, or (`invert_sigmas`) run from 0 to 1 the other way; those of
a diffusion model are converted to flow coordinates as in the family `sd`.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.pipelines.shared import stock_schedules
from flowrl.samplers.flow_coordinates import flow_levels, prediction_of, sigma_at, velocity_from_prediction, vp_scale
from flowrl.samplers.parametrization import column, working_dtype
from flowrl.trajectory import Schedule


def is_flow(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a scheduler, of this class and configuration, steps along a flow."""
    flow = name.startswith("FlowMatch") or config.get("prediction_type") == "flow_prediction"
    return bool(flow or config.get("use_flow_sigmas"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Levels:
    """The noise levels of a stock scheduler."""

    scheduler: Any
    flow: bool
    inverted: bool
    """Whether its sigmas rise from noise at 0."""
    table: Tensor | None
    """`flow_levels` of a diffusion model."""

    @staticmethod
    def of(scheduler: Any) -> Levels:
        """The levels of a stock scheduler. Raises ValueError: it is of a diffusion model with unknown levels."""
        config, name = dict(scheduler.config), type(scheduler).__name__
        flow = is_flow(name, config)
        has = (
            name.startswith("FlowMatch") or "use_flow_sigmas" in inspect.signature(type(scheduler).__init__).parameters
        )
        if flow and (not has or config.get("prediction_type", "flow_prediction") != "flow_prediction"):
            raise ValueError(
                f"the scheduler {name} with prediction_type {config.get('prediction_type')!r} does not step along a "
                "flow: take the scheduler folder of the published checkpoint"
            )
        inverted = bool(flow and config.get("invert_sigmas"))
        return Levels(
            scheduler=scheduler,
            flow=flow,
            inverted=inverted,
            table=None if flow else flow_levels(stock_schedules.plain_config(config)),
        )

    def sigma(self, timestep: Tensor) -> Tensor:
        """Share of noise at timesteps."""
        if self.table is not None:
            return sigma_at(timestep, self.table)
        share = timestep.double() / self.scheduler.config.get("num_train_timesteps", 1000)
        return 1 - share if self.inverted else share

    def timestep(self, timestep: float, device: torch.device) -> Tensor:
        """A timestep [1] as stock schedulers have it: whole numbers as such, where theirs are."""
        whole = not type(self.scheduler).__name__.startswith("FlowMatch") and float(timestep).is_integer()
        return torch.tensor([timestep], device=device, dtype=torch.int64 if whole else torch.float32).clamp(min=0)

    def latents(self, x: Tensor, timestep: Tensor) -> Tensor:
        """Latents at one timestep as the stock scheduler has them."""
        if self.flow:
            return x
        return column(self._scale(timestep, x), x) * x.to(working_dtype(x))

    def from_latents(self, latents: Tensor, timestep: Tensor) -> Tensor:
        """The inverse of `latents`."""
        if self.flow:
            return latents
        return latents.to(working_dtype(latents)) / column(self._scale(timestep, latents), latents)

    def _scale(self, timestep: Tensor, like: Tensor) -> Tensor:
        return vp_scale(self.sigma(timestep)).reshape(()).to(like.device)

    def velocity(self, x: Tensor, output: Tensor, timestep: Tensor) -> Tensor:
        """Velocity in float32 of what the scheduler is given at `x` and one timestep."""
        if self.flow:
            return (-output if self.inverted else output).float()
        prediction = prediction_of(self.scheduler.config)
        return velocity_from_prediction(x.float(), output.float(), self.sigma(timestep).reshape(()), prediction).float()

    def schedule(self, num_steps: int, grid: str, shift: float | None, named: Mapping[str, Any]) -> Schedule:
        """Levels that the stock pipeline visits, or ("linspace") evenly spaced ones shifted once. `shift` takes the
        place of the scheduler's own; `named` is what the stock call hands to `set_timesteps`."""
        config, name = dict(self.scheduler.config), type(self.scheduler).__name__
        if shift is not None and not (self.flow and shift > 0):
            raise ValueError(
                f"shift must be positive, and the scheduler {name} one of a flow, got shift {shift:g}: null takes the "
                "model's own levels"
            )
        if not self.flow:
            return stock_schedules.diffusion_levels("this pipeline", self.scheduler, num_steps, grid)
        mu = named.get("mu")
        if grid == "linspace" and not self.inverted:
            own = config.get("flow_shift", config.get("shift", 1.0)) or 1.0
            plain = (
                {**config, "shift": own}
                if name.startswith("FlowMatch")
                else {"shift": own, "num_train_timesteps": config.get("num_train_timesteps", 1000)}
            )
            return stock_schedules.stock_schedule(plain, num_steps, grid, mu, shift)
        if grid != "diffusers":
            raise ValueError(f"a generic pipeline with {name} has the grid diffusers, or linspace; got {grid!r}")
        return self._visited(num_steps, shift, dict(named))

    def _visited(self, num_steps: int, shift: float | None, given: dict[str, Any]) -> Schedule:
        """The levels that the stock scheduler visits, given `given`."""
        config, name = dict(self.scheduler.config), type(self.scheduler).__name__
        changes: dict[str, Any] = {}
        if shift is not None:
            if config.get("use_dynamic_shifting") and given.get("mu") is not None:
                given["mu"] = math.log(shift)
            else:
                changes = {key: shift for key in ("shift", "flow_shift") if key in config}
        stock = stock_schedules.make_scheduler("this pipeline", {**config, **changes, "_class_name": name})
        taken = inspect.signature(stock.set_timesteps).parameters
        if not any(one.kind is one.VAR_KEYWORD for one in taken.values()):
            given = {key: value for key, value in given.items() if key in taken}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # DPM-Solver hands tensors to NumPy the old way
            stock.set_timesteps(**given)
        sigma, timestep = stock.sigmas.float().cpu(), stock.timesteps.float().cpu()
        if len(timestep) != num_steps or len(sigma) != num_steps + 1:
            raise ValueError(
                f"{name} visits {len(timestep)} levels in {num_steps} steps, and one network call per step can be "
                "trained: give the model a scheduler of first order, such as FlowMatchEulerDiscreteScheduler"
            )
        sigma = 1 - sigma if self.inverted else sigma
        if float(sigma[-1]) != 0 or bool((sigma[1:] >= sigma[:-1]).any()):
            raise ValueError(f"the levels of {name} do not fall to 0: {sigma.tolist()}")
        train, inverted = config.get("num_train_timesteps", 1000), self.inverted
        return Schedule(sigma=sigma, timestep=timestep, timestep_of=lambda s: train * (1 - s if inverted else s))
