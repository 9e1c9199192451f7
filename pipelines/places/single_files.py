"""Checkpoints in a single file of safetensors, as communities share them: what they are, and stock's loader of them.

A file holds weights alone. What else a pipeline has (model_index.json, configurations, tokenizers, and networks that
the file lacks) is read from a folder of the file's name without its ending, or one named `config`, beside it; else from
the published checkpoint that diffusers takes files with such keys for, out of the hub's cache or the net.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from flowrl.pipelines.places.hub_files import INDEX
from flowrl.pipelines.places.known_checkpoints import AGAIN, published
from flowrl.runtime.files import read_json

ENDING = ".safetensors"
_SMALL = ("*.json", "**/*.json", "*.txt", "**/*.txt", "**/*.model")
_NOISE = "model.diffusion_model.input_blocks.0.0.weight"  # of Stable Diffusion 1: diffusers takes all else for it
_MARKS = ("scaled_fp8", "comfy_quant", "scale_weight", "weight_scale", "scale_input", "input_scale")
_BESIDE = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
_VAE = ("first_stage_model.", "vae.")


class FilesMissing(ValueError):
    """The small files that belong to a single file are not on this machine."""


def is_single_file(model: str) -> bool:
    """Whether a location is a file of weights."""
    return model.endswith(ENDING) and Path(model).is_file()


def check_plain(model: str) -> None:
    """Refuses a file whose weights need scales or other numbers to be read: loaders drop those. A layer may have only
    `weight`, a bias and running statistics."""
    keys = header(model)
    layers = {key.removesuffix(".weight") for key in keys if key.endswith(".weight")}
    weights = {f"{layer}.weight" for layer in layers}
    scaled = []
    for key in keys:
        layer, _, last = key.rpartition(".")
        if last in _MARKS or layer in weights or (layer in layers and last not in _BESIDE):
            scaled.append(key)
    if scaled:
        raise ValueError(
            f"{model} holds scales or other remains of few bits beside its weights ({len(scaled)}, first "
            f"{', '.join(sorted(scaled)[:3])}), which loaders of single files drop: take the model's file in bfloat16 "
            "or float16, or its diffusers folder"
        )


def config_of(model: str) -> str:
    """Where the small files of a single file are: a folder beside it, or the hub id that its keys tell. Raises
    ValueError: the file is damaged, or no pipeline has such keys."""
    path = Path(model)
    for folder in (path.with_suffix(""), path.parent / "config"):
        if (folder / INDEX).is_file():
            return str(folder)
    return _hub_id(str(path.resolve()))


def small_part(model: str, name: str) -> dict[str, Any] | None:
    """A JSON file that goes with a single file: of the folder beside it, or the hub id's. Raises as `config_of`."""
    place = config_of(model)
    if Path(place).is_dir():
        path = Path(place) / name
        return read_json(path, AGAIN, finite=False) if path.is_file() else None
    known = published(place)
    if known is None:
        return None
    stated = {INDEX: known.index, "vae/config.json": known.vae}
    stated |= dict.fromkeys(("transformer/config.json", "unet/config.json"), known.network)
    return dict(stated[name]) if name in stated else None


def small_folder(model: str) -> str:
    """A folder with the small files of a single file, fetched where the hub can be asked. Raises ValueError: they are
    not on this machine; says which, and where to put them."""
    place = config_of(model)
    if Path(place).is_dir():
        return place
    from huggingface_hub import constants, snapshot_download

    try:
        return snapshot_download(
            place,
            allow_patterns=list(_SMALL),
            local_files_only=constants.is_offline_mode(),
            endpoint=constants.ENDPOINT,
        )
    except Exception as error:  # the transport raises errors of every kind
        own = Path(model).with_suffix("")
        raise FilesMissing(
            f"{model} holds weights alone, as {place} has them, and that one's small files are not on this machine: "
            f"put its {INDEX} and the JSON and TXT files of its parts (scheduler, tokenizers, configurations of "
            f"networks) into {own}, or have them downloaded ({type(error).__name__})"
        ) from error


def load_single(cls: Any, model: str, *, dtype: torch.dtype, exact: Sequence[str], options: Mapping[str, Any]) -> Any:
    """A stock pipeline of a single file, by `from_single_file` of its class. `options` are parts that are there
    already, or None for those that are not read; those of `exact` are float32. Raises ValueError: small files are
    missing, or weights are scaled."""
    import diffusers

    check_plain(model)
    folder, given = small_folder(model), dict(options)
    index = read_json(Path(folder) / INDEX, AGAIN, finite=False)
    inside = any(key.startswith(_VAE) for key in header(model))
    for part in exact:
        entry = index.get(part) or [None, None]
        if part not in given and entry[0] == "diffusers":
            kind = getattr(diffusers, entry[1])
            given[part] = (
                kind.from_single_file(model, config=folder, subfolder=part, torch_dtype=torch.float32)
                if inside
                else kind.from_pretrained(folder, subfolder=part, torch_dtype=torch.float32)
            )
    return cls.from_single_file(model, config=folder, torch_dtype=dtype, **given)


def header(model: str) -> dict[str, SimpleNamespace]:
    """Keys and shapes of a file's tensors, from its header alone. Raises ValueError: it is another file, or damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(model, framework="pt") as file:
            return {key: SimpleNamespace(shape=tuple(file.get_slice(key).get_shape())) for key in file.keys()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{model} is damaged or no file of weights ({error}): download it again") from error


@functools.cache
def _hub_id(model: str) -> str:
    """The hub id whose configuration diffusers takes for a file's keys."""
    from flowrl.runtime.private_names import DIFFUSERS_DEFAULT_PIPELINE_PATHS, infer_diffusers_model_type

    found = header(model)
    kind = infer_diffusers_model_type(found)
    if kind == "v1" and _NOISE not in found:
        raise ValueError(
            f"the keys of {model} are of no model that diffusers knows in a single file (the first is "
            f"{next(iter(found), 'none')}): convert it to a diffusers folder, or, if it is a LoRA, set policy.init_lora"
        )
    return str(DIFFUSERS_DEFAULT_PIPELINE_PATHS[kind]["pretrained_model_name_or_path"])
