"""Writes a LoRA under the names of PEFT, ComfyUI and kohya, as far as stock diffusers reads them.

diffusers' own `load_lora_weights` reads every form written here. A layer that it would not find is refused. Names:

    comfyui  SD3, FLUX, Qwen-Image  transformer.LAYER.lora_A.weight     the scale multiplied into lora_B
             Wan                    diffusion_model.blocks.0.self_attn.q.lora_A.weight     likewise
             SD 1 and 2, SDXL       as kohya
    kohya    SD 1 and 2, SDXL, Qwen-Image  lora_unet_LAYER_WITH_UNDERSCORES.lora_down.weight, .lora_up.weight, .alpha
             FLUX                   lora_unet_double_blocks_0_img_attn_qkv and so on, of the fused layers

A fused layer of FLUX holds q, k and v side by side. Their LoRAs of rank r become one of rank 3r (4r where the layer
also holds the MLP): lora_down is the three stacked, lora_up is block-diagonal and alpha grows with the rank, so that
the product stays the same to the bit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from flowrl.pipelines.places.lora_places import EXPERTS, LORA_FILE
from flowrl.pipelines.weights.lora import refuse_not_finite
from flowrl.pipelines.weights.lora_files import read_lora
from flowrl.pipelines.weights.lora_names import Stock

Layers = dict[str, tuple[Tensor, Tensor]]
"""Layer -> lora_A [r, in], lora_B [out, r]."""

_FLUX = ("flux", "kontext", "flux_fill")
_QWEN = ("qwen_image", "qwen_image_edit")
_UNET = ("sd", "sdxl")
_ATTENTION = re.compile(r"transformer_blocks\.\d+\.attn[12]\.to_(?:q|k|v|out\.0)$")
_JOINT = re.compile(
    r"transformer_blocks\.\d+\.(?:attn\.(?:to_[qkv]|add_[qkv]_proj|to_out\.0|to_add_out)"
    r"|(?:img|txt)_(?:mlp\.net\.(?:0\.proj|2)|mod\.1))$"
)
_WAN = {
    "attn1": "self_attn", "attn2": "cross_attn", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o",
    "add_k_proj": "k_img", "add_v_proj": "v_img",
}  # fmt: skip
_FLUX_FUSED = {"img": ("to_q", "to_k", "to_v"), "txt": ("add_q_proj", "add_k_proj", "add_v_proj")}
_FLUX_ALONE = {"img": "to_out.0", "txt": "to_add_out"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedLora:
    """A LoRA of one network, as read from disk."""

    layers: Layers
    alpha: float
    """Alpha as stated in its file."""
    variant: str
    """One of `flowrl.pipelines.weights.lora.VARIANTS`."""
    magnitudes: Mapping[str, Tensor]
    """Magnitudes of a DoRA, by layer."""

    def scale(self, layer: str) -> float:
        """The factor of B A: alpha / r, or alpha / sqrt(r) for an rsLoRA."""
        rank = self.layers[layer][0].shape[0]
        return self.alpha / (math.sqrt(rank) if self.variant == "rslora" else rank)


def saved_loras(place: Path, stock: Stock | None = None) -> dict[str, SavedLora]:
    """The LoRA of a file, a folder or a run, one for each network of a model of two experts (`transformer`,
    `transformer_2`), else under the name ""; `place` and `stock` as `flowrl.pipelines.weights.lora_files.read_lora`
    takes them. Raises ValueError: there is none, or one that cannot be read."""
    lora = read_lora(place, stock)
    tensors = lora.tensors
    parts = {name.partition(".")[0] for name in tensors}
    networks = sorted(parts) if parts == set(EXPERTS) else [""]
    found = {}
    for network in networks:
        prefix = f"{network}." if network else ""
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        layers = {
            name.removesuffix(".lora_A.weight"): (tensor, own[name.replace(".lora_A.", ".lora_B.")])
            for name, tensor in own.items()
            if name.endswith(".lora_A.weight")
        }
        magnitudes = {name.partition(".lora_")[0]: tensor for name, tensor in own.items() if "magnitude" in name}
        found[network] = SavedLora(layers=layers, alpha=lora.alpha, variant=lora.variant, magnitudes=magnitudes)
    return found


def finite_loras(place: Path, stock: Stock | None = None) -> dict[str, SavedLora]:
    """As `saved_loras`, for a LoRA to share or merge. Raises ValueError: as there, or it holds NaN or infinity."""
    loras = saved_loras(place, stock)
    for lora in loras.values():
        tensors = {layer: up for layer, (_, up) in lora.layers.items()}
        refuse_not_finite(tensors, f"the LoRA in {place}", "take an earlier one")
    return loras


def stock_files(folder: Path) -> dict[str, tuple[dict[str, Tensor], dict[str, str]]]:
    """The files of a LoRA in diffusers' layout, by their names in the folder: tensors and what they state of rank,
    alpha and layers; nothing else of their metadata. Empty for a LoRA in PEFT's layout."""
    folder, found = folder.parent if folder.name == LORA_FILE else folder, {}
    for name in (LORA_FILE, f"transformer_2/{LORA_FILE}"):
        if (folder / name).is_file():
            with safe_open(folder / name, framework="pt") as file:
                notes = {key: text for key, text in (file.metadata() or {}).items() if key == "lora_adapter_metadata"}
            found[name] = load_file(folder / name), notes
    return found


