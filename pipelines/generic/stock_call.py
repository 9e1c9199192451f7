"""One evaluation by a stock pipeline's own `__call__`, with stand-ins for its scheduler and encoders.

A stock pipeline makes latents, asks its scheduler for levels, and calls `scheduler.step` with its network's guided
output. With one level, the call ends at the first `step`, which has the answer.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flowrl.pipelines.generic.stock_classes import undecorate
from flowrl.pipelines.shared import common

POSITIVE, NEGATIVE = "the prompt", "the negative prompt"
"""Texts that a stock call is given instead of prompts: what stands in for `encode_prompt` knows them."""


class Reached(Exception):
    """Ends a stock call early, with what was found there."""

    def __init__(self, found: Any) -> None:
        super().__init__("a stock call ended here")
        self.found = found


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What a stock call needs before its network."""

    made: Tensor
    """Latents of one sample, as `prepare_latents` gave them: noise, but for what it holds of a source image."""
    levels: dict[str, Any]
    """Arguments of `set_timesteps` by name, without the device."""
    negative: bool
    """Whether the call reads embeddings of a negative prompt."""


def with_members(scheduler: Any, **members: Any) -> Any:
    """A copy of a scheduler, of the same class, which stock code may check, with its own members."""
    other = copy(scheduler)
    scale = getattr(type(scheduler), "init_noise_sigma", None)
    if "init_noise_sigma" in members and isinstance(scale, property):  # which an instance cannot have otherwise
        own = {"init_noise_sigma": members.pop("init_noise_sigma")}
        other.__class__ = type(type(scheduler).__name__, (type(scheduler),), own)
    vars(other).update(members)
    return other


def scheduler_like(scheduler: Any, timesteps: Tensor, sigmas: Tensor, step: Callable[..., Any]) -> Any:
    """A scheduler of its class and configuration that visits given levels, scales nothing, and steps by a function."""

    @wraps(scheduler.set_timesteps)
    def set_timesteps(*args: Any, **kwargs: Any) -> None:
        vars(other).update(
            timesteps=timesteps, sigmas=sigmas, num_inference_steps=len(timesteps), _step_index=None, _begin_index=None
        )

    signature = inspect.signature(scheduler.step)

    @wraps(scheduler.step)
    def stepped(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        result = step(given["model_output"], given["timestep"], given["sample"])
        return (result,) if given.get("return_dict") is False else _Stepped(prev_sample=result)

    scales = hasattr(scheduler, "scale_model_input")
    unscaled = {"scale_model_input": lambda sample, *args, **kwargs: sample} if scales else {}
    other = with_members(
        scheduler, set_timesteps=set_timesteps, step=stepped, init_noise_sigma=1.0, timesteps=timesteps, sigmas=sigmas,
        **unscaled,
    )  # fmt: skip
    return other


class _Handed(NamedTuple):
    """The arguments that a scheduler got: the network's answer, and latents."""

    output: Tensor
    sample: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stepped:
    """The result of a stock step that returns no tuple."""

    prev_sample: Tensor


def call(pipe: Any, arguments: Mapping[str, Any]) -> Any:
    """Stock's `__call__`, with gradient if the caller has it; its result, or what it reached. A `guider` among the
    arguments replaces the pipeline's own."""
    guider = {key: value for key, value in arguments.items() if key == "guider"}
    arguments = {key: value for key, value in arguments.items() if key not in guider}
    with common.standing_in(pipe, **guider), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="In CPU autocast", category=UserWarning)  # of Mochi in float32
        try:
            return undecorate(type(pipe).__call__)(pipe, **arguments)
        except Reached as reached:
            return reached.found


def end_call(*found: Any, **_: Any) -> Any:
    """Ends the call with the first thing given."""
    raise Reached(found[0])


def evaluate(
    pipe: Any, encode: Callable[..., Any], arguments: Mapping[str, Any], timestep: Tensor, sigma: float
) -> tuple[Tensor, Tensor]:
    """What the pipeline hands to its scheduler for latents at one level, guidance and all, and those that it would
    step. Raises ValueError: it never came to a step."""
    levels = torch.tensor([sigma, 0.0], device=timestep.device)
    scheduler = scheduler_like(pipe.scheduler, timestep, levels, lambda *found: end_call(_Handed(found[0], found[2])))
    with common.standing_in(pipe, scheduler=scheduler, encode_prompt=encode):
        found = call(pipe, arguments)
    if not isinstance(found, _Handed):
        raise ValueError(
            f"{type(pipe).__name__} ended without a call of scheduler.step, which nothing can be read from"
        )
    return found


def probe(
    pipe: Any,
    encode: Callable[..., Any],
    arguments: Mapping[str, Any],
    denoisers: Sequence[nn.Module],
    negative: Callable[[], bool],
) -> Asked:
    """What a stock call needs; it ends before it would call its network. Raises ValueError: latents or levels are not
    made where stock pipelines make them."""
    latents: list[Tensor] = []
    levels: list[dict[str, Any]] = []
    inner = copy(pipe.scheduler)
    signature, prepare = inspect.signature(inner.set_timesteps), getattr(pipe, "prepare_latents", None)
    if prepare is None:
        raise ValueError(f"{type(pipe).__name__} has no prepare_latents, which says what its latents look like")

    @wraps(inner.set_timesteps)
    def set_timesteps(*args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # DPM-Solver hands tensors to NumPy the old way
            inner.set_timesteps(*args, **kwargs)
        vars(scheduler).update(
            {key: value for key, value in vars(inner).items() if key not in ("set_timesteps", "init_noise_sigma")}
        )
        given = signature.bind(*args, **kwargs).arguments
        named = {key: value for key, value in given.items() if key not in ("device", "kwargs")}
        levels.append({**named, **given.get("kwargs", {})})

    scheduler = with_members(inner, set_timesteps=set_timesteps)

    @wraps(prepare)
    def prepared(*args: Any, **kwargs: Any) -> Any:
        made = prepare(*args, **kwargs)
        latents.append(made[0] if isinstance(made, tuple) else made)
        return made

    with ExitStack() as stack, torch.no_grad():
        for network in denoisers:
            hook = network.register_forward_pre_hook(partial(end_call, None))
            stack.callback(hook.remove)
        stack.enter_context(
            common.standing_in(pipe, scheduler=scheduler, encode_prompt=encode, prepare_latents=prepared)
        )
        call(pipe, arguments)
    if not levels or len(latents) != 1:
        raise ValueError(
            f"{type(pipe).__name__} asks its scheduler for levels {len(levels)} times before its network, and makes "
            f"latents {len(latents)} times: levels and one kind of latents are needed there"
        )
    return Asked(made=latents[0], levels=levels[-1], negative=negative())
