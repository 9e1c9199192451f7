"""Reinforcement learning guidance around any stock diffusers pipeline whose denoiser carries LoRA adapters.

The denoiser's forward is replaced by one that runs without and with the adapter and returns the mixture, so that the
pipeline needs no change and its own guidance comes after. For bilinear guidance (SD 1.5, SDXL, SD3, FLUX, Wan, Z-Image
without a norm cap) that is the same as guiding both networks first, at one scale. Qwen-Image brings guided tokens to a
norm, which is not bilinear: there the outputs of both networks are kept, and the exact result is put in place of the
pipeline's where it is handed to the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, Literal

import torch
from diffusers import DiffusionPipeline
from diffusers.utils import BaseOutput
from torch import Tensor, nn

from flowrl.pipelines.rlg_network import acting, active_adapters, adapter_layers, adapters_of
from flowrl.pipelines.shared.common import standing_in
from flowrl.runtime.private_names import CacheMixin
from flowrl.samplers.guidance import Scale, check_scale, mix_outputs, needed, scale_at
from flowrl.samplers.guidance_rules import qwen_norm_rescale

DENOISERS = ("transformer", "transformer_2", "unet")
"""Components that denoise; what else a pipeline holds (text encoders, autoencoder) runs as it is."""


@contextmanager
def rlg_pipeline(
    pipe: DiffusionPipeline,
    adapter: str | Sequence[str],
    scale: Scale | Sequence[Scale],
    *,
    by: Literal["noise", "step"] = "noise",
    true_cfg_scale: float | None = None,
) -> Iterator[DiffusionPipeline]:
    """Inside, the pipeline samples under reinforcement learning guidance; afterwards it is as before.

        pipe.load_lora_weights(folder, adapter_name="tuned")
        with rlg_pipeline(pipe, "tuned", 1.6):
            images = pipe("a photo of a red circle", num_inference_steps=20).images

    The base is the network with every adapter that is active on entry except the named ones, so that another LoRA (a
    style, fewer steps) stays under both. An adapter acts with the weight that `pipe.set_adapters` gave it. At scale 0
    the images are those of the base and at scale 1 those of the tuned model, bit for bit, at the usual number of
    network calls; elsewhere there are twice as many, and once more for each further adapter.

    Args:
        scale: One for each adapter: a number, or a function of what `by` says.
        by: What functions are given: "noise", the share `timestep / num_train_timesteps` (sigma of flow models), or
            "step", the scheduler's steps so far in this generation.
        true_cfg_scale: Of Qwen-Image pipelines, what the calls within pass to the pipeline; 1 without guidance.

    Raises ValueError: the adapter is not there, is fused, or also changes a text encoder; the denoiser caches; a scale
    is missing; a Qwen-Image pipeline without its true_cfg_scale, or another with.
    """
    names = [adapter] if isinstance(adapter, str) else list(adapter)
    scales = [scale] if isinstance(scale, (int, float)) or callable(scale) else list(scale)
    if not names or len(set(names)) != len(names) or len(names) != len(scales):
        raise ValueError(
            f"give one scale for each of one or more different adapters, got {names} and {len(scales)} scales"
        )
    for one in scales:
        if not callable(one):
            check_scale(one)
    if by not in ("noise", "step"):
        raise ValueError(f'by must be "noise" or "step", got {by!r}')
    name = type(pipe).__name__
    if name.startswith("QwenImage") != (true_cfg_scale is not None):
        raise ValueError(
            "true_cfg_scale is for Qwen-Image pipelines (1 if they run without guidance), whose guidance is not linear "
            f"and has to be finished before the mixture, and for no others: got {true_cfg_scale} for {name}"
        )
    denoisers = {
        name: part for name, part in pipe.components.items() if name in DENOISERS and isinstance(part, nn.Module)
    }
    _check_adapters(pipe, names, denoisers)
    guided = _Guided(pipe.scheduler, names, scales, by, true_cfg_scale)
    with ExitStack() as stack:
        scheduler = pipe.scheduler
        begun, stepped = guided.counting_from_zero(scheduler.set_timesteps), guided.counting(scheduler.step)
        stack.enter_context(standing_in(scheduler, set_timesteps=begun, step=stepped))
        for denoiser in denoisers.values():
            stack.enter_context(standing_in(denoiser, forward=guided.mixing(denoiser, pipe)))
        yield pipe


class _Guided:
    """State of one generation: its current step, and the networks' outputs in it."""

    def __init__(
        self, scheduler: Any, names: list[str], scales: list[Scale], by: str, true_cfg_scale: float | None
    ) -> None:
        self.scheduler, self.names, self.scales, self.by = scheduler, names, scales, by
        self.true_cfg_scale = true_cfg_scale
        self.step: int | None = None
        self.calls: list[tuple[list[Any], list[float]]] = []

    def counting_from_zero(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The scheduler's set_timesteps, which begins a generation."""

        @wraps(original)
        def set_timesteps(*args: Any, **kwargs: Any) -> Any:
            self.step, self.calls = 0, []
            return original(*args, **kwargs)

        return set_timesteps

    def counting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The scheduler's step, which ends one."""

        @wraps(original)
        def step(model_output: Tensor, timestep: Any, *args: Any, **kwargs: Any) -> Any:
            self._check_timestep(timestep)
            if self.true_cfg_scale is not None:
                model_output = self._exact(model_output)
            self.step, self.calls = (self.step or 0) + 1, []
            return original(model_output, timestep, *args, **kwargs)

        return step

    def mixing(self, denoiser: nn.Module, pipe: DiffusionPipeline) -> Callable[..., Any]:
        """A denoiser's forward under guidance."""
        original, layers = denoiser.forward, adapter_layers(denoiser)
        own = adapters_of(layers)
        others = [name for name in active_adapters(layers) if name not in self.names]
        # An adapter that this denoiser does not have leaves it at the base's output: its term is zero.
        experts = [k for k, name in enumerate(self.names) if name in own]

        def copied(value: Any) -> Any:  # some forwards take things out of the containers they are given
            return value.copy() if isinstance(value, (dict, list)) else value

        def called(state: list[str], args: Any, kwargs: Any) -> Any:
            with acting(layers, state):
                return original(*map(copied, args), **{key: copied(value) for key, value in kwargs.items()})

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if pipe.scheduler is not self.scheduler:
                raise ValueError("the pipeline was given another scheduler within rlg_pipeline: set it before entering")
            weights = self._weights(experts)
            with_base, active = needed(weights)
            states = [others] if with_base else []
            states += [[*others, self.names[experts[k]]] for k in active]
            outputs = [called(state, args, kwargs) for state in states]
            rest = [weights[k] for k in active][0 if with_base else 1 :]
            if self.true_cfg_scale is not None:
                self.calls.append((outputs, rest))
            return _mix(outputs, rest) if rest else outputs[0]

        return forward

    def _weights(self, experts: list[int]) -> list[float]:
        level = 0.0
        if any(callable(self.scales[k]) for k in experts):
            if self.step is None:
                raise ValueError(
                    "a schedule needs the steps of the pipeline's own loop: call the pipeline, or give a number"
                )
            level = float(self.step)
            if self.by == "noise":
                level = float(self.scheduler.timesteps[self.step]) / self.scheduler.config.num_train_timesteps
        return [float(scale_at(self.scales[k], level)) for k in experts]

    def _check_timestep(self, timestep: Any) -> None:
        """A schedule by noise looked up the wrong level if the loop did not begin with the scheduler's first step."""
        if self.by != "noise" or not any(callable(scale) for scale in self.scales):
            return
        meant = self.scheduler.timesteps[self.step or 0]
        if float(timestep) != float(meant):
            raise ValueError(
                f"the pipeline is at timestep {float(timestep):g} where its scheduler's step {self.step} is at "
                f'{float(meant):g}, as image-to-image does: give a schedule by="step", or a number'
            )

    def _exact(self, model_output: Tensor) -> Tensor:
        """The output for Qwen-Image's scheduler, with each network guided and rescaled before the mixture."""
        assert self.true_cfg_scale is not None
        if len(self.calls) != (1 if self.true_cfg_scale <= 1 else 2):
            raise ValueError(
                f"the pipeline called its network {len(self.calls)} times in a step, which does not fit true_cfg_scale="
                f"{self.true_cfg_scale}: give rlg_pipeline the value that the pipeline is called with (1 if there is "
                "no negative prompt)"
            )
        rest = self.calls[0][1]
        if len(self.calls) == 1 or not rest:
            return model_output
        tokens = model_output.shape[1]  # editing appends the image's tokens to what the network returns
        positive, negative = ([out[0][:, :tokens].float() for out in outputs] for outputs, _ in self.calls)
        guided = [qwen_norm_rescale(n, p, self.true_cfg_scale) for n, p in zip(negative, positive, strict=True)]
        mixed = [mix_outputs(outputs[0], outputs[1:], rest) for outputs in (negative, positive)]
        pipelines_own = qwen_norm_rescale(mixed[0], mixed[1], self.true_cfg_scale)
        tolerance = 1e-3 if model_output.dtype == torch.float32 else 5e-2
        if not (pipelines_own - model_output.float()).norm() <= tolerance * pipelines_own.norm():
            raise ValueError(
                f"with true_cfg_scale={self.true_cfg_scale} this step would not give what the pipeline has: give "
                "rlg_pipeline the value that the pipeline is called with"
            )
        return mix_outputs(guided[0], guided[1:], rest).to(model_output.dtype)


def _mix(outputs: Sequence[Any], weights: list[float]) -> Any:
    """Mixes the outputs of a forward, in any container, in at least float32; dtypes stay."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return mix_outputs(first, list(outputs[1:]), weights).to(first.dtype)
    if isinstance(first, BaseOutput):
        return type(first)(**{key: _mix([output[key] for output in outputs], weights) for key in first})
    if isinstance(first, (list, tuple)):
        return type(first)(_mix(parts, weights) for parts in zip(*outputs, strict=True))
    if first is None:
        return None
    raise TypeError(
        f"a denoiser returned {type(first).__name__}, which cannot be mixed: only tensors and sequences can"
    )


def _check_adapters(pipe: DiffusionPipeline, names: list[str], denoisers: dict[str, nn.Module]) -> None:
    layers = {name: adapter_layers(part) for name, part in denoisers.items()}
    available = {name: adapters_of(found) for name, found in layers.items()}
    for name in names:
        if not any(name in own for own in available.values()):
            raise ValueError(
                f"no adapter {name!r} on the denoiser of {type(pipe).__name__} (found {available}): load it with "
                f"pipe.load_lora_weights(..., adapter_name={name!r})"
            )
    for name, part in denoisers.items():
        if any(layer.merged for layer in layers[name]):
            raise ValueError(
                f"adapters are fused into the {name}, where they cannot be switched off: pipe.unfuse_lora()"
            )
        if isinstance(part, CacheMixin) and part.is_cache_enabled:
            raise ValueError(f"the {name} caches across calls, and base and tuned calls alternate: disable its cache")
    for name, part in pipe.components.items():
        own = adapters_of(adapter_layers(part)) if isinstance(part, nn.Module) and name not in denoisers else []
        if set(names) & set(own):
            raise ValueError(
                f"{', '.join(names)} also changes the {name}, which runs once for base and tuned: load the adapter "
                "for the denoiser alone"
            )
