"""What moves the weights: optimizers by name, the place of their moments, and the rate of each update.

The rate is a function only of the settings and the number of updates done, so a continued run has the rates of one that
never stopped. The length of a run is a setting too: continued with more iterations, it takes the longer run's rates.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from flowrl.config.sections import OptimConfig
from flowrl.config.train import TrainConfig
from flowrl.pipelines.weights.trained_weights import TrainedWeights
from flowrl.rendering.markup import plural
from flowrl.runtime.placement import torch_threads
from flowrl.runtime.process_settings import usable_cores

FAKE = "fake"  # the slot of the fake score

_NAMES = {"adamw_8bit": "AdamW8bit", "paged_adamw": "PagedAdamW", "paged_adamw_8bit": "PagedAdamW8bit"}
"""Classes of bitsandbytes by `optim.name`."""


def make_optimizer(settings: OptimConfig, policy: TrainedWeights, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer of a configuration for the policy's weights, at its highest rate; `device` is the run's."""
    weights = policy.parameters.values()
    given: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps}
    given["weight_decay"] = settings.weight_decay
    if settings.name in _NAMES:
        from bitsandbytes import optim  # an extra, and a second

        made: torch.optim.Optimizer = getattr(optim, _NAMES[settings.name])(weights, **given)
        return made
    if settings.offload:
        return HostAdamW(weights, fused=device.type != "cpu", **given)
    return torch.optim.AdamW(weights, **given)


def add_learners(config: TrainConfig, policy: TrainedWeights, device: torch.device) -> dict[str, torch.optim.Optimizer]:
    """Adds slots that learn by themselves, the fake score of `dmd`; the optimizer of each, for use under its slot."""
    if config.dmd.weight == 0:
        return {}
    policy.add_slot(FAKE)
    return {FAKE: make_optimizer(replace(config.optim, lr=config.dmd.fake_lr), policy, device)}


class HostAdamW(torch.optim.AdamW):
    """AdamW whose moments lie in the host's memory and whose steps the host computes, for weights on any device.

    A step fetches gradients and weights, does what torch's AdamW does on a CPU, and sends the weights back. On CUDA its
    copies are in pinned memory. Weights on the host are updated in place.

    Fused, a step reads and writes each number once, where torch's default goes over all of them ten times: a sixth of
    the time, and numbers that differ by rounding. It takes all cores, divided by the processes of this machine, since
    torchrun leaves each process one thread, with which 12 billion weights take a minute and a half. How many threads
    there are moves no bit: each weight is computed by itself. Not fused, as in runs on a CPU, its numbers are those of
    `torch.optim.AdamW` bit for bit, on the threads of the run.
    """

    def __init__(self, weights: Iterable[nn.Parameter], *, fused: bool, **settings: Any) -> None:
        self._trained = list(weights)
        self._own = list[nn.Parameter]()
        for weight in self._trained:
            if weight.device.type != "cpu":
                pinned = weight.device.type == "cuda" and torch.cuda.is_available()
                copy = torch.empty(weight.shape, dtype=weight.dtype, device="cpu", pin_memory=pinned)
                weight = nn.Parameter(copy)
            self._own.append(weight)
        together = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
        self._threads = max(1, usable_cores() // together) if fused else None
        super().__init__(self._own, fused=True if fused else None, **settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step of all weights that have a gradient; takes no closure."""
        assert closure is None
        pairs = [(own, weight) for own, weight in zip(self._own, self._trained, strict=True) if own is not weight]
        for own, weight in pairs:
            own.data.copy_(weight.data)
            own.grad = None if weight.grad is None else weight.grad.to(own.device)
        with torch_threads(self._threads):
            super().step()
        for own, weight in pairs:
            weight.data.copy_(own.data, non_blocking=own.is_pinned())
            own.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of the weights."""
        for weight in self._trained:
            weight.grad = None


def rate_of(settings: OptimConfig, updates: int) -> Callable[[int], float]:
    """The learning rate of an update as a function of the number of updates done before it.

    Over the first w = `warmup` updates it is `lr * n / w`, so 0 at the very first. After them, with N the updates of
    the whole run and p = (n - w) / (N - w):

        constant      lr
        linear        lr (1 - p)
        cosine        lr (1 + cos(pi p)) / 2
        polynomial    1e-7 + (lr - 1e-7) (1 - p)
        inverse_sqrt  lr sqrt(t / (n + t - w)), t = w, or 10 000 without a warmup

    Those are the schedules of transformers' `get_scheduler` at its defaults.
    """
    if settings.schedule == "constant" and settings.warmup == 0:
        return lambda done: settings.lr
    from transformers import get_scheduler

    name = "constant_with_warmup" if settings.schedule == "constant" else settings.schedule
    nothing = torch.optim.SGD([torch.zeros(1)], lr=settings.lr)  # polynomial reads its rate
    made: Any = get_scheduler(name, nothing, num_warmup_steps=settings.warmup, num_training_steps=updates)
    (share,) = made.lr_lambdas
    return lambda done: settings.lr * float(share(done))


def updates_of(config: TrainConfig) -> int:
    """The updates of a whole run."""
    return config.num_iterations * config.updates_per_rollout


def rate_note(config: TrainConfig, before: int, done: int) -> str:
    """What happens to the rate if a run of `before` iterations, some of them done, now has another length."""
    updates, optim = config.updates_per_rollout, config.optim
    was, now = (rate_of(optim, total * updates)(done * updates) for total in (before, config.num_iterations))
    return (
        f"optim.schedule={optim.schedule} now spans {plural(config.num_iterations, 'iteration')}, not {before}: the "
        f"learning rate was {was:.3g} at iteration {done} and continues at {now:.3g}. To keep one rate instead, add "
        f"optim.schedule=constant optim.lr={was or now:.3g} resume_changed=true"
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the rate of the next steps."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def check_optimizer(config: TrainConfig, kind: str | None = None) -> None:
    """Refuses settings of the section `optim` that cannot work on a device of a kind (cpu, cuda or mps); None leaves
    out what depends on this machine."""
    settings, total = config.optim, updates_of(config)
    if settings.warmup and settings.warmup >= total:
        raise ValueError(
            f"optim.warmup ({settings.warmup}) must be below the updates of the run ({total}, num_iterations times "
            "updates_per_rollout): the rate would never reach optim.lr"
        )
    if settings.schedule == "polynomial" and settings.lr <= 1e-7:
        raise ValueError(
            f"optim.schedule=polynomial falls to 1e-7, and optim.lr is {settings.lr:g}: raise it, or take linear"
        )
    if settings.name == "adamw" or kind is None:
        return
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(
            f"optim.name={settings.name} needs the package bitsandbytes, which is not installed: pip install -e "
            "'.[quantize]', or set optim.name=adamw"
        )
    usable = ("cuda",) if settings.name.startswith("paged") else ("cuda", "cpu")
    if kind not in usable:
        why = "pages its moments, which CUDA alone does" if usable == ("cuda",) else "runs on CUDA and CPU devices"
        raise ValueError(
            f"optim.name={settings.name} {why}, and pipeline.device is {kind}: set optim.name="
            f"{'adamw_8bit or ' if kind == 'cpu' else ''}adamw"
        )


def refuse_other_moments(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Refuses the moments of one library's AdamW for the other's, which cannot read them."""
    torchs = any("exp_avg" in entry for entry in state["state"].values())
    if state["state"] and torchs != isinstance(optimizer, torch.optim.AdamW):
        raise ValueError(
            f"its moments are those of {'adamw' if torchs else 'an optimizer of bitsandbytes'}: optim.name"
        )
