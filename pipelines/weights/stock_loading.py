"""From a stock checkpoint to networks on their device: read on the host, checked, frozen, moved.

A pipeline is read without denoisers, perhaps without text encoders; `Later` adds them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flowrl.config.locations import split_revision
from flowrl.pipelines.arithmetic.attention import give_kernel
from flowrl.pipelines.arithmetic.compiling import compile_blocks, repeated_blocks
from flowrl.pipelines.arithmetic.wide_products import checkpoint_blocks
from flowrl.pipelines.places.hub_files import did_you_mean
from flowrl.pipelines.places.known_checkpoints import AGAIN
from flowrl.pipelines.places.model_folders import Faulty, check_parts, part_class, part_entries, read_index
from flowrl.pipelines.places.single_files import FilesMissing, is_single_file, load_single, small_folder
from flowrl.pipelines.weights.loading_choices import AT_ONCE, Loading
from flowrl.pipelines.weights.meta_masks import callable_on_meta
from flowrl.pipelines.weights.parallelize import done_by_first, split_over, without_weights
from flowrl.pipelines.weights.quantize import quantize_blocks
from flowrl.pipelines.weights.stock_parts import first_line, lacks, read_networks, reason
from flowrl.prompts.tokenizer_checks import check_fits, check_tokenizer
from flowrl.runtime.failures import out_of_memory
from flowrl.runtime.files import read_json
from flowrl.runtime.placement import Resting

_REACHED = "a hub id that this machine can reach and is allowed to read"
Read = Callable[..., Any]
"""`load_stock` of one checkpoint: takes parts by name that are not to be read, a module that is there already or None,
and gives a stock pipeline on the host."""


def on_device(network: nn.Module, device: torch.device, how: Loading) -> nn.Module:
    """A denoiser read on the host, now frozen on its device: the only place that changes its form. Every denoiser of
    every run passes here once, before it has a LoRA, a kernel for its attention or compiled blocks."""
    network.requires_grad_(False).eval()
    if how.quantize != "none":
        quantize = partial(quantize_blocks, repeated_blocks(network), how.quantize, device)
        if how.split is None:
            quantize()  # a layer at a time comes to the device whole
        else:
            done_by_first(how.split, partial(quantize, "cpu"))  # from where each part goes to its device
    if how.split is not None:
        split_over(network, how.split, masters=how.masters)
    return network.to(device)


def load_denoisers(
    pipe: Any, read: Read, cls: Any, model: str, names: Sequence[str], device: torch.device, how: Loading
) -> dict[str, nn.Module]:
    """Reads denoisers that were left out of a stock pipeline, one after another, each onto the device before the next.
    Where they are split over processes the first reads and gives the others what is theirs. Raises as `load_stock`."""
    found = {}
    for name in names:
        load = partial(load_parts, pipe, read, [name])
        if how.split is None:
            load()
        elif not done_by_first(how.split, load):
            pipe.register_modules(**{name: without_weights(cls, read_config(cls, model, name))})
        found[name] = on_device(getattr(pipe, name), device, how)
        pipe.register_modules(**{name: found[name]})
    return found


def load_parts(pipe: Any, read: Read, names: Sequence[str]) -> None:
    """Reads parts left out of a stock pipeline into it, on the host. Raises as `load_stock`."""
    there = {name: part for name, part in pipe.components.items() if name not in names}
    found = read(**there)
    pipe.register_modules(**{name: getattr(found, name) for name in names})


def read_config(cls: Any, model: str, part: str) -> dict[str, Any]:
    """The configuration of a part that is not loaded, of a folder or the hub. Raises ValueError: unreadable."""
    try:
        return dict(cls.load_config(**_place(model), subfolder=part))
    except (OSError, ValueError) as error:
        raise ValueError(f"could not read the configuration of {model}/{part} ({error}): {AGAIN}") from error


def index_entries(model: str, names: Sequence[str]) -> dict[str, Any]:
    """What the model_index.json of a folder or hub id says of parts that are not loaded."""
    index = diffusers.DiffusionPipeline.load_config(**_place(model))
    return {name: index[name] for name in names if name in index}


def _place(model: str) -> dict[str, Any]:
    """A model as diffusers' loaders of configurations take it: a folder or hub id, and its revision."""
    if is_single_file(model):
        return {"pretrained_model_name_or_path": small_folder(model)}
    name, revision = split_revision(model)
    return {"pretrained_model_name_or_path": name, **({} if revision is None else {"revision": revision})}


