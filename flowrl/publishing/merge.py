"""Merges a LoRA into the weights of its base model."""

from __future__ import annotations

import json
from pathlib import Path

from flowrl.generation.models import SAMPLING, Model, check_source, find_source, lora_of, place_of
from flowrl.pipelines import stock_of
from flowrl.pipelines.places.model_folders import stock_folder
from flowrl.pipelines.places.single_files import is_single_file
from flowrl.publishing.lora_exports import finite_loras
from flowrl.publishing.merged_model import MergedModel, merge_files
from flowrl.runtime.files import is_taken, write_atomically
from flowrl.runtime.public import public
from flowrl.training.model_files import model_location


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
