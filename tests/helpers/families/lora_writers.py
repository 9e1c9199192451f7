"""LoRA files as programs write them, and what a network says with one as flowrl, stock and the formula read it."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from family_sampling import start_noise
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from tiny_folders import SETTINGS
from torch import Tensor, nn

from flowrl.generation.models import Source
from flowrl.pipelines import family, stock_of
from flowrl.pipelines.shared.family_pipeline import FamilyPipeline
from flowrl.pipelines.weights.lora import add_saved_lora
from flowrl.publishing.export import files_of_form
from flowrl.publishing.lora_exports import SavedLora, saved_loras

RANK, ALPHA = 2, 3.0
PROMPTS = ("a red fox", "two blue squares on a table")
Pairs = dict[str, tuple[Tensor, Tensor]]
FLUX = {
    "to_out.0": "img_attn_proj",
    "to_add_out": "txt_attn_proj",
    "to_q": "img_attn_qkv",
    "add_q_proj": "txt_attn_qkv",
}
FLUX_FUSED = {"to_q": ("to_q", "to_k", "to_v"), "add_q_proj": ("add_q_proj", "add_k_proj", "add_v_proj")}
WAN = {"attn1": "self_attn", "attn2": "cross_attn", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o"}


@dataclass(frozen=True, kw_only=True)
class Form:
    """A way to write a LoRA.

    Attributes:
        name: for the table.
        family: whose model it is for.
        write: writes matrices to a folder and says what flowrl is given.
        scale: what B A is multiplied with in every layer; None where layers differ, and `scales` says it.
        stock: "diffusers", "peft", or why neither reads it.
        only: which of the family's layers it names, an expression.
        ranks: a rank for each layer, by its number.
        written: by `flowrl export`, and by which of its forms.
    """

    name: str
    family: str
    write: Callable[[Pairs, Path], Path]
    scale: float | None = ALPHA / RANK
    stock: str = "diffusers"
    only: str = "."
    ranks: Callable[[int], int] = lambda number: RANK
    written: str | None = None


def loaded(name: str, model: Path) -> FamilyPipeline:
    """A pipeline with a denoiser of its own; what no LoRA of these files changes is loaded once."""
    kept = _loaded(name, model)
    shared = {id(part): part for key, part in kept.pipe.components.items() if key not in kept.experts}
    return copy.deepcopy(kept, shared)


@cache
def _loaded(name: str, model: Path) -> FamilyPipeline:
    found: Any = family(name).load(str(model), dtype=torch.float32, device="cpu", **SETTINGS.get(name, {}))
    return found  # type: ignore[no-any-return]


@torch.no_grad()
def said(pipeline: FamilyPipeline) -> Tensor:
    """What its network says of two noises."""
    velocity = pipeline.guided(pipeline.network, pipeline.encode(PROMPTS), None, 1.0)
    return velocity(start_noise(pipeline), torch.tensor(0.7), torch.tensor(700.0))


def pairs_of(pipeline: FamilyPipeline, form: Form) -> Pairs:
    """Random matrices for the family's layers that a form names, small enough that the network stays tame."""
    generator, found = torch.Generator().manual_seed(0), Pairs()
    ends = tuple(f".{target}" for target in pipeline.lora_targets)
    for layer, module in pipeline.denoiser.named_modules():
        if isinstance(module, nn.Linear) and layer.endswith(ends) and re.search(form.only, layer):
            rank = form.ranks(len(found))
            down = torch.randn(rank, module.in_features, generator=generator) / math.sqrt(module.in_features)
            found[layer] = down, 0.5 * torch.randn(module.out_features, rank, generator=generator)
    return found


def compared(form: Form, model: Path, room: Path) -> dict[str, Any]:
    """Largest differences of what a network says, with the LoRA as flowrl reads it, from others' reading of it."""
    base = loaded(form.family, model)
    pairs, plain = pairs_of(base, form), said(base)
    place = form.write(pairs, room)
    own = loaded(form.family, model)
    add_saved_lora(own.denoiser, place, stock_of(form.family, str(model)))
    ours, found = said(own), dict[str, Any]()
    if form.scale is not None:
        for layer, (down, up) in pairs.items():
            cast(nn.Linear, base.denoiser.get_submodule(layer)).weight.data += form.scale * up @ down
        found["formula"] = float((said(base) - ours).abs().max())
    if form.stock in ("diffusers", "peft"):
        other = loaded(form.family, model)
        _load_stock(other, form, place)
        found["stock"] = float((said(other) - ours).abs().max())
    return {"effect": float((ours - plain).abs().max()), **found}


