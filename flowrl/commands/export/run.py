"""`flowrl export`: writes a run's LoRA in another program's form."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from flowrl.config.locations import hub_id, split_revision
from flowrl.generation.models import Source, check_source, find_source, label_of, lora_of
from flowrl.pipelines import stock_of
from flowrl.pipelines.places.lora_places import LORA_FILE
from flowrl.pipelines.weights.lora import VARIANTS
from flowrl.publishing.lora_exports import (
    SavedLora,
    comfyui_tensors,
    finite_loras,
    kohya_tensors,
    peft_tensors,
    stock_files,
)
from flowrl.runtime.files import refuse_foreign, replacing, write_atomically
from flowrl.runtime.scrubbing import say as print
from flowrl.training.parts import DTYPES

MARK = {"format": "pt", "made_by": "flowrl export"}
"""Metadata of a file, by which it is known again."""
NOISE = {"": "", "transformer": "_high_noise", "transformer_2": "_low_noise"}
"""What the files of the experts of Wan 2.2 are called."""


def run(parsed: argparse.Namespace) -> int:
    """Writes the files and says which they are.

    Raises:
        ValueError: the run has no LoRA, the form cannot hold it, or a file is there that holds something else.
    """
    source = find_source(parsed.model, dtype=parsed.save_dtype)
    lora = lora_of(source, parsed.model, "export")
    check_source(source)
    loras = finite_loras(lora, stock_of(source.family, source.model))
    out = parsed.out or Path(parsed.model) / f"export-{parsed.format}"
    files = exported(loras, parsed.format, source, label_of(parsed.model))
    dtype = DTYPES[source.dtype]
    for name in files:
        weights = (out / name).with_name("adapter_model.safetensors") if name.endswith(".json") else out / name
        refuse_foreign(out / name, own=weights.is_file() and b"flowrl export" in _beginning(weights), flag="--out")
    for name, content in files.items():
        if (out / name).is_file() and (out / name).stat().st_size and not _holds(out / name, content, dtype):
            raise ValueError(
                f"{out / name} is there already and holds another LoRA than that of {parsed.model} now: give another "
                "--out, or move it away"
            )
    for name, content in files.items():
        if isinstance(content, str):
            write_atomically(out / name, content)
            continue
        kept = _kept(content[0], dtype)
        with replacing(out / name) as stream:
            stream.write(save(kept, metadata=MARK | dict(content[1])))
        print(f"wrote {out / name}: {len(kept)} tensors, {(out / name).stat().st_size / 1e6:.1f} MB")
    return 0


def exported(
    loras: Mapping[str, SavedLora], form: str, source: Source, label: str
) -> dict[str, tuple[dict[str, Tensor], dict[str, str]] | str]:
    """File names and what is in them: tensors with their metadata, or text.

    Raises:
        ValueError: the form cannot hold this LoRA.
    """
    files: dict[str, tuple[dict[str, Tensor], dict[str, str]] | str] = {}
    if form == "diffusers" and source.lora is not None:  # as its family names the parts
        files |= stock_files(source.lora)
    for network, lora in loras.items():
        place = f"{network}/" if network == "transformer_2" else ""
        if form in ("comfyui", "kohya"):
            named = comfyui_tensors if form == "comfyui" else kohya_tensors
            files[f"{label}{NOISE[network]}_{form}.safetensors"] = named(lora, source.family), {}
            continue
        if form == "diffusers" and f"{place}{LORA_FILE}" in files:
            continue
        config = adapter_config(lora)
        if form == "peft":
            files[f"{place}adapter_model.safetensors"] = peft_tensors(lora), {}
            base = hub_id(source.model)
            facts = {"peft_type": "LORA", "base_model_name_or_path": base,
                     "revision": None if base is None else split_revision(source.model)[1], **config,
                     "bias": "none", "inference_mode": True, "auto_mapping": None}  # fmt: skip
            files[f"{place}adapter_config.json"] = json.dumps(facts, indent=1)
            continue
        part = "unet" if source.family in ("sd", "sdxl") else "transformer"
        tensors = {
            name.replace("base_model.model.", f"{part}.", 1): tensor for name, tensor in peft_tensors(lora).items()
        }
        notes = json.dumps({f"{part}.{key}": value for key, value in config.items()})
        files[f"{place}{LORA_FILE}"] = tensors, {"lora_adapter_metadata": notes}
    return files


def adapter_config(lora: SavedLora) -> dict[str, object]:
    """Rank, alpha, layers and variant as PEFT calls them."""
    rank = next(iter(lora.layers.values()))[0].shape[0]
    found = {"r": rank, "lora_alpha": lora.alpha, "target_modules": sorted(lora.layers)}
    return found | VARIANTS[lora.variant]


def _kept(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors as they are written."""
    return {key: tensor.to(dtype).contiguous() for key, tensor in tensors.items()}


def _holds(path: Path, content: tuple[dict[str, Tensor], dict[str, str]] | str, dtype: torch.dtype) -> bool:
    """Whether an earlier export wrote the same: nothing is lost by writing that again."""
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


def _beginning(path: Path) -> bytes:
    """The header of a file with tensors, as far as it names who wrote it."""
    with path.open("rb") as file:
        return file.read(2**20)
