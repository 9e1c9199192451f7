"""Merges a LoRA into its base model's weights, as a stock folder that draws the same as base and LoRA together.

It works on the files, one shard at a time, and never holds the whole model in memory:

    lora, rslora    W' = W + s B A          s = alpha / r or alpha / sqrt(r)
    dora            W' = m (W + s B A) / ||W + s B A||, row by row

computed in float32 and rounded once to the dtype that W has. Every other tensor and file stays as it is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from flowrl.config.train import model_location
from flowrl.generation.models import SAMPLING, Model, check_source, find_source, lora_of, place_of
from flowrl.pipelines import stock_of
from flowrl.pipelines.places.hub_files import INDEX
from flowrl.pipelines.places.model_folders import SMALL, stock_folder, take_frozen
from flowrl.pipelines.places.single_files import is_single_file
from flowrl.publishing.lora_exports import SavedLora, finite_loras
from flowrl.runtime.files import free_bytes, is_taken, nearest_folder, read_json, write_atomically
from flowrl.runtime.public import public


@public
def merge(
    model: Model, out: str | Path, *, base: str | Path | None = None, unquantised: bool = False, show: bool = True
) -> MergedModel:
    """Merges the LoRA of a run into the weights of its base model, as a stock folder.

    Args:
        model: run folder or what `train` returned, or folder of a LoRA.
        out: folder of the merged model; it must not exist yet. It stores the sampling settings of the run's
            evaluations, so that `sample` uses them.
        base: stock folder to merge into; None takes the files of the run's own base.
        unquantised: if the run trained over quantised weights, merge into the base as it is on disk.
        show: has no effect.

    Raises:
        ValueError: the run has no LoRA, the base is quantised or of another layout, or the folder is taken.
    """
    name, out = place_of(model), Path(out)
    source = find_source(name)
    lora = lora_of(source, name, "merge")
    check_source(source)
    if source.quantize != "none" and not unquantised:
        raise ValueError(
            f"the LoRA of {name} was trained over weights in {source.quantize}, into which it cannot be merged "
            "without loss: `unquantised` merges it into the base as it is on disk, which draws what stock diffusers "
            "draws with that base and the LoRA, and not exactly what the run drew"
        )
    if is_taken(out):
        raise ValueError(f"{out} exists already: give a folder that does not")
    location = str(base) if base is not None else model_location(source.model)
    if is_single_file(location):
        raise ValueError(
            f"{location} is a single file: save it as a folder first (DiffusionPipeline.from_single_file, then "
            "save_pretrained), and give that as `base`"
        )
    loras = finite_loras(lora, stock_of(source.family, source.model))
    if out.exists():
        out.rmdir()
    try:
        folder = stock_folder(location)
    except ValueError as error:
        raise ValueError(
            f"the files of {location} are not in this machine's cache: download it to a folder and give that as `base`"
        ) from error
    made = merge_files(folder, loras, out, None if base is not None else source.variant)
    write_atomically(out / SAMPLING, json.dumps(source.sampling))
    return made


PARTS = ("transformer", "unet")
"""Folders of denoisers in a stock folder; a second expert is `transformer_2`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedModel:
    """A merged model."""

    folder: Path
    variant: str | None
    """Ending of its files, the same as the base's."""
    layers: int
    dtypes: tuple[str, ...]
    """Dtypes of their weights, in alphabetical order."""
    lost: float
    """Norm of the rounding error relative to the change: ||W' - (W + dW)|| / ||dW||."""


def merge_files(base: Path, loras: Mapping[str, SavedLora], out: Path, variant: str | None = None) -> MergedModel:
    """Writes the folder of the merged model, which appears whole or not at all.

    Args:
        loras: as `flowrl.publishing.lora_exports.saved_loras` gives them.
        variant: ending of the base's files, such as "fp16"; those of the merged model have it too.

    Raises ValueError: the base is not a stock folder of safetensors in a float type, a layer is missing there or has
    another shape, or the disk is too small; nothing was written.
    """
    if not (base / INDEX).is_file():
        raise ValueError(f"{base} is no folder in diffusers' layout ({INDEX} is missing): merge needs one")
    files = {name: (part, weights_of(base / part, variant)) for name, part in _parts(base, loras).items()}
    for name, (part, paths) in files.items():
        _check(loras[name], base / part, paths)
    _check_room(base, [path for _, paths in files.values() for path in paths], out)
    staged = out.with_name(f".{out.name}.writing")
    shutil.rmtree(staged, ignore_errors=True)
    try:
        staged.mkdir(parents=True)
        take_frozen(base, staged, {part for part, _ in files.values()}, small=SMALL)
        squares, dtypes = [0.0, 0.0], set[str]()
        for name, (part, paths) in files.items():
            (staged / part).mkdir()
            for path in sorted((base / part).iterdir()):
                if path.is_file() and path not in paths and path.suffix == ".json":
                    shutil.copyfile(path, staged / part / path.name)
            for path in paths:
                _merge_file(path, staged / part / path.name, loras[name], squares, dtypes)
        staged.replace(out)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return MergedModel(
        folder=out,
        variant=variant,
        layers=sum(len(lora.layers) for lora in loras.values()),
        dtypes=tuple(sorted(dtypes)),
        lost=(squares[0] / squares[1]) ** 0.5 if squares[1] else 0.0,
    )