def _load_stock(pipeline: FamilyPipeline, form: Form, place: Path) -> None:
    if form.stock == "peft":
        part = next(iter(pipeline.experts))
        wrapped = PeftModel.from_pretrained(pipeline.experts[part], str(place if place.is_dir() else place.parent))
        pipeline.experts[part] = wrapped
        return
    folder, name = (place, None) if place.is_dir() else (place.parent, place.name)
    pipeline.pipe.load_lora_weights(folder, **({} if name is None else {"weight_name": name}))


# ---- forms of others -------------------------------------------------------------------------------------------------


def single(name_of: Callable[[str], str], pairs: Pairs, folder: Path, *, down: str = "lora_A", up: str = "lora_B",
           alpha: float | None = None, metadata: Mapping[str, Any] | None = None,
           name: str = "my_lora.safetensors") -> Path:  # fmt: skip
    """One safetensors file: a name for each layer, endings, and an alpha beside each."""
    tensors: dict[str, Tensor] = {}
    for layer, (a, b) in pairs.items():
        stem = name_of(layer)
        tensors |= {f"{stem}.{down}.weight": a.clone(), f"{stem}.{up}.weight": b.clone()}
        if alpha is not None:
            tensors[f"{stem}.alpha"] = torch.tensor(alpha)
    folder.mkdir(parents=True, exist_ok=True)
    notes = None if metadata is None else {"lora_adapter_metadata": json.dumps(metadata)}
    save_file(tensors, folder / name, metadata=notes)
    return folder / name


def kohya(name_of: Callable[[str], str], pairs: Pairs, folder: Path, alpha: float | None = ALPHA) -> Path:
    return single(name_of, pairs, folder, down="lora_down", up="lora_up", alpha=alpha)


def underscored(prefix: str, layer: str) -> str:
    return prefix + layer.replace(".", "_")


def old_processors(layer: str) -> str:
    """`…attn1.to_out.0` as the attention processors of diffusers before 0.22 named it, without an ending."""
    head, _, name = layer.partition(".to_")
    return f"unet.{head}.processor.to_{name.removesuffix('.0')}_lora"


def processors(pairs: Pairs, folder: Path) -> Path:
    return single(old_processors, pairs, folder, down="down", up="up", name="pytorch_lora_weights.safetensors")


def sgm_of(layers_per_block: int) -> Callable[[str], str]:
    """Layers of a UNet with so many layers a block as kohya's sd-scripts name them, after SDXL's original code."""

    def name(layer: str) -> str:
        match = re.match(r"(down|up)_blocks\.(\d+)\.attentions\.(\d+)\.(.*)", layer)
        if match is None:
            return underscored("lora_unet_", layer.replace("mid_block.attentions.0", "middle_block.1"))
        number = (layers_per_block + 1) * int(match[2]) + int(match[3]) + (match[1] == "down")
        return underscored("lora_unet_", f"{'input' if match[1] == 'down' else 'output'}_blocks.{number}.1.{match[4]}")

    return name


def wan(layer: str) -> str:
    """A layer of Wan's attention as the original code names it."""
    _, number, part, name = layer.split(".", 3)
    return f"blocks.{number}.{WAN[part]}.{WAN[name]}"


def wan_blocks(pairs: Pairs, folder: Path) -> Path:
    """musubi-tuner's form, which diffusers reads of whole blocks alone: feed-forward layers of zeros go with it."""
    zeros = {
        f"blocks.{block}.ffn.{end}": (torch.zeros(RANK, wide[0]), torch.zeros(wide[1], RANK))
        for block in sorted({layer.split(".")[1] for layer in pairs})
        for end, wide in (("0", (24, 32)), ("2", (32, 24)))
    }
    return kohya(
        lambda layer: underscored("lora_unet_", layer if "ffn" in layer else wan(layer)), {**pairs, **zeros}, folder
    )


