"""The network's names for the layers of a LoRA from any program.

Spellings of diffusers and PEFT, old and new, are one rule of text. What names layers otherwise (kohya's sd-scripts,
ComfyUI, the original code of a model) is converted by the reader that the model's stock pipeline has, of which two
things are asked: that it leaves no name over, and that the changes it gives are as large as those in the file,

    sum over layers of ||s B A||^2, the same before and after,

since some readers drop what they do not know without a word. Strengths never go through it: a scale that all layers
share is kept apart, one of a layer alone is multiplied into its B.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flowrl.config.strict_yaml import read_mapping

_UNREAD: dict[str, str] = read_mapping(Path(__file__).with_suffix(".yaml"))
"""What a name is of that is no part of a LoRA that is read, the first that fits."""
_MERGED = (
    "only a LoRA on linear layers of the denoiser is read; merge this into the model with the program that made it, "
    "save that as a diffusers folder and set pipeline.model to it"
)
_ENCODER = re.compile(
    r"(?:base_model\.model\.)?(?:text_encoders?(?:_\d)?\.|lora_te\d?_|lora_prior_te_|te\d?\.|text_model\.|clip_[lg]\.|t5xxl\.|"
    r"conditioner\.|cond_stage_model\.)"
)
_WRAPPERS = ("base_model.model.", "module.", "transformer.", "unet.")
_INSIDE = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What compilers and wrappers of modules put between the parts of a name."""
_ADDED = re.compile(r"\.diff(?:_b)?$|\.lora_(?:B|up)\.bias$")
"""What is added to weights and biases as it is, so that zeros of it mean nothing."""
_OWN = re.compile(r"(.+)\.lora_(?:[AB]\.weight|magnitude_vector)$")
_OLDER = re.compile(r"(?:_lora|\.lora)\.(?:up|down)\.")
_ADAPTER = re.compile(r"\.(lora_[AB]|lora_magnitude_vector)\.(?!weight$|bias$)([^.]+)(\.weight|\.bias)?$")
_FOREIGN = re.compile(
    r"lora_unet_|lora_transformer_|lycoris_|(?:model\.)?diffusion_model\.|"
    r"(?:.*\.)?(?:double_blocks|single_blocks|joint_blocks|input_blocks|middle_block|output_blocks|self_attn|cross_attn)\."
)
_PAIR = re.compile(r"(.+?)([._])(lora_down|lora_up|lora_A|lora_B|lora\.down|lora\.up|down|up)\.weight$")
_READER_FAILS = (
    ValueError, KeyError, IndexError, AssertionError, NotImplementedError, AttributeError, TypeError, RuntimeError,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Stock:
    """The stock pipeline that a LoRA is for, as far as a reader of names needs to know it."""

    name: str
    """Of its class."""
    layers_per_block: int = 2
    """Of a UNet, which the original code numbers its blocks by."""


def plain_name(name: str) -> str:
    """PEFT's portable name of a tensor, without what wrappers, compilers and adapters put before and into it."""
    for inside in _INSIDE:
        name = name.replace(inside, "")
    while (wrapper := next((one for one in _WRAPPERS if name.startswith(one)), None)) is not None:
        name = name.removeprefix(wrapper)
    name = _ADAPTER.sub(r".\1\3", name)
    return name.removesuffix(".weight") if ".lora_magnitude_vector" in name else name


def _rename(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by their plain names. Raises ValueError: two have the same one, and are not the same."""
    found: dict[str, Tensor] = {}
    whose: dict[str, str] = {}
    for name, tensor in tensors.items():
        plain = plain_name(name)
        if plain in found and not torch.equal(found[plain], tensor):
            raise ValueError(
                f"the LoRA holds two different tensors for {plain} ({whose[plain]} and {name}), such as those of two "
                "adapters or of an average beside the weights: save one of them alone"
            )
        found[plain], whose[plain] = tensor, name
    return found


def _number(name: str, tensor: Tensor, what: str) -> float:
    """An alpha, which is one number of any shape."""
    if tensor.numel() != 1:
        raise ValueError(f"{what} has {tensor.numel()} numbers in {name}, and an alpha is one: get or save it again")
    return float(tensor)


def portable(
    tensors: Mapping[str, Tensor], stock: Stock | None, what: str
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Matrices and magnitudes of a file under PEFT's portable names, and the alpha of each layer that has one of its
    own; `stock` as for `read_lora`. Raises ValueError: no LoRA on the denoiser's linear layers, or unknown names."""
    tensors = {name: tensor for name, tensor in tensors.items() if not _ADDED.search(name) or bool(tensor.any())}
    for name, tensor in sorted(tensors.items()):
        if _PAIR.match(plain_name(name)) and not (tensor.is_floating_point() and tensor.numel()):
            kind = f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
            raise ValueError(
                f"{what} holds {name} as {kind}, and its matrices have to be floats and not empty (of rank 0): get or "
                "save it again"
            )
    tensors = _without_encoders(tensors, what)
    _refuse_unread(tensors, what)
    adapters = {match[2] for name in tensors if (match := _ADAPTER.search(name)) is not None}
    if len(adapters) > 1:
        raise ValueError(
            f"{what} holds {len(adapters)} adapters ({', '.join(sorted(adapters))}): save one of them alone"
        )
    if any(_FOREIGN.match(plain_name(name)) for name in tensors):
        found, alphas = _convert(tensors, stock, what)
        _check_own(found, what)
        return found, alphas
    found = _spelt(tensors)
    alphas = {
        name.removesuffix(".alpha"): _number(name, found.pop(name), what)
        for name in sorted(found)
        if name.endswith(".alpha")
    }
    _check_own(found, what)
    return found, {layer: alpha for layer, alpha in alphas.items() if f"{layer}.lora_A.weight" in found}


def _spelt(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Spellings of diffusers and PEFT, old and new, as PEFT's portable names."""
    from diffusers.utils import convert_unet_state_dict_to_peft

    found = _rename(tensors)
    if any(_OLDER.search(name) for name in found):
        found = convert_unet_state_dict_to_peft(found)
    respelt = {".lora_down.": ".lora_A.", ".lora_up.": ".lora_B."}
    for old, new in respelt.items():
        found = {name.replace(old, new): tensor for name, tensor in found.items()}
    return found


def _convert(
    tensors: Mapping[str, Tensor], stock: Stock | None, what: str
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """By the stock class's own reader; see the head of this file."""
    scale, given = _even(_rename(tensors))
    size, said = _size(given), ""
    reader = None if stock is None else _reader(stock)
    for attempt in _attempts(given) if reader is not None else ():
        assert reader is not None
        try:
            found = _spelt(_without_alphas(reader(attempt)))
        except _READER_FAILS as error:
            said = said or f" ({type(error).__name__}: {str(error).strip()[:120]})"
            continue
        if not found or not _all_own(found):
            continue
        if abs(_size(found) - size) <= 1e-3 * size:
            return _acting(found), _alphas(_acting(found), scale)
        said = " (a part of it would be lost)"
    # Programs that name layers as diffusers does put this before them for models without a reader of their own.
    bare = _without_alphas(_spelt({re.sub(r"^(model\.)?diffusion_model\.", "", name): t for name, t in given.items()}))
    if _all_own(bare):
        return bare, _alphas(bare, scale)
    first = min(tensors)
    whom = "diffusers" if stock is None else f"diffusers' {stock.name}"
    raise ValueError(
        f"{what} names layers in another program's way ({first}), which {whom} does not read{said}: it is of another "
        "model, or has to be converted to diffusers' form by the program that made it"
    )


def _without_alphas(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(".alpha")}


def _all_own(names: Iterable[str]) -> bool:
    """Whether all of these are PEFT's portable names of the network's own layers."""
    return all(_OWN.match(name) and not _FOREIGN.match(name) for name in names)


def _attempts(given: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Ways to write one file that readers differ in: the endings of names, and what stands before them."""
    down = {name.replace(".lora_A.", ".lora_down.").replace(".lora_B.", ".lora_up."): t for name, t in given.items()}
    for spelt in (dict(given), down):
        yield dict(spelt)
        if not any(name.startswith(("lora_", "diffusion_model.", "lycoris_")) for name in spelt):
            yield {f"diffusion_model.{name}": tensor for name, tensor in spelt.items()}


def _reader(stock: Stock) -> Any:
    """The converter of names for a stock class; None if it has none."""
    import diffusers

    from flowrl.runtime.private_names import LoraBaseMixin

    cls: Any = getattr(diffusers, stock.name, None)
    if not issubclass(cls or object, LoraBaseMixin):
        return None
    unet = SimpleNamespace(layers_per_block=stock.layers_per_block)

    def read(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = cls.lora_state_dict(tensors, unet_config=unet)  # those of transformers take no notice of it
        return found[0] if isinstance(found, tuple) else found

    return read


def _even(tensors: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """The scale that most layers share, and the tensors as if that were all: `alpha` is the rank, and B of a layer
    with another scale holds the difference."""
    found, scales = dict(tensors), dict[str, float]()
    pairs = _pairs(found)
    for stem, (down, _) in pairs.items():
        rank = found[down].shape[0]
        alpha = f"{stem}.alpha"
        scales[stem] = _number(alpha, found[alpha], "the LoRA") / rank if rank and alpha in found else 1.0
        if f"{stem}.alpha" in found or ".lora_down." in down:  # without one kohya's is the rank
            found[f"{stem}.alpha"] = torch.tensor(float(rank))
    common = Counter(scales.values()).most_common(1)[0][0] if scales else 1.0
    for stem, scale in scales.items():
        if scale != common:
            up = pairs[stem][1]
            found[up] = found[up].float() * (scale / common)
    return common, found


def _pairs(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, str]]:
    """Layer, as the file names it -> names of its two matrices."""
    found: dict[str, dict[str, str]] = {}
    for name in tensors:
        if (match := _PAIR.match(name)) is not None:
            side = "down" if match[3].endswith(("down", "A")) else "up"
            found.setdefault(match[1], {})[side] = name
    return {stem: (both["down"], both["up"]) for stem, both in found.items() if len(both) == 2}


def _size(tensors: Mapping[str, Tensor]) -> float:
    """Sum of ||B A||^2 over layers: the trace of (B^T B)(A A^T)."""
    total = 0.0
    for down, up in _pairs(tensors).values():
        a, b = tensors[down].flatten(1).double(), tensors[up].flatten(1).double()
        total += float(((b.T @ b) * (a @ a.T).T).sum())
    return total


def _acting(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without layers whose A and B are zeros, which readers make of a fused layer's part that was not trained."""
    still = {
        name.partition(".lora_")[0]
        for name, tensor in tensors.items()
        if name.endswith(".lora_A.weight")
        and not bool(tensor.any())
        and not bool(tensors[name.replace(".lora_A.", ".lora_B.")].any())
    }
    return {name: tensor for name, tensor in tensors.items() if name.partition(".lora_")[0] not in still}


def _alphas(tensors: Mapping[str, Tensor], scale: float) -> dict[str, float]:
    ends = ".lora_A.weight"
    return {n.removesuffix(ends): scale * t.shape[0] for n, t in tensors.items() if n.endswith(ends)}


def _without_encoders(tensors: Mapping[str, Tensor], what: str) -> dict[str, Tensor]:
    """Without parts for text encoders that do nothing; refuses others."""
    own = {name: tensor for name, tensor in tensors.items() if not _ENCODER.match(name)}
    encoders = {name: tensor for name, tensor in tensors.items() if name not in own}
    ends = (".up.weight", "lora_up.weight", "lora_B.weight")
    if any(bool(t.any()) for name, t in encoders.items() if name.endswith(ends) or ".lora_" not in name.lower()):
        raise ValueError(
            f"{what} also trains text encoders ({len(encoders)} of its {len(tensors)} tensors, first {min(encoders)}); "
            "flowrl trains the denoiser alone, and without them it would be another model: merge it into the model "
            "(pipe.load_lora_weights, pipe.fuse_lora, save_pretrained) and set pipeline.model to that, or train it "
            "without text encoders"
        )
    return own


def _refuse_unread(tensors: Mapping[str, Tensor], what: str) -> None:
    for name in sorted(tensors):
        plain = _ADAPTER.sub(r".\1\3", name)
        if _PAIR.match(plain) or plain.endswith(".alpha") or ".lora_magnitude_vector" in plain:
            if "lora_mid" not in plain:
                continue
        for pattern, kind in _UNREAD.items():
            if re.search(pattern, plain):
                raise ValueError(f"{what} holds {kind} ({name}): {_MERGED}")


def _check_own(tensors: Mapping[str, Tensor], what: str) -> None:
    """Refuses names that are no part of a LoRA, a LoRA on what is not linear, half a pair, and unlike ranks."""
    if not any(name.endswith(".lora_A.weight") for name in tensors):
        raise ValueError(f"{what} holds no LoRA: none of its {len(tensors)} tensors is a matrix named lora_A")
    if strange := sorted(name for name in tensors if not _OWN.match(name)):
        raise ValueError(f"{what} holds {len(strange)} unknown tensors (first: {strange[0]}): {_MERGED}")
    if folded := sorted(name for name, tensor in tensors.items() if ".lora_m" not in name and tensor.ndim != 2):
        raise ValueError(f"{what} also trains convolutions ({len(folded)} tensors, first {folded[0]}): {_MERGED}")
    for layer in {name.partition(".lora_")[0] for name in tensors}:
        if lacking := [side for side in "AB" if f"{layer}.lora_{side}.weight" not in tensors]:
            raise ValueError(f"{what} has no lora_{lacking[0]} of {layer}: it is damaged, get or save it again")
        rows, columns = tensors[f"{layer}.lora_A.weight"].shape[0], tensors[f"{layer}.lora_B.weight"].shape[1]
        if rows != columns:
            raise ValueError(
                f"{what} has a lora_A of rank {rows} and a lora_B of rank {columns} for {layer}: get or save it again"
            )
