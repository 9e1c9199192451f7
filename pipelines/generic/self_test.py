"""Whether a stock pipeline, called one step at a time, gives the result of its own call of two steps."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flowrl.pipelines.generic import stock_call
from flowrl.pipelines.shared import common
from flowrl.runtime.randomness import counter_normal
from flowrl.trajectory import Schedule, start_state

PROMPTS = ("a photo of a red fox", "two blue squares on a table beside a cup of tea")
"""What is drawn: two prompts of different lengths in one call of ours, one after the other in stock's."""
WORST = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest deviation, relative to stock's latents, by the dtype of the network."""


def check_reproduces(p: Any) -> float:
    """The largest deviation of latents after two steps from those of stock's own call. Raises ValueError: more than
    `WORST`, a repeated call gives other numbers, or there is no gradient."""
    name, scale = type(p.pipe).__name__, 1.0 if p.scale_name is None else 3.0
    schedule = p.schedule(2, "diffusers", None)
    noise = counter_normal((len(PROMPTS), *p.latent_shape), "self-test").to(p.device)
    sources = p.sources.examples(len(PROMPTS), p.source_size)
    cond, against = p.encode(PROMPTS, sources), p.encode([""] * len(PROMPTS), sources)
    velocity = p.guided(p.network, cond, against if p.passes(scale) == 2 else None, scale)
    x = start_state(noise, schedule)
    found = [x]
    with torch.no_grad():
        for step in range(2):
            sigma, after = schedule.sigma[step].to(p.device), schedule.sigma[step + 1].to(p.device)
            x = x + (after - sigma) * velocity(x, sigma, schedule.timestep[step].to(p.device))
            found.append(x)
    worst = 0.0
    for row, prompt in enumerate(PROMPTS):
        source = p.sources.of.get(int(cond.tensors["text_on_host"][row]), "")
        own = _stock(p, prompt, noise[row : row + 1], schedule, scale, source)
        worst = max(worst, float((p.sources.pick(found[-1][row : row + 1], own) - own).norm() / own.norm()))
    if not worst <= WORST[p.dtype]:
        raise ValueError(
            f"{name} cannot be trained by pipeline.name=generic: two steps of its own call and the same two taken one "
            f"by one differ by {worst:.1e} of its latents, where at most {WORST[p.dtype]:g} may be lost to rounding. "
            "It keeps something from step to step, or reads its prompts elsewhere than in encode_prompt"
        )
    x, sigma, timestep = found[1], schedule.sigma[1].to(p.device), schedule.timestep[1].to(p.device)
    with torch.no_grad():
        first = velocity(x, sigma, timestep)
    with torch.enable_grad():
        again = velocity(x.detach().requires_grad_(), sigma, timestep)
    if not again.requires_grad:
        raise ValueError(f"{name} cannot be trained by pipeline.name=generic: no gradient comes through its own call")
    if not torch.equal(first, again.detach()) or not math.isfinite(float(first.sum())):
        raise ValueError(
            f"{name} cannot be trained by pipeline.name=generic: the same latents at the same level give other numbers "
            "the second time, so an importance ratio would not begin at 1"
        )
    try:  # whether stock's call needs its text encoders for more than `encode_prompt`
        with p.without_encoders(), torch.no_grad():
            velocity(x, sigma, timestep)
    except (AttributeError, TypeError, ValueError):
        p.keeps_encoders = True
    return worst


def _stock(p: Any, prompt: str, noise: Tensor, schedule: Schedule, scale: float, source: str) -> Tensor:
    """Stock's own loop for one prompt, its text encoders and all; Euler steps in the place of its solver."""
    levels, last = p.levels, list[Tensor]()

    def step(output: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        k = len(last)
        sigma, after = schedule.sigma[k].item(), schedule.sigma[k + 1].item()
        t, t_after = (levels.timestep(float(schedule.timestep[j]), p.device) for j in (k, min(k + 1, 1)))
        x = levels.from_latents(sample.float(), t) if k == 0 else last[-1]
        last.append(x + (after - sigma) * levels.velocity(x, output, t))
        if k == 1:
            raise stock_call.Reached(last[-1])
        return levels.latents(last[-1], t_after).to(sample.dtype)

    times = torch.cat([levels.timestep(t, p.device) for t in schedule.timestep.tolist()])
    sigmas = 1 - schedule.sigma if levels.inverted else schedule.sigma
    scheduler = stock_call.scheduler_like(p.pipe.scheduler, times, sigmas.to(p.device), step)
    given = p.arguments(1, scale, negative=True, steps=2, source=source)
    texts = {key: [text] for key, text in (("prompt", prompt), ("negative_prompt", "")) if key in given}
    start = levels.latents(start_state(noise, schedule), levels.timestep(float(schedule.timestep[0]), p.device))
    start = p.sources.hold(start, lambda: p.made(source))
    with p.remembering(source, 1), common.standing_in(p.pipe, scheduler=scheduler), torch.no_grad():
        result = stock_call.call(p.pipe, {**given, **texts, "latents": start.to(p.dtype)})
    if not isinstance(result, Tensor):
        raise ValueError(f"{type(p.pipe).__name__} did not take two steps where it was asked for two")
    return result


def describe_error(name: str, error: Exception) -> ValueError:
    """A message for an error that stock code raised when it was called in an unusual way."""
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ValueError(f"{name} cannot be trained by pipeline.name=generic: its own call says {said!r}")