def flux_kohya(pairs: Pairs, folder: Path) -> Path:
    """sd-scripts' form of FLUX's double blocks, where q, k and v have one LoRA: `pairs` get its A."""
    tensors: dict[str, Tensor] = {}
    for layer, (down, up) in list(pairs.items()):
        block, _, name = layer.partition(".attn.")
        stem = f"lora_unet_double_blocks_{block.rpartition('.')[2]}_"
        if name in FLUX_FUSED:
            layers = [f"{block}.attn.{one}" for one in FLUX_FUSED[name]]
            pairs |= {one: (down, pairs[one][1]) for one in layers}
            up = torch.cat([pairs[one][1] for one in layers])
        elif name not in FLUX:
            continue
        stem += FLUX[name]
        tensors |= {
            f"{stem}.lora_down.weight": down,
            f"{stem}.lora_up.weight": up,
            f"{stem}.alpha": torch.tensor(ALPHA),
        }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "flux.safetensors")
    return folder / "flux.safetensors"


def peft(pairs: Pairs, folder: Path, *, binary: bool = False, **options: Any) -> Path:
    """PEFT's own folder; `options` are of its LoraConfig."""
    network = nn.Module()
    for layer, (down, up) in pairs.items():
        place = network
        *parents, last = layer.split(".")
        for parent in parents:
            if parent not in dict(place.named_children()):
                place.add_module(parent, nn.Module())
            place = place.get_submodule(parent)
        place.add_module(last, nn.Linear(down.shape[1], up.shape[0]))
    config = LoraConfig(**{"r": RANK, "lora_alpha": ALPHA, "target_modules": list(pairs), **options})
    wrapped: Any = get_peft_model(network, config)  # type: ignore[arg-type]
    for layer, (down, up) in pairs.items():
        module = wrapped.base_model.model.get_submodule(layer)
        module.lora_A["default"].weight.data, module.lora_B["default"].weight.data = down, up
        if config.use_dora:
            module.lora_magnitude_vector["default"].weight.data = 1 + torch.linspace(0, 1, len(up))
    wrapped.save_pretrained(str(folder), safe_serialization=not binary)
    return folder


# ---- flowrl's own exports --------------------------------------------------------------------------------------------


def export(form: str, name: str, pairs: Pairs, folder: Path) -> Path:
    """`flowrl export --format FORM`; what it is given is a folder of its own."""
    lora = SavedLora(layers=pairs, alpha=ALPHA, variant="lora", magnitudes={})
    source = Source(model="model", lora=None, grid="diffusers", dtype="float32", family=name, num_steps=1,
                    guidance_scale=1.0, max_sequence_length=None)  # fmt: skip
    for file, content in files_of_form({"": lora}, form, source, "run").items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            (folder / file).write_text(content)
        else:
            save_file({key: t.contiguous() for key, t in content[0].items()}, folder / file, metadata=content[1])
    return folder


def exported_again(form: str, name: str, pairs: Pairs, room: Path) -> float:
    """Largest difference of `s B A` of any layer between what was exported and what is read of it."""
    place = export(form, name, pairs, room)
    [back] = saved_loras(place, stock_of(name, "model")).values()
    assert back.layers.keys() == pairs.keys()
    differences = [
        back.scale(layer) * back.layers[layer][1] @ back.layers[layer][0] - ALPHA / down.shape[0] * up @ down
        for layer, (down, up) in pairs.items()
    ]
    return max(float(difference.abs().max()) for difference in differences)


def _own(name: str, form: str, stock: str = "diffusers") -> Form:
    return Form(
        name=f"flowrl export --format {form}", family=name, write=partial(export, form, name), stock=stock, written=form
    )