def comfyui_tensors(lora: SavedLora, family: str) -> dict[str, Tensor]:
    """The tensors for ComfyUI's `Load LoRA`. Raises ValueError: no checked form of the family, variant or a layer."""
    _refuse_dora(lora, "comfyui")
    if family in _UNET:
        return kohya_tensors(lora, family)
    if family == "sd3" or family in _FLUX or family in _QWEN:
        return _named(lora, lambda layer: f"transformer.{layer}", folded=True)
    if family == "wan":
        return _named(lora, _wan_name, folded=True)
    raise ValueError(_refusal("comfyui", family, "take `form` diffusers, or merge the LoRA with flowrl merge"))


def kohya_tensors(lora: SavedLora, family: str) -> dict[str, Tensor]:
    """The tensors of a file in the form of kohya's sd-scripts, alpha among them. Raises as `comfyui_tensors`."""
    _refuse_dora(lora, "kohya")
    if family in _FLUX:
        return _flux_kohya(lora)
    known = _ATTENTION if family in _UNET else _JOINT
    if family not in (*_UNET, *_QWEN):
        raise ValueError(_refusal("kohya", family, "take `form` comfyui or diffusers"))
    tensors: dict[str, Tensor] = {}
    for layer, (down, up) in lora.layers.items():
        if not known.search(layer):
            raise ValueError(_unknown_layer("kohya", layer))
        name = f"lora_unet_{layer.replace('.', '_')}"
        tensors |= _kohya(name, down, up, lora.scale(layer))
    return tensors


def peft_tensors(lora: SavedLora) -> dict[str, Tensor]:
    """The tensors of PEFT's adapter_model.safetensors."""
    return _named(lora, lambda layer: f"base_model.model.{layer}", folded=False) | {
        f"base_model.model.{layer}.lora_magnitude_vector": tensor for layer, tensor in lora.magnitudes.items()
    }


def _kohya(name: str, down: Tensor, up: Tensor, scale: float) -> dict[str, Tensor]:
    return {
        f"{name}.lora_down.weight": down,
        f"{name}.lora_up.weight": up,
        f"{name}.alpha": torch.tensor(scale * down.shape[0], dtype=torch.float32),
    }


def _named(lora: SavedLora, name_of: Callable[[str], str], *, folded: bool) -> dict[str, Tensor]:
    """A and B under PEFT's endings, without alpha: where it is `folded` into B, readers take the rank for it."""
    tensors = {}
    for layer, (down, up) in lora.layers.items():
        name = name_of(layer)
        tensors[f"{name}.lora_A.weight"] = down
        tensors[f"{name}.lora_B.weight"] = up * lora.scale(layer) if folded else up
    return tensors


def _wan_name(layer: str) -> str:
    found = re.fullmatch(r"blocks\.(\d+)\.(attn[12])\.(.+)", layer)
    if found is None or found[3] not in _WAN:
        raise ValueError(_unknown_layer("comfyui", layer))
    return f"diffusion_model.blocks.{found[1]}.{_WAN[found[2]]}.{_WAN[found[3]]}"


def _flux_kohya(lora: SavedLora) -> dict[str, Tensor]:
    left, tensors = dict(lora.layers), dict[str, Tensor]()
    for block in sorted({layer.partition(".attn.")[0] for layer in lora.layers}):
        kind, _, number = block.rpartition(".")
        single = kind == "single_transformer_blocks"
        for side, names in _FLUX_FUSED.items() if kind in ("transformer_blocks", "single_transformer_blocks") else ():
            layers = [f"{block}.attn.{name}" for name in names]
            if all(layer in left for layer in layers):
                fused = [left.pop(layer) for layer in layers]
                rank, width = fused[0][0].shape
                if single:  # its MLP has 4 times the width and no LoRA here: its rows and columns are zeros
                    fused.append((torch.zeros(rank, width), torch.zeros(4 * width, rank)))
                name = f"single_blocks_{number}_linear1" if single else f"double_blocks_{number}_{side}_attn_qkv"
                downs, ups = zip(*fused, strict=True)
                down = torch.cat(downs)
                up = torch.block_diag(*ups).to(down.dtype)
                tensors |= _kohya(f"lora_unet_{name}", down, up, lora.scale(layers[0]))
            alone = f"{block}.attn.{_FLUX_ALONE[side]}"
            if alone in left and not single:
                name = f"lora_unet_double_blocks_{number}_{side}_attn_proj"
                tensors |= _kohya(name, *left.pop(alone), lora.scale(alone))
    if left:
        raise ValueError(
            f"{_unknown_layer('kohya', min(left))}; FLUX has q, k and v fused there, so that a LoRA has to be on all "
            "three or on none"
        )
    return tensors


def _refuse_dora(lora: SavedLora, form: str) -> None:
    if lora.variant == "dora":
        raise ValueError(
            f"`form` {form} is not written for a DoRA: diffusers drops the magnitudes of such a file, and images "
            "would differ without a word; take `form` diffusers or peft, or merge it with flowrl merge"
        )


def _refusal(form: str, family: str, instead: str) -> str:
    return (
        f"`form` {form} is not written for {family}: diffusers' own reader does not take it back from such a file, so "
        f"nothing could be checked; {instead}"
    )


def _unknown_layer(form: str, layer: str) -> str:
    return f"`form` {form} knows no name for the layer {layer} that this LoRA trained: take `form` diffusers or peft"