def quiet_libraries() -> None:
    """Silences loading bars and the stock warning that prints every padded prompt of a short context."""
    import transformers  # takes a second, which plans and checks avoid

    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


class _Undrawn(TorchFunctionMode):
    """Inside, no numbers are drawn for new weights: for those without numbers, torch would derive that in Python."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DRAWING:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


_DRAWING = {nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_, Tensor.uniform_, Tensor.normal_}


def on_meta(cls: Any, config: Mapping[str, Any], place: str = "") -> nn.Module:
    """A network without weights, which can be called with arguments without numbers. Raises ValueError: the class
    refuses its configuration; names `place`, where it is from, and the keys that seem wrong."""
    try:
        with torch.device("meta"), _Undrawn():
            return callable_on_meta(cls.from_config(dict(config)))
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{place or cls.__name__}: {reason(error, cls, config)}: {AGAIN}") from error


def load_stock(
    name: str, model: str, *, title: str, dtype: torch.dtype, exact: Sequence[str], how: Loading = AT_ONCE,
    **options: Any,
) -> Any:  # fmt: skip
    """A stock pipeline from a folder or the hub, perhaps at a revision, on the CPU. Parts of `exact` stay in float32,
    never rounded on the way; `how.variant` says which files of weights are read, and `options` are further arguments of
    `from_pretrained`. Raises ValueError: nothing loadable there, or a file is damaged or lacks weights; names it."""
    quiet_libraries()
    parts, cls = {"default": dtype, **dict.fromkeys(exact, torch.float32)}, getattr(diffusers, name)
    try:
        if is_single_file(model):
            pipe = load_single(cls, model, dtype=dtype, exact=exact, options=options)
        else:
            folder = model if Path(model).is_dir() else _download(cls, model, how.variant, options)
            check_parts(folder, read_index(folder), given=options)
            networks = read_networks(folder, dtypes=parts, given=options, variant=how.variant)
            pipe = cls.from_pretrained(folder, dtype=parts, **networks, **options)
    except (Faulty, FilesMissing):
        raise
    except Exception as error:  # damaged files and foreign ones make the libraries raise errors of every kind
        if out_of_memory(error):
            raise
        fault = _fault(Path(model)) if Path(model).is_dir() else ""
        first = fault or (_unread_part(model) if Path(model).is_dir() else "") or first_line(error)
        cure = AGAIN if fault else f"give a folder written by save_pretrained, or {_REACHED}{did_you_mean(model)}"
        cure = "install it, or choose another model" if isinstance(error, ImportError) else cure
        raise ValueError(f"could not load {model!r} as a {title} pipeline ({first}): {cure}") from error
    _check_parts(pipe, model, options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _download(cls: Any, model: str, variant: str | None, options: Mapping[str, Any]) -> str:
    """The folder of a hub id's files, downloaded where they are not here; parts that `options` has are left out."""
    hub_id, revision = split_revision(model)
    return str(cls.download(hub_id, revision=revision, variant=variant, **options))


def fetch(model: str, variant: str | None) -> None:
    """Downloads what `load_stock` will read of a hub id, if it is one. Raises ValueError: it cannot be downloaded."""
    if Path(model).is_dir() or is_single_file(model):
        return
    quiet_libraries()
    try:
        _download(diffusers.DiffusionPipeline, model, variant, {})
    except Exception as error:  # of the hub, of the network, of the disk
        raise ValueError(
            f"could not download {model!r} ({first_line(error)}): give a folder, or {_REACHED}{did_you_mean(model)}"
        ) from error


def _check_parts(pipe: Any, model: str, given: Mapping[str, Any]) -> None:
    """Refuses networks that lack weights or have some that are not numbers, and tokenizers that are damaged or of
    another encoder; skips `given`."""
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    for part, module in pipe.components.items():
        if not isinstance(module, nn.Module) or given.get(part) is not None:
            continue
        place, weights = f"{model}/{part}", dict(module.named_parameters())
        if lacking := [key for key, weight in weights.items() if weight.is_meta]:
            raise ValueError(lacks(place, lacking))
        for key, weight in weights.items():
            # A sum takes no memory beside the weight, and what is not finite in it stays so.
            if weight.is_floating_point() and not bool(weight.detach().sum(dtype=torch.float64).isfinite()):
                raise ValueError(
                    f"{place} holds NaN or infinity ({key}), read as {str(weight.dtype).removeprefix('torch.')}: the "
                    "file is damaged or of a training that diverged, or its numbers are too large for "
                    f"pipeline.dtype=float16; {AGAIN}, or set pipeline.dtype=bfloat16"
                )
    for part, words in pipe.components.items():
        words = vars(words).get("tokenizer") if isinstance(words, ProcessorMixin) else words
        if not isinstance(words, PreTrainedTokenizerBase):
            continue
        encoder = pipe.components.get(re.sub("^(tokenizer|processor)", "text_encoder", part))
        if given.get(part) is None:
            check_tokenizer(words, f"{model}/{part}", AGAIN)
        if isinstance(encoder, nn.Module):
            check_fits(words, encoder, f"{model}/{part}")