UNREAD = "not by diffusers"
FORMS = (
    *(_own(name, "diffusers") for name in ("sd3", "flux", "sdxl", "sd", "wan", "qwen_image")),
    *(_own(name, "peft", "peft") for name in ("sd3", "wan")),
    *(_own(name, "comfyui") for name in ("sd3", "flux", "sdxl", "wan", "qwen_image")),
    *(_own(name, "kohya") for name in ("sdxl", "sd", "qwen_image")),
    Form(name="PEFT, adapter_model.bin", family="sd3", write=partial(peft, binary=True), stock="peft"),
    Form(name="PEFT, rsLoRA", family="sd3", write=partial(peft, use_rslora=True), scale=ALPHA / RANK**0.5,
         stock="peft"),
    Form(name="PEFT, DoRA", family="sd3", write=partial(peft, use_dora=True), scale=None, stock="peft"),
    Form(name="PEFT, rsLoRA and DoRA", family="sd3", write=partial(peft, use_dora=True, use_rslora=True), scale=None,
         stock="peft"),
    Form(name="PEFT, rank_pattern and alpha_pattern", family="sd3", scale=None, stock="peft",
         ranks=lambda number: 1 + number % 3,
         write=lambda pairs, folder: peft(
             pairs, folder, alpha_pattern={"attn.to_q": 5, r"transformer_blocks\.1\.attn\.to_v": 7},
             rank_pattern={layer: down.shape[0] for layer, (down, _) in pairs.items()})),
    Form(name="diffusers, several ranks, no alpha", family="sd3", scale=1.0, ranks=lambda number: 2 + 2 * (number % 2),
         write=partial(single, lambda layer: f"transformer.{layer}")),
    Form(name="saved of a compiled network (_orig_mod.)", family="sd3", scale=1.0, stock=UNREAD,
         write=partial(single, lambda layer: f"_orig_mod.transformer.{layer}")),
    Form(name="base_model.model. in one file", family="sd3", scale=1.0, stock=UNREAD,
         write=partial(single, lambda layer: f"base_model.model.{layer}")),
    Form(name=".alpha beside lora_A", family="sd3", stock=UNREAD,
         write=partial(single, lambda layer: f"transformer.{layer}", alpha=ALPHA)),
    Form(name=".alpha beside lora_A", family="flux",
         write=partial(single, lambda layer: f"transformer.{layer}", alpha=ALPHA)),
    Form(name="diffusion_model. before diffusers' names (ComfyUI)", family="sd3", scale=1.0, stock=UNREAD,
         write=partial(single, lambda layer: f"diffusion_model.{layer}")),
    Form(name="older diffusers, attention processors", family="sd", scale=1.0, write=processors),
    Form(name="older diffusers, .lora.down and .lora.up", family="sd3", scale=1.0,
         write=partial(single, lambda layer: f"transformer.{layer}.lora", down="down", up="up")),
    Form(name="kohya, without alpha", family="sd", scale=1.0,
         write=partial(kohya, partial(underscored, "lora_unet_"), alpha=None)),
    Form(name="kohya (sd-scripts), the original UNet's names", family="sdxl", write=partial(kohya, sgm_of(1))),
    Form(name="kohya (sd-scripts), double blocks", family="flux", only=r"^transformer.*\.attn\.",
         write=flux_kohya),
    Form(name="OneTrainer (lora_transformer_)", family="flux", only=r"^(single_)?transformer.*\.attn\.",
         write=partial(kohya, partial(underscored, "lora_transformer_"))),
    Form(name="the original code's names, with alpha (ComfyUI)", family="wan",
         write=partial(kohya, lambda layer: f"diffusion_model.{wan(layer)}")),
    Form(name="the original code's names (DiffSynth)", family="wan", scale=1.0, stock=UNREAD,
         write=partial(single, wan, down="lora_A.default", up="lora_B.default")),
    Form(name="musubi-tuner (lora_unet_)", family="wan", write=wan_blocks),
    Form(name="lora_down and lora_up, with alpha", family="qwen_image", stock=UNREAD,
         write=partial(kohya, lambda layer: f"transformer.{layer}")),
    Form(name="diffusion_model. before diffusers' names (ComfyUI)", family="qwen_image", scale=1.0,
         write=partial(single, lambda layer: f"diffusion_model.{layer}")),
)  # fmt: skip