def merge_weight(weight: Tensor, lora: SavedLora, layer: str) -> Tensor:
    """W' in float32, not rounded yet."""
    down, up = lora.layers[layer]
    whole = weight.float() + lora.scale(layer) * (up.float() @ down.float())
    if lora.variant != "dora":
        return whole
    norm = torch.linalg.norm(whole, dim=1, keepdim=True)
    return lora.magnitudes[layer].float().reshape(-1, 1) * whole / norm


def weights_of(part: Path, variant: str | None) -> list[Path]:
    """The files of a part that hold its weights. Raises ValueError: there are none in safetensors."""
    names = {path: path.stem.split("-")[0] for path in sorted(part.glob("*.safetensors"))}  # without a shard's number
    found = [path for path, name in names.items() if (name.endswith(f".{variant}") if variant else "." not in name)]
    if not found:
        raise ValueError(f"{part} holds no weights in safetensors{f' of variant {variant}' if variant else ''}")
    return found


def _parts(base: Path, loras: Mapping[str, SavedLora]) -> dict[str, str]:
    """The part of the base for each network of the LoRA."""
    index = read_json(base / INDEX, finite=False)
    if "" not in loras:
        return {name: name for name in loras}
    part = next((name for name in PARTS if name in index and (base / name).is_dir()), None)
    if part is None:
        raise ValueError(f"{base} has no denoiser among its parts: looked for {' and '.join(PARTS)}")
    return {"": part}


def _check(lora: SavedLora, part: Path, paths: list[Path]) -> None:
    config = part / "config.json"
    if config.is_file() and "quantization_config" in read_json(config, finite=False):
        raise ValueError(_quantised(part))
    shapes: dict[str, list[int]] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                layer = name.removesuffix(".weight")
                if layer in lora.layers:
                    view = file.get_slice(name)
                    shapes[layer] = list(view.get_shape())
                    if view.get_dtype() not in ("F32", "BF16", "F16"):
                        raise ValueError(_quantised(part))
    for layer, (down, up) in lora.layers.items():
        wanted = [up.shape[0], down.shape[1]]
        if shapes.get(layer) != wanted:
            found = f"has shape {shapes[layer]}" if layer in shapes else "is not there"
            raise ValueError(f"the LoRA is of another model: {layer} of {part} {found}, the LoRA wants {wanted}")


def _quantised(part: Path) -> str:
    return (
        f"{part} holds quantised weights, to which a LoRA cannot be added without loss: merge it into the same model "
        "in bfloat16 or float32"
    )


def _check_room(base: Path, paths: list[Path], out: Path) -> None:
    """Refuses if the disk has no room for the merged parts and copies of the others."""
    need = sum(path.stat().st_size for path in paths)
    need += min(sum(path.stat().st_size for path in base.rglob("*") if path.is_file()) - need, SMALL)
    free = free_bytes(out)
    if need > free:
        raise ValueError(
            f"the merged model takes {need / 1e9:.2f} GB and the disk of {nearest_folder(out)} has {free / 1e9:.2f} GB "
            "left: make room, or give a folder on another disk"
        )


def _merge_file(path: Path, place: Path, lora: SavedLora, squares: list[float], dtypes: set[str]) -> None:
    """Merges one file of weights; adds to the squared norms of the rounding error and of the change."""
    tensors = {}
    with safe_open(path, framework="pt") as file:
        notes = file.metadata()
        for name in file.keys():
            tensor = file.get_tensor(name)
            layer = name.removesuffix(".weight")
            if name.endswith(".weight") and layer in lora.layers:
                whole = merge_weight(tensor, lora, layer)
                kept = whole.to(tensor.dtype)
                squares[0] += float((kept.double() - whole.double()).square().sum())
                squares[1] += float((whole.double() - tensor.double()).square().sum())
                dtypes.add(str(tensor.dtype).removeprefix("torch."))
                tensor = kept
            tensors[name] = tensor.contiguous()
    save_file(tensors, place, metadata=notes or {"format": "pt"})
    place.chmod(place.parent.stat().st_mode & 0o666)  # safetensors keeps a file to its owner, whatever the umask
