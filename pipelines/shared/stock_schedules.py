"""Noise levels as stock pipelines visit them, read from their schedulers' configurations."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from flowrl.config.strict_yaml import read_mapping
from flowrl.samplers.flow_coordinates import alpha_bars, diffusion_schedule, diffusion_timesteps, flow_levels
from flowrl.samplers.schedules import build_schedule, dynamic_mu
from flowrl.trajectory import Schedule

EULER = "FlowMatchEulerDiscreteScheduler"
_KNOWN = read_mapping(Path(__file__).with_suffix(".yaml"))
_TRIED = 10
"""Steps in which a folder's scheduler is tried before anything loads."""
_SAME = 1e-5
"""Difference of sigmas that are the same."""


def own_mu(config: Mapping[str, Any], num_tokens: int) -> float:
    """Logarithm of the shift that a flow scheduler's configuration gives a latent of so many tokens."""
    return dynamic_mu(
        num_tokens,
        base_shift=config.get("base_shift", 0.5),
        max_shift=config.get("max_shift", 1.15),
        base_tokens=config.get("base_image_seq_len", 256),
        max_tokens=config.get("max_image_seq_len", 4096),
    )


Levels = Callable[[Any, int, str, float | None], Schedule]
"""A family's noise levels, of its pipeline, a number of steps, a grid and a shift."""


def shifted_by(tokens: Callable[[Any], int]) -> Levels:
    """`stock_schedule` of a pipeline whose shift depends on a number of tokens."""

    def schedule(p: Any, num_steps: int, grid: str, shift: float | None) -> Schedule:
        config = p.pipe.scheduler.config
        return stock_schedule(config, num_steps, grid, own_mu(config, tokens(p)), shift)

    return schedule


