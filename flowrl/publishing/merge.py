"""Merges a LoRA, or a weighted sum of several, into its base model's weights: a stock folder that draws the same.

It works on the files, one shard at a time, and never holds the whole model in memory:

    lora, rslora    W' = W + s B A          s = alpha / r or alpha / sqrt(r)
    dora            W' = m (W + s B A) / ||W + s B A||, row by row

computed in float32 and rounded once to the dtype that W has. Every other tensor and file stays as it is.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from flowrl.config.train import model_location
from flowrl.generation.models import SAMPLING, Model, Source, check_source, find_lora, place_of
from flowrl.pipelines import stock_of
from flowrl.pipelines.places.hub_files import INDEX
from flowrl.pipelines.places.model_folders import SMALL, stock_folder, take_frozen
from flowrl.pipelines.places.single_files import is_single_file
from flowrl.publishing.lora_exports import SavedLora, finite_loras
from flowrl.runtime.files import free_bytes, is_taken, nearest_folder, read_json, write_atomically
from flowrl.runtime.public import public


@public
def merge(
    model: Model,
    out: str | Path,
    *,
    also: Sequence[Model] = (),
    weights: Sequence[float] | None = None,
    base: str | Path | None = None,
    unquantised: bool = False,
    show: bool = True,
) -> MergedModel:
    """Merges the LoRA of a run, or of several, into the weights of their base model, as a stock folder.

    Args:
        model: run folder or what `train` returned, or folder of a LoRA.
        out: folder of the merged model; it must not exist yet. It stores the sampling settings of the run's
            evaluations, so that `sample` uses them.
        also: further runs or LoRAs on the same base, whose changes are added.
        weights: of each LoRA's change, `model`'s first; None averages them.
        base: stock folder to merge into; None takes the files of the run's own base.
        unquantised: if the run trained over quantised weights, merge into the base as it is on disk.
        show: has no effect.

    Raises:
        ValueError: a run has no LoRA, the LoRAs cannot be added or are not as many as the weights, the base is
            quantised or of another layout, or the folder is taken.
    """
    names, out = [place_of(one) for one in (model, *also)], Path(out)
    sources, places = zip(*(find_lora(name, "merge") for name in names), strict=True)
    check_trained(sources, names, base, unquantised=unquantised)
    source = sources[0]
    if is_taken(out):
        raise ValueError(f"{out} exists already: give a folder that does not")
    location = model_location(source.model if base is None else str(base))
    if is_single_file(location):
        raise ValueError(
            f"{location} is a single file: save it as a folder first (DiffusionPipeline.from_single_file, then "
            "save_pretrained), and give that as `base`"
        )
    loras = added([finite_loras(place, stock_of(source.family, source.model)) for place in places], weights)
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


def check_trained(sources: Sequence[Source], names: Sequence[str], base: object, *, unquantised: bool) -> None:
    """Refuses LoRAs that were trained over other models, or over quantised weights."""
    for source, name in zip(sources, names, strict=True):
        check_source(source)
        if base is None and source.model != sources[0].model:
            raise ValueError(
                f"{names[0]} is a LoRA for {sources[0].model} and {name} one for {source.model}: give the `base` of all"
            )
        if source.quantize != "none" and not unquantised:
            raise ValueError(
                f"the LoRA of {name} was trained over weights in {source.quantize}, into which it cannot be merged "
                "without loss: `unquantised` merges it into the base as it is on disk, which draws what stock "
                "diffusers draws with that base and the LoRA, and not exactly what the run drew"
            )


def added(read: Sequence[Mapping[str, SavedLora]], weights: Sequence[float] | None) -> dict[str, SavedLora]:
    """One LoRA for each network, of several and their weights; None averages them. Raises ValueError: there are more
    or fewer weights, or the LoRAs are for other networks."""
    shares = [1 / len(read)] * len(read) if weights is None else list(weights)
    if len(shares) != len(read) or not all(map(math.isfinite, shares)) or not any(shares):
        raise ValueError(f"`weights` are one for each of the {len(read)} LoRAs, finite and not all 0, got {shares}")
    if any(one.keys() != read[0].keys() for one in read):
        raise ValueError("the LoRAs are for other networks of a model: merge those of one base")
    return {part: joined([one[part] for one in read], shares) for part in read[0]}


def joined(loras: Sequence[SavedLora], weights: Sequence[float]) -> SavedLora:
    """One LoRA whose change is `sum_i w_i s_i B_i A_i`: all A below each other, beside them all B times `w_i s_i`.
    Raises ValueError: one is a DoRA, or a layer has different shapes in two."""
    if len(loras) == 1 and weights[0] == 1:
        return loras[0]
    if any(lora.variant == "dora" for lora in loras):
        raise ValueError("a DoRA sets the length of each row, so that no share of it can be added: merge it alone")
    layers = {}
    for layer in dict.fromkeys(layer for lora in loras for layer in lora.layers):
        pairs = [(w, lora) for w, lora in zip(weights, loras, strict=True) if layer in lora.layers]
        has = [(w * lora.scale(layer), *lora.layers[layer]) for w, lora in pairs]
        if len({(down.shape[1], up.shape[0]) for _, down, up in has}) > 1:
            raise ValueError(f"the LoRAs are of different models: {layer} has another shape in each")
        down = torch.cat([down.float() for _, down, _ in has])
        layers[layer] = down, torch.cat([factor * len(down) * up.float() for factor, _, up in has], dim=1)
    return SavedLora(layers=layers, alpha=1.0, variant="lora", magnitudes={})


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
