"""LoRAs in files of any program: what is read of them, and what is refused.

A LoRA that is read is one rank, one alpha and one variant. Where layers of a file differ in rank, the smaller ones get
rows and columns of zeros, which act on nothing and, being zero on both sides, get no gradient either; where they differ
in alpha / rank, the difference is multiplied into B. Both leave `s B A` of every layer as the file says it.

What alpha is: the one that the file or its card states for a layer; PEFT's default (8) where a card states none, as
PEFT and diffusers read it; the rank, where there is neither card nor metadata.
"""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from flowrl.config.strict_yaml import read_mapping
from flowrl.pipelines.places.lora_places import CARD, PEFT_FILE, lora_files
from flowrl.pipelines.weights.lora_names import Stock, plain_name, portable
from flowrl.runtime.files import parse_json, read_json

_CARDS = read_mapping(Path(__file__).with_suffix(".yaml"))
_KINDS = {
    **dict.fromkeys(_CARDS["switches"], (bool, "true or false")),
    **dict.fromkeys(_CARDS["objects"], (dict, "an object of names and numbers")),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """A LoRA as read."""

    place: Path
    """The given place."""
    tensors: dict[str, Tensor]
    """By PEFT's portable names (`transformer_blocks.0.attn.to_q.lora_A.weight`), those of a model of two experts with
    the expert's name before them."""
    rank: int
    """Of every layer."""
    alpha: float
    """Of every layer."""
    variant: str
    """One of `flowrl.pipelines.weights.lora.VARIANTS`."""

    @property
    def layers(self) -> list[str]:
        """Names of the layers, in order."""
        return sorted({name.partition(".lora_")[0] for name in self.tensors})

    @property
    def scale(self) -> float:
        """What `B A` is multiplied by, see `flowrl.pipelines.weights.lora.VARIANTS`."""
        return self.alpha / (math.sqrt(self.rank) if self.variant == "rslora" else self.rank)


def read_lora(place: Path, stock: Stock | None = None) -> Lora:
    """Reads a LoRA of any program from a place of `lora_files`; where `stock`, that of its model, is None, in the
    spellings of diffusers and PEFT alone. Raises ValueError: there is none, it is damaged, or something else than LoRA,
    rsLoRA or DoRA on linear layers of the denoiser."""
    tensors, scales, alphas, variants = dict[str, Tensor](), dict[str, float](), set[float](), set[str]()
    for expert, path in lora_files(place).items():
        own, stated = _tensors(path), _read_card(path)
        _refuse_stated(stated, path)
        what = f"the LoRA in {path}"
        found, of_layers = portable(own, stock, what)
        prefix = f"{expert}." if expert else ""
        variants.add(_variant(found, stated))
        for layer in sorted({name.partition(".lora_")[0] for name in found}):
            rank = found[f"{layer}.lora_A.weight"].shape[0]
            alpha = _alpha(layer, rank, stated, of_layers, what)
            scales[prefix + layer] = alpha / (math.sqrt(rank) if stated.get("use_rslora") else rank)
            alphas.add(alpha)
        tensors |= {prefix + name: tensor for name, tensor in found.items()}
    if len(variants) > 1:
        raise ValueError(
            f"the LoRAs of the two experts in {place} are {' and '.join(sorted(variants))}: train them alike"
        )
    [variant] = variants
    ranks = {name: tensor.shape[0] for name, tensor in tensors.items() if name.endswith(".lora_A.weight")}
    rank = max(ranks.values())
    common = Counter(scales.values()).most_common(1)[0][0]
    alpha = common * (math.sqrt(rank) if variant == "rslora" else rank)
    alpha = next((one for one in alphas if math.isclose(one, alpha)), alpha)  # as it is written, to the bit
    for layer, scale in scales.items():
        down, up = f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"
        if scale != common:
            tensors[up] = tensors[up].float() * (scale / common)
        if (more := rank - tensors[down].shape[0]) > 0:
            tensors[down] = torch.cat([tensors[down], tensors[down].new_zeros(more, tensors[down].shape[1])])
            tensors[up] = torch.cat([tensors[up], tensors[up].new_zeros(tensors[up].shape[0], more)], dim=1)
    return Lora(place=place, tensors=tensors, rank=rank, alpha=alpha, variant=variant)


def _variant(tensors: Mapping[str, Tensor], stated: Mapping[str, Any]) -> str:
    if stated.get("use_dora") or any(".lora_magnitude_vector" in name for name in tensors):
        return "dora"
    return "rslora" if stated.get("use_rslora") else "lora"


def _alpha(layer: str, rank: int, stated: Mapping[str, Any], of_layers: Mapping[str, float], what: str) -> float:
    """Alpha of a layer; see the head of this file."""
    if stated and "lora_alpha" not in stated:
        stated = {**stated, "lora_alpha": _defaults()["lora_alpha"]}
    alpha = of_layers.get(layer, stated.get("lora_alpha", rank))
    if pattern := stated.get("alpha_pattern"):
        from flowrl.runtime.private_names import get_pattern_key

        alpha = pattern.get(get_pattern_key(list(pattern), layer), alpha)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < float("inf"):
        raise ValueError(f"{what} states lora_alpha {alpha!r}: it must be a number above 0")
    return alpha


def _read_card(path: Path) -> dict[str, Any]:
    """What a card beside the file, or the file's own metadata, states."""
    card = path.with_name(CARD)
    if path.stem == "adapter_model" or (card.is_file() and not path.with_name(PEFT_FILE).exists()):
        if not card.exists():
            raise ValueError(f"{path} needs the {CARD} it was saved with: only that one states its alpha")
        return dict(read_json(card, "save the LoRA again", finite=False))
    if path.suffix not in (".safetensors", ".sft"):
        return {}
    with _damaged(path), safe_open(path, framework="pt") as file:
        notes = file.metadata() or {}
    stated = parse_json(notes.get("lora_adapter_metadata", "{}"), f"the metadata of {path}")
    if not isinstance(stated, dict):
        raise ValueError(f"the metadata of {path} is not an object: save the LoRA again")
    return {plain_name(key): value for key, value in stated.items() if not key.startswith("text_encoder")}


def _refuse_stated(stated: Mapping[str, Any], path: Path) -> None:
    """Refuses what a card states that would make another model of it than the tensors alone do."""
    if stated.get("peft_type", "LORA") != "LORA":
        raise ValueError(f"the adapter in {path} is of the type {stated['peft_type']}: only LORA is read")
    for key, (kind, named) in _KINDS.items():
        if not isinstance(stated.get(key) or kind(), kind):
            raise ValueError(
                f"the LoRA in {path} states {key}={stated[key]!r}, which has to be {named}: correct it there"
            )
    start = stated.get("init_lora_weights", True)
    if start not in _CARDS["starts"]:
        raise ValueError(
            f"the LoRA in {path} was started with init_lora_weights={start!r}, which may change the base's weights "
            "too, and the file holds the LoRA alone: save it again by PEFT's save_pretrained(..., "
            "path_initial_model_for_weight_conversion=FOLDER), which makes an ordinary LoRA of it"
        )
    other = {key: value for key, value in stated.items() if key not in (*_CARDS["free"], "peft_type")}
    defaults = _defaults() if other else {}
    odd = {k: value for k, value in other.items() if value != defaults.get(k) and (value or defaults.get(k))}
    if odd:
        shown = ", ".join(f"{key}={value!r:.60}" for key, value in sorted(odd.items()))
        raise ValueError(
            f"the LoRA in {path} states {shown}, which makes another model of it than a LoRA, rsLoRA or DoRA on linear "
            "layers: merge it into the model (PEFT's merge_and_unload, save_pretrained) and set pipeline.model to that"
        )


def _defaults() -> dict[str, Any]:
    """PEFT's own default where a card says nothing."""
    from peft import LoraConfig

    usual = LoraConfig()
    found = {field.name: getattr(usual, field.name) for field in fields(LoraConfig)}
    return {key: None if is_dataclass(value) else value for key, value in found.items()}


def _tensors(path: Path) -> dict[str, Tensor]:
    """The content of a file; runs nothing in it. Raises ValueError: it is damaged, or holds more than tensors."""
    if path.suffix in (".safetensors", ".sft"):
        with _damaged(path):
            return load_file(path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise ValueError(
            f"{path} cannot be read as a file of tensors alone ({str(error).splitlines()[0][:120]}): save the LoRA as "
            "safetensors"
        ) from error
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    if not isinstance(found, dict) or not all(isinstance(one, Tensor) for one in found.values()):
        raise ValueError(f"{path} holds more than named tensors: save the LoRA as safetensors")
    return {str(name): tensor for name, tensor in found.items()}


@contextmanager
def _damaged(path: Path) -> Iterator[None]:
    """Names the file that could not be read."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}): it is damaged or cut short, get or save it again"
        ) from error
