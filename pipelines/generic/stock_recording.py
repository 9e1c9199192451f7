"""Records, without weights, the arguments of a stock pipeline's networks: for a plan.

The pipeline is made of its folder's own configurations: networks on the meta device, tokenizers and scheduler as they
are. Each network is run on the meta device where stock's call calls it, and answers with zeros on the CPU, so that
everything around networks (tokens, masks, positions, packing) has its numbers. Text encoders read every token, on which
shapes do not depend.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.pipelines.generic.generic_pipeline import GenericPipeline
from flowrl.pipelines.generic.stock_call import Reached
from flowrl.pipelines.shared import cards, common
from flowrl.pipelines.weights import stock_loading
from flowrl.pipelines.weights.meta_masks import EveryTokenRead
from flowrl.runtime.private_names import DiagonalGaussianDistribution

WORD = "a "
"""What long prompts are made of: no tokenizer makes less than one token of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """One evaluation of one sample without guidance, and what decodes finished latents; all on the meta device."""

    call: dict[str, Any]
    """Keyword arguments of the network."""
    size: tuple[int, int, int | None]
    """Height, width and frames of what is decoded; frames None of an image."""
    vae: nn.Module
    decoded: tuple[tuple[Any, ...], dict[str, Any]]
    """Arguments and named arguments of `vae.decode`."""
    text: int | None
    """Tokens that the network reads, where its argument `encoder_hidden_states` says so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorder:
    """A stock pipeline without weights."""

    pipeline: GenericPipeline
    calls: list[dict[str, Any]]
    """Named arguments of each call of a denoiser, in the order of calls."""
    parts: dict[str, int]
    """Name of a part that is no denoiser -> number of its parameters."""
    uncounted: tuple[str, ...]
    """Parts of unknown libraries, whose size is unknown."""

    def sized(self, height: int, width: int) -> Recorder:
        """The same drawing another size."""
        return replace(self, pipeline=self.pipeline.sized(height, width))

    def guided(self, text: str, scale: float) -> list[dict[str, Any]]:
        """The calls of one evaluation of one sample at a scale."""
        p = self.pipeline
        cond, negative = (p.encode([one], p.sources.examples(1, p.source_size)) for one in (text, ""))
        two = p.scale_name is not None and p.passes(scale) == 2
        velocity = p.guided(p.network, cond, negative if two else None, scale)
        schedule = p.schedule(2, "diffusers")
        if not p.latent_shape:
            p.find_latents()
        x = torch.zeros(1, *p.latent_shape)
        self.calls.clear()
        with torch.no_grad():
            velocity(x, schedule.sigma[0], schedule.timestep[0])
        return list(self.calls)

    def rows(self, text: str, scale: float) -> int:
        """Network rows that guidance takes per sample."""
        return sum(_rows(call) for call in self.guided(text, scale))

    def recorded(self, text: str) -> Recorded:
        """The calls that evaluate and decode one sample. Raises ValueError: stock's call uses its networks in a way
        that cannot be counted."""
        p = self.pipeline
        calls = self.guided(text, 1.0)
        if len(calls) != 1 or _rows(calls[0]) != 1:
            rows = [_rows(call) for call in calls]
            raise ValueError(f"{type(p.pipe).__name__} calls its network with {rows} rows for one sample unguided")
        args, named = self._decoding()
        call = calls[0]
        read = call.get("encoder_hidden_states")
        with torch.no_grad():
            made = p.pipe.vae.decode(*args, **named)
        made = made[0] if isinstance(made, (tuple, list)) else made.sample
        if len(made) != 1 or made.ndim != (5 if p.videos else 4):
            name = type(p.pipe).__name__
            raise ValueError(f"{name} decodes one sample as {list(made.shape)}, of which its size cannot be read")
        p.check_drawn(tuple(made.shape[-2:]))
        return Recorded(
            call=call,
            size=(made.shape[-2], made.shape[-1], made.shape[2] if p.videos else None),
            vae=p.pipe.vae,
            decoded=(args, named),
            text=read.shape[1] if isinstance(read, Tensor) and read.ndim == 3 else None,
        )

    def _decoding(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the decoding of one sample; the call ends there."""
        p = self.pipeline

        def decode(*args: Any, **named: Any) -> Any:
            raise Reached([(on_meta(args), on_meta(named))])  # of which `_decoded` takes the first

        with common.standing_in(p.pipe.vae, decode=decode), torch.no_grad():
            found = p.decoding(torch.zeros(1, *p.latent_shape))
        if not (isinstance(found, list) and len(found) == 1):
            raise ValueError(f"{type(p.pipe).__name__} does not decode by the decode of its vae")
        args, named = found[0]
        return args, named


