"""The networks of a stock model folder, each read with an account of every weight."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flowrl.pipelines.places.known_checkpoints import AGAIN
from flowrl.pipelines.places.model_folders import Faulty, check_weight_files, part_class, part_entries, variant_of
from flowrl.pipelines.weights.stored_weights import Stored
from flowrl.runtime.failures import out_of_memory
from flowrl.runtime.files import read_json

_SHOWN = 3


def read_networks(
    folder: str, *, dtypes: Mapping[str, torch.dtype], given: Collection[str], variant: str | None
) -> dict[str, nn.Module]:
    """The networks of a model folder on the host, by the names of their parts, but for those of `given`. `dtypes` are
    those of parts, and of all others under "default". `variant` says which files of weights are read of those parts
    that have them, as stock pipelines do; None takes those without an ending. Raises Faulty: a part lacks weights or a
    file of them, holds some that its network does not read, or some of another shape; names part and weight."""
    found: dict[str, nn.Module] = {}
    kinds = {part: part_class(*entry) for part, entry in part_entries(folder).items()}
    networks = {part: kind for part, kind in kinds.items() if kind is not None and issubclass(kind, nn.Module)}
    variants = {part: {variant_of(path.name) for path in (Path(folder) / part).glob("*")} for part in networks}
    if variant is not None and not any(variant in there for there in variants.values()):
        raise Faulty(
            f"no part of {folder} has files of weights of the variant {variant} ({', '.join(variants)}): correct "
            "pipeline.variant, or remove it"
        )
    for part, kind in networks.items():
        if part not in given:
            own = variant if variant in variants[part] else None
            check_weight_files(folder, part, own)
            found[part] = _read(kind, folder, part, dtypes.get(part, dtypes["default"]), own)
    return found


def _read(kind: Any, folder: str, part: str, dtype: torch.dtype, variant: str | None) -> nn.Module:
    import transformers

    own, place = issubclass(kind, transformers.PreTrainedModel), f"{folder}/{part}"
    try:
        network, told = kind.from_pretrained(
            folder,
            subfolder=part,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **{"dtype" if own else "torch_dtype": dtype},
            **({} if variant is None else {"variant": variant}),
        )
    except Exception as error:
        if out_of_memory(error):
            raise
        file = Path(folder) / part / "config.json"
        config = read_json(file, finite=False) if file.is_file() else {}
        if said := _quantised(place, config):
            raise Faulty(said) from error
        raise ValueError(f"{place}: {reason(error, kind, config)}") from error
    if wrong := sorted(key for key, *_ in told["mismatched_keys"]):
        raise Faulty(f"{place} holds weights of another shape than its config.json says ({_some(wrong)}): {AGAIN}")
    unread = set(told["unexpected_keys"])
    if lacking := sorted(set(told["missing_keys"]) & _from_files(network)):
        raise Faulty(lacks(place, lacking, sorted(unread)))
    stored = Stored(_read_files(Path(place), variant))
    left = unread - stored.unscale(unread, network)
    if left := left - stored.left_over(left, network, towers=own):
        raise Faulty(
            f"{place} holds weights that its network, a {type(network).__name__}, does not read "
            f"({_some(sorted(left))}): without them it computes something else than the file was made for; take a file "
            "of weights that are not kept in few bits, or the config.json that belongs to this one"
        )
    if whole := stored.whole_numbers(network):
        raise Faulty(
            f"{place} holds weights as whole numbers or truth values ({_some(sorted(whole))}: "
            f"{whole[min(whole)]}), and nothing says what they stand for: take a file of weights that are not kept in "
            "few bits"
        )
    return network  # type: ignore[no-any-return]


def _read_files(place: Path, variant: str | None) -> list[Path]:
    """The files that libraries read of a part: safetensors before pickles, those with a variant or without."""
    for ending in (".safetensors", ".bin"):
        files = sorted(place.glob(f"*{ending}"))
        if chosen := [path for path in files if variant_of(path.name) == variant]:
            return chosen
    return []


def _from_files(network: nn.Module) -> set[str]:
    """What of a network has to come from files: its parameters, and statistics that it holds places for."""
    held = network.state_dict()
    return {name for name, _ in network.named_parameters()} | {
        name
        for name, one in network.named_buffers()
        if name in held and one.is_floating_point() and one.numel() > 1 and bool((one == one.flatten()[0]).all())
    }


def _quantised(place: str, config: Mapping[str, Any]) -> str:
    """Why a part that another library keeps in few bits could not be read; empty for others."""
    said = config.get("quantization_config")
    if not isinstance(said, dict):
        return ""
    method = said.get("quant_method", "another library")
    return (
        f"{place} is kept in few bits by {method} (quantization_config in its config.json), which is not read here: "
        "take the folder of the model in bfloat16, float16 or float32, and set pipeline.quantize to have it kept in "
        "few bits"
    )


def lacks(place: str, keys: Sequence[str], unread: Sequence[str] = ()) -> str:
    """That a part lacks weights, and perhaps has others in their place."""
    instead = f", and holds others that it does not ask for ({_some(unread)})" if unread else ""
    return f"{place} lacks weights that its config.json asks for ({_some(keys)}){instead}: {AGAIN}"


def reason(error: Exception, kind: Any, config: Mapping[str, Any]) -> str:
    """Why a class refused a part's configuration, with the keys that have another type than by default."""
    kinds = {int: float, tuple: list}  # JSON has one kind of number, and one of list
    found = [(one.name, one.default, config.get(one.name)) for one in inspect.signature(kind).parameters.values()]
    wrong = [
        f"{key} is {given!r} in config.json, and {usual!r} by default"
        for key, usual, given in found
        if not (usual is None or usual is inspect.Parameter.empty or given is None)
        and kinds.get(type(usual), type(usual)) is not kinds.get(type(given), type(given))
    ]
    return "; ".join([first_line(error), *wrong])


def first_line(error: Exception) -> str:
    """A library's error message, without its advice to its authors' address or to arguments that nobody has here."""
    return re.split(r" If you want| \(Cannot find an", (str(error).strip() or type(error).__name__).splitlines()[0])[0]


def _some(keys: Sequence[str]) -> str:
    return f"{len(keys)}, first {', '.join(keys[:_SHOWN])}"
