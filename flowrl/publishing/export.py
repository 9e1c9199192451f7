"""A run's LoRA in the file forms that other programs read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from flowrl.config.locations import hub_id, split_revision
from flowrl.config.options import unknown_name
from flowrl.generation.models import Model, Source, check_source, find_lora, label_of, place_of
from flowrl.generation.sampling_options import SamplingOptions
from flowrl.pipelines import stock_of
from flowrl.pipelines.places.lora_places import LORA_FILE
from flowrl.pipelines.weights.lora import VARIANTS
from flowrl.publishing import lora_exports
from flowrl.runtime.files import replacing, write_atomically
from flowrl.runtime.public import public
from flowrl.training.parts import DTYPES

FORMS = ("diffusers", "comfyui", "kohya", "peft")
MARK = {"format": "pt", "made_by": "flowrl export"}
NOISE = {"": "", "transformer": "_high_noise", "transformer_2": "_low_noise"}
"""Name endings of the files for the experts of Wan 2.2."""

Content = tuple[dict[str, Tensor], dict[str, str]] | str
"""Contents of a file: tensors with their metadata, or text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedLora:
    """A LoRA in the form of another program."""

    folder: Path
    files: dict[Path, int]
    """File with tensors -> number of tensors."""


@public
def export(
    model: Model, form: str, *, out: str | Path | None = None, dtype: str = "float32", show: bool = True
) -> ExportedLora:
    """Writes a LoRA in another program's form.

    Args:
        model: run folder or what `train` returned, or folder of a LoRA.
        form: "diffusers", "comfyui", "kohya" or "peft".
        out: folder to write; None is `RUN/export-FORM`.
        dtype: dtype of the tensors: "float32", "bfloat16" or "float16".
        show: has no effect.

    Raises:
        ValueError: the run has no LoRA, the form cannot hold it, or a file of that name holds something else.
    """
    if form not in FORMS:
        raise ValueError(unknown_name("form", form, FORMS))
    place = place_of(model)
    source, lora = find_lora(place, "export", SamplingOptions(dtype=dtype))
    check_source(source)
    loras = lora_exports.finite_loras(lora, stock_of(source.family, source.model))
    folder = Path(out or Path(place) / f"export-{form}")
    if folder.suffix == ".safetensors":
        raise ValueError(f"`out` is the folder of the files, whose names follow from the form: give {folder.parent}")
    files = files_of_form(loras, form, source, label_of(place))
    for name, content in files.items():
        path = folder / name
        full = path.exists() and not (path.is_file() and path.stat().st_size == 0)
        if full and not (path.is_file() and _holds(path, content, DTYPES[source.dtype])):
            raise ValueError(
                f"{path} is there already and holds another LoRA than {place} has now, or something else, so it will "
                "not be overwritten: give another `out`, or move it away"
            )
    written = {}
    for name, content in files.items():
        if isinstance(content, str):
            write_atomically(folder / name, content)
            continue
        kept = _kept(content[0], DTYPES[source.dtype])
        with replacing(folder / name) as stream:
            stream.write(save(kept, metadata=MARK | dict(content[1])))
        written[folder / name] = len(kept)
    return ExportedLora(folder=folder, files=written)


def files_of_form(
    loras: Mapping[str, lora_exports.SavedLora], form: str, source: Source, label: str
) -> dict[str, Content]:
    """File names and their contents. Raises ValueError: the form cannot hold this LoRA."""
    files: dict[str, Content] = {}
    if form == "diffusers" and source.lora is not None:  # as its family names the parts
        files |= lora_exports.stock_files(source.lora)
    for network, lora in loras.items():
        place = f"{network}/" if network == "transformer_2" else ""
        if form in ("comfyui", "kohya"):
            named = lora_exports.comfyui_tensors if form == "comfyui" else lora_exports.kohya_tensors
            files[f"{label}{NOISE[network]}_{form}.safetensors"] = named(lora, source.family), {}
            continue
        if form == "diffusers" and f"{place}{LORA_FILE}" in files:
            continue
        config = adapter_config(lora)
        if form == "peft":
            files[f"{place}adapter_model.safetensors"] = lora_exports.peft_tensors(lora), {}
            base = hub_id(source.model)
            facts = {"peft_type": "LORA", "base_model_name_or_path": base,
                     "revision": None if base is None else split_revision(source.model)[1], **config,
                     "bias": "none", "inference_mode": True, "auto_mapping": None}  # fmt: skip
            files[f"{place}adapter_config.json"] = json.dumps(facts, indent=1)
            continue
        part = "unet" if source.family in ("sd", "sdxl") else "transformer"
        tensors = {
            name.replace("base_model.model.", f"{part}.", 1): tensor
            for name, tensor in lora_exports.peft_tensors(lora).items()
        }
        notes = json.dumps({f"{part}.{key}": value for key, value in config.items()})
        files[f"{place}{LORA_FILE}"] = tensors, {"lora_adapter_metadata": notes}
    return files


def adapter_config(lora: lora_exports.SavedLora) -> dict[str, object]:
    """Rank, alpha, layers and variant as PEFT calls them."""
    rank = next(iter(lora.layers.values()))[0].shape[0]
    found = {"r": rank, "lora_alpha": lora.alpha, "target_modules": sorted(lora.layers)}
    return found | VARIANTS[lora.variant]


def _kept(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors as they are written."""
    return {key: tensor.to(dtype).contiguous() for key, tensor in tensors.items()}


def _holds(path: Path, content: Content, dtype: torch.dtype) -> bool:
    """Whether an earlier export wrote the same file, which can be overwritten without loss."""
    if isinstance(content, str):
        return path.read_text(encoding="utf-8", errors="replace") == content
    try:
        there = load_file(path)
    except SafetensorError:  # cut off
        return False
    wanted = _kept(content[0], dtype)
    return there.keys() == wanted.keys() and all(
        there[key].dtype == tensor.dtype and torch.equal(there[key], tensor) for key, tensor in wanted.items()
    )