def recorder(model: str, cls: Any, index: Mapping[str, Any], options: Any) -> Recorder:
    """A stock pipeline of a folder's configurations, without weights. Raises ValueError: a part cannot be made of what
    the folder holds."""
    calls: list[dict[str, Any]] = []
    denoisers: dict[str, nn.Module] = {}
    encoders, parts, sizes, uncounted = [], dict[str, Any](), dict[str, int](), []
    for name, entry in index.items():
        if name.startswith("_"):
            continue
        if name == "safety_checker" and entry[0] not in (None, "transformers"):  # stock's own, which is left out
            uncounted.append(name)
            parts[name] = None
            continue
        part = _part(model, name, entry) if isinstance(entry, (list, tuple)) else entry
        if isinstance(part, nn.Module):
            denoises = name.startswith(("transformer", "unet"))
            if not denoises:
                sizes[name] = sum(one.numel() for one in part.parameters())
            if denoises:
                part = denoisers[name] = _answering_zeros(part, calls)
            elif name == "vae":
                vars(part)["encode"] = lambda x, stock=part.encode: _each(stock(on_meta(x)), _zeros)
                for key, kept in list(part.named_buffers(recurse=False)):
                    part.register_buffer(key, _zeros(kept))
            else:
                part = _answering_zeros(part, None)
                encoders += [name] if name.startswith("text_encoder") else []
        parts[name] = part
    known = inspect.signature(cls.__init__).parameters
    pipe = cls(**{name: part for name, part in parts.items() if name in known})
    pipe.set_progress_bar_config(disable=True)
    pipe.__class__ = type(cls.__name__, (cls,), {"_execution_device": _CPU, "device": _CPU})
    p = GenericPipeline(model, pipe, denoisers, encoders, options, dtype=torch.float32, device=torch.device("cpu"))
    return Recorder(pipeline=p, calls=calls, parts=sizes, uncounted=tuple(uncounted))


def on_meta(value: Any) -> Any:
    """A value whose tensors have shapes, strides and dtypes alone."""
    return _each(value, lambda one: one.to("meta"))


_CPU = property(lambda self: torch.device("cpu"))
"""The device of what stands on none."""


def _part(model: str, name: str, entry: Any) -> Any:
    import diffusers
    import transformers

    library, kind = entry
    if library is None:
        return None
    cls = getattr({"diffusers": diffusers, "transformers": transformers}.get(library), str(kind), None)
    folder = Path(model) / name
    if cls is None or not folder.is_dir():
        raise ValueError(f"its part {name}, a {kind}, is {'of no library here' if cls is None else 'not here'}")
    if not issubclass(cls, nn.Module):
        return cls.from_pretrained(str(folder))
    config = cards.read_part(model, f"{name}/config.json")
    if config is None:
        raise ValueError(f"its part {name} has no config.json")
    if library == "diffusers":
        return stock_loading.on_meta(cls, config, str(folder))
    with torch.device("meta"):
        return cls(cls.config_class.from_pretrained(str(folder))).eval()


def _answering_zeros(network: nn.Module, calls: list[dict[str, Any]] | None) -> nn.Module:
    """What takes and gives tensors on the CPU in the place of a network on the meta device; `calls` gets arguments. The
    network itself stays of its very class, by which transformers knows what it has to give."""
    signature = inspect.signature(type(network).forward)
    rest = next((key for key, one in signature.parameters.items() if one.kind is one.VAR_KEYWORD), "")

    def called(*args: Any, **named: Any) -> Any:
        bound = signature.bind(network, *on_meta(args), **on_meta(named)).arguments
        given = dict(list(bound.items())[1:])  # by their names, without the network itself
        given |= given.pop(rest, {})
        if calls is not None:
            calls.append(given)
        with nullcontext() if calls is not None else EveryTokenRead():
            made = network(**given)
        return _each(made, _zeros)

    other = copy(network)
    other.__class__ = type(type(network).__name__, (type(network),), {"device": _CPU})
    other.forward = called  # type: ignore[method-assign]
    return other


def _zeros(one: Tensor) -> Tensor:
    return torch.zeros(one.shape, dtype=one.dtype)


def _each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A value with each of its tensors changed, those of lists, tuples and dictionaries (outputs are such) too."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed = {key: _each(one, change) for key, one in value.items()}
        return changed if type(value) is dict else type(value)(**changed)
    if isinstance(value, tuple) and type(value) is not tuple:
        return type(value)(*(_each(one, change) for one in value))
    if isinstance(value, DiagonalGaussianDistribution):
        return DiagonalGaussianDistribution(change(value.parameters))
    return type(value)(_each(one, change) for one in value) if isinstance(value, (list, tuple)) else value


def _rows(call: Mapping[str, Any]) -> int:
    """Samples of a call of a network: its first argument's, a tensor or a list of samples."""
    first = next(iter(call.values()))
    return len(first)