def _unread_part(model: str) -> str:
    """Which part besides the networks a library cannot read, and why, after a folder failed to load."""
    for part, entry in part_entries(model).items():
        kind: Any = part_class(*entry)
        if kind is not None and not issubclass(kind, nn.Module):
            try:
                kind.from_pretrained(model, subfolder=part)
            except Exception as error:
                return f"{model}/{part}: {first_line(error)}"
    return ""


def _fault(folder: Path) -> str:
    """Which file of a model's folder is damaged, after it failed to load; empty if none seems to be."""
    for path in (*folder.glob("model_index.json"), *sorted(folder.glob("*/*config.json"))):
        try:
            read_json(path, finite=False)
        except ValueError as error:
            return str(error)
    for path in sorted(folder.glob("*/*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            return f"{path} is damaged or cut short ({error})"
    for path in sorted(folder.glob("*/*.bin")):
        if not list(path.parent.glob("*.safetensors")):
            return f"{path} is a pickle, damaged or with more than tensors in it, and no code of it is run"
    return ""


def freeze(pipe: Any, device: torch.device | str, names: Collection[str] | None = None) -> None:
    """Freezes networks of a stock pipeline on a device, those named or all that are there, the autoencoder in float32.
    Images' autoencoders also get channels-last weights, a quarter faster to decode on CPU and GPU."""
    images = not any(isinstance(module, nn.Conv3d) for module in pipe.vae.modules())
    pipe.vae.to(torch.float32, memory_format=torch.channels_last if images else torch.preserve_format)
    for name, part in pipe.components.items():
        if isinstance(part, nn.Module) and (names is None or name in names):
            part.requires_grad_(False).eval().to(device)


def _present(p: Any, names: Sequence[str]) -> list[str]:
    """Those of some parts that the checkpoint has."""
    return [name for name in names if (p.card.index.get(name) or [None])[0] is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Later:
    """How to load the rest of a `FamilyPipeline` `p`; `Family.load` explains each."""

    read: Read
    how: Loading
    attention: str
    compile: str

    def text_encoders(self, p: Any) -> bool:
        """Loads missing text encoders onto the device; returns whether there were any. They load together: stock
        classes use all of them for every prompt."""
        names = [name for name in _present(p, p.family.encoders) if getattr(p.pipe, name) is None]
        if names:
            load_parts(p.pipe, self.read, names)
            self.encoders_ready(p)
        return bool(names)

    def encoders_ready(self, p: Any) -> None:
        """Moves loaded text encoders to their device."""
        rests = "text_encoders" in self.how.offload
        freeze(p.pipe, "cpu" if rests else p.device, p.family.encoders)
        p.family.prepare_encoders(p)
        if rests:
            self._rest(p, "text_encoders", p.family.encoders)

    def rest(self, p: Any) -> None:
        """Moves what encodes and decodes images to the host."""
        if "text_encoders" in self.how.offload:
            self._rest(p, "image_encoder", ("image_encoder",))
        if "vae" in self.how.offload:
            self._rest(p, "vae", ("vae", "audio_vae", "vocoder"))

    def _rest(self, p: Any, what: str, names: Sequence[str]) -> None:
        networks = [part for name in names if isinstance(part := getattr(p.pipe, name, None), nn.Module)]
        p.resting[what] = Resting(networks, p.device)

    def denoiser(self, p: Any) -> None:
        """Loads the denoiser, or all experts, ready to be called."""
        names = _present(p, p.family.denoisers)
        found = load_denoisers(p.pipe, self.read, p.family.network, p.card.model, names, p.device, self.how)
        for part in found.values() if p.options.gradient_checkpointing else ():
            checkpoint_blocks(part, p.device, p.dtype)
        p.take(found)
        p.family.prepare(p)
        known = p.family.attention.known(p.card.network)
        p.take(found, give_kernel(found.values(), self.attention, known, p.dtype, p.device))
        if self.compile == "blocks":
            compile_blocks(p.denoiser)