def squares(p: Any) -> int:
    """Tokens of 2 x 2 pixels of latents `[c, h, w]`."""
    return int((p.latent_shape[-2] // 2) * (p.latent_shape[-1] // 2))


by_image_size = shifted_by(squares)


def flow_levels_of(*, sigmas: str = "diffusers", tokens: Callable[[Any], int] | None = None) -> Levels:
    """`flow_schedule` of a pipeline's own scheduler, whose shift may depend on a number of tokens."""

    def schedule(p: Any, num_steps: int, grid: str, shift: float | None) -> Schedule:
        scheduler = p.pipe.scheduler
        mu = None if tokens is None else own_mu(scheduler.config, tokens(p))
        return flow_schedule(scheduler, num_steps, grid, shift, sigmas=sigmas, mu=mu)

    return schedule


def stock_schedule(
    config: Mapping[str, Any], num_steps: int, grid: str, mu: float | None, shift: float | None,
    *, visited: str = "linspace",
) -> Schedule:  # fmt: skip
    """The grid of a stock pipeline that hands `linspace(1, 1/T, T)` to its scheduler, under the name "diffusers" too.
    `mu` is the logarithm of the shift where the scheduler shifts by resolution, `shift` takes its place; `visited` is
    the grid that "diffusers" stands for where the stock pipeline hands over something else or nothing. Raises
    ValueError: another grid, or a shift that is not positive."""
    if shift is not None and not shift > 0:
        raise ValueError(
            f"shift must be positive, got {shift}: 1 leaves the grid unshifted, null takes the model's own"
        )
    grid = visited if grid == "diffusers" else grid
    if not config.get("use_dynamic_shifting"):
        return build_schedule(config if shift is None else {**config, "shift": shift}, num_steps, grid=grid)
    return build_schedule(config, num_steps, grid=grid, mu=mu if shift is None else math.log(shift))


def check_euler_scheduler(model: str, config: Mapping[str, Any]) -> None:
    """Refuses the configuration of any scheduler but FlowMatchEulerDiscreteScheduler, whose levels are built here."""
    name = str(config.get("_class_name"))
    if name != EULER:
        raise ValueError(
            f"the scheduler of {model} is {name}, and this family visits the noise levels of {EULER}: take the "
            "scheduler folder of the published checkpoint"
        )
    make_scheduler(model, config)
    build_schedule(config, 4, mu=1.0 if config.get("use_dynamic_shifting") else None)


def check_flow_scheduler(model: str, config: Mapping[str, Any]) -> None:
    """Refuses the configuration of a scheduler whose levels `flow_schedule` does not have."""
    name = str(config.get("_class_name"))
    if name == EULER:
        check_euler_scheduler(model, config)
        return
    what = f"the scheduler of {model} is {name}"
    cure = "take the scheduler folder of the published checkpoint"
    if name not in _KNOWN["multistep"] or not config.get("use_flow_sigmas"):
        raise ValueError(f"{what} without use_flow_sigmas, and this family is a flow model: {cure}")
    if config.get("prediction_type") != "flow_prediction":
        raise ValueError(
            f"{what} with prediction_type {config.get('prediction_type', 'epsilon')!r}, and the network of this family "
            f"predicts flow_prediction: {cure}"
        )
    if moved := [key for key in _KNOWN["moved"] if config.get(key)]:
        raise ValueError(f"{what} with {', '.join(moved)}, which is not followed here: set it to false, or {cure}")
    try:
        levels = flow_schedule(make_scheduler(model, config), 4, "diffusers", mu=1.0)
        whole = len(levels.timestep) == 4
    except ValueError as error:
        raise ValueError(f"{what}, and its levels cannot be visited ({error}): {cure}") from error
    if not whole:
        raise ValueError(f"{what}, which visits {len(levels.timestep)} levels where 4 are asked for: {cure}")


def make_scheduler(model: str, config: Mapping[str, Any]) -> Any:
    """A stock scheduler of a configuration. Raises ValueError: diffusers has no such scheduler, or cannot make it."""
    import diffusers

    name = str(config.get("_class_name"))
    found = getattr(diffusers, name, None)
    kind: Any = found if isinstance(found, type) and issubclass(found, diffusers.SchedulerMixin) else None
    if kind is None:
        raise ValueError(f"the scheduler of {model} is {name}, and diffusers has none of that name")
    logging = diffusers.utils.logging
    loud = logging.get_verbosity()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # schedulers hand tensors to NumPy the old way
        logging.set_verbosity_error()  # of keys of other classes, which folders often have
        try:
            return kind.from_config(dict(config))
        except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
            raise ValueError(
                f"the scheduler of {model}, {name}, cannot be made of its scheduler_config.json "
                f"({', '.join(_no_numbers(kind, config)) or error}): take the scheduler folder of the published "
                "checkpoint"
            ) from error
        finally:
            logging.set_verbosity(loud)


def _no_numbers(kind: Any, config: Mapping[str, Any]) -> list[str]:
    """Entries of a configuration that are not numbers, or not whole ones, where the class has such."""
    usual = {name: one.default for name, one in inspect.signature(kind.__init__).parameters.items()}
    wanted = {
        name: int if type(one) is int else int | float for name, one in usual.items() if type(one) in (int, float)
    }
    return [f"{key}={config[key]!r}" for key, one in wanted.items() if not isinstance(config.get(key, 0), one)]


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A diffusion scheduler's configuration as `samplers/flow_coordinates.py` reads it: CogVideoX' levels written out.

    With A the usual alpha_bar and k = snr_shift_scale, `A <- A / (k + (1 - k) A)`, which divides the signal-to-noise
    ratio by k; then, with rescale_betas_zero_snr, `sqrt(A)` is moved and stretched so that the last is 0 and the first
    stays (Lin et al., arXiv 2305.08891, algorithm 1).
    """
    if "snr_shift_scale" not in config:
        return dict(config)
    usual, scale = alpha_bars({**config, "rescale_betas_zero_snr": False}), float(config.get("snr_shift_scale", 1.0))
    a = usual / (scale + (1 - scale) * usual)
    if config.get("rescale_betas_zero_snr"):
        root = a.sqrt()
        a = ((root - root[-1]) * root[0] / (root[0] - root[-1])).square()
    beta = 1 - a / torch.cat([a.new_ones(1), a[:-1]])
    return {**config, "trained_betas": beta.tolist(), "rescale_betas_zero_snr": False}


def check_diffusion_scheduler(model: str, config: Mapping[str, Any]) -> None:
    """Refuses a diffusion model's scheduler whose levels are not visited one by one. Raises as `diffusion_levels`."""
    flow_levels(config)
    if "_class_name" in config:
        diffusion_levels(model, make_scheduler(model, config), _TRIED)


def diffusion_levels(model: str, scheduler: Any, num_steps: int, grid: str = "diffusers") -> Schedule:
    """The levels that a stock scheduler of a diffusion model visits, or ("linspace") evenly spaced ones. The scheduler
    itself is asked for its timesteps, since classes space them differently under the same settings. A solver that goes
    back to a level has it once here. Raises ValueError: it visits levels between or beside those of training."""
    config = plain_config(scheduler.config)
    if grid != "diffusers":
        return diffusion_schedule(config, num_steps, grid=grid)
    name = type(scheduler).__name__
    stock = make_scheduler(model, {**scheduler.config, "_class_name": name})
    diffusion_timesteps(num_steps, len(flow_levels(config)) - 1, "linspace")  # refuses an impossible number
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # schedulers hand tensors to NumPy the old way
            stock.set_timesteps(num_steps)
        ratios = torch.as_tensor(vars(stock).get("sigmas", [])).double().cpu()  # noise over data, of classes with such
        asked = torch.as_tensor(stock.timesteps).double().cpu()
    except Exception as error:  # classes refuse their settings with errors of every kind
        raise ValueError(_not_followed(model, name, num_steps, str(error))) from error
    times = torch.unique_consecutive(asked).tolist()
    falling = times == sorted(set(times), reverse=True)
    if len(times) != num_steps or not falling or times[0] >= len(flow_levels(config)) - 1 or times[-1] < 0:
        raise ValueError(_not_followed(model, name, num_steps, f"it visits timesteps {times[:3]} .. {times[-1]}"))
    found = diffusion_schedule(config, num_steps, timesteps=times)
    # A level that is noise alone has an infinite ratio, for which some classes write a large one.
    first = 1 if config.get("rescale_betas_zero_snr") else 0
    if len(ratios) != num_steps + 1:
        if (known := vars(stock).get("alphas_cumprod")) is None:
            raise ValueError(_not_followed(model, name, num_steps, "it has no noise levels of a diffusion model"))
        ratios = (1 / torch.as_tensor(known).double()[torch.tensor([*times, 0]).long()] - 1).sqrt()
    away = (ratios / (1 + ratios) - found.sigma.double())[first:-1].abs()
    if len(away) and float(away.max()) > _SAME:
        raise ValueError(_not_followed(model, name, num_steps, "its levels lie between those of training timesteps"))
    return found


def _not_followed(model: str, name: str, num_steps: int, why: str) -> str:
    return (
        f"the scheduler of {model}, {name}, cannot be followed in {num_steps} steps ({why}): name DDIMScheduler or "
        "EulerDiscreteScheduler, with the same betas, in scheduler/scheduler_config.json and model_index.json, or set "
        "sampler.grid=linspace"
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
    evenly spaced and shifted once. `shift` replaces the scheduler's own; `mu` is the logarithm of the shift, for
    schedulers that shift by resolution.
    """
    config = dict(scheduler.config)
    if not config.get("use_flow_sigmas"):
        if grid != "unipc_flow":
            return stock_schedule(config, num_steps, grid, mu, shift, visited=sigmas)
        own = config.get("shift", 1.0) if shift is None else shift
        return build_schedule({**config, "flow_shift": own}, num_steps, grid=grid)
    own = config["flow_shift"] if shift is None else shift
    if shift is None and mu is not None and config.get("use_dynamic_shifting"):
        own = math.exp(mu)
    if grid == "diffusers" and num_steps > 0:
        stock = type(scheduler).from_config(config, flow_shift=own)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # DPM-Solver hands tensors to NumPy the old way
            stock.set_timesteps(num_steps)
        return Schedule(sigma=stock.sigmas.float().cpu(), timestep=stock.timesteps.float().cpu())
    plain = {"shift": own, "flow_shift": own, "num_train_timesteps": config["num_train_timesteps"]}
    return build_schedule(plain, num_steps, grid="unipc_flow" if grid == "diffusers" else grid)
