"""`flowrl merge`: writes a stock folder whose weights have the LoRA of a run in them."""

from __future__ import annotations

import argparse
from pathlib import Path

from flowrl.generation.models import check_source, find_source, lora_of
from flowrl.pipelines import stock_of
from flowrl.pipelines.places.model_folders import stock_folder
from flowrl.pipelines.places.single_files import is_single_file
from flowrl.publishing.lora_exports import finite_loras
from flowrl.publishing.merged_model import merge
from flowrl.runtime.files import is_taken
from flowrl.runtime.scrubbing import say as print
from flowrl.training.model_files import model_location

NOTABLE = 0.01
"""Share of the LoRA's change lost to rounding from which the line says what to do."""


def run(parsed: argparse.Namespace) -> int:
    """Merges and says what was lost to rounding.

    Raises:
        ValueError: there is no LoRA, the base is quantised or of another layout, or the folder is taken.
    """
    source = find_source(parsed.model)
    lora = lora_of(source, parsed.model, "merge")
    check_source(source)
    if source.quantize != "none" and not parsed.unquantised:
        raise ValueError(
            f"the LoRA of {parsed.model} was trained over weights in {source.quantize}, into which it cannot be merged "
            "without loss: --unquantised merges it into the base as it is on disk, which draws what stock diffusers "
            "draws with that base and the LoRA, and not exactly what the run drew"
        )
    if is_taken(parsed.out):
        raise ValueError(f"{parsed.out} is there already: give a folder that is not")
    location = parsed.base if parsed.base is not None else model_location(source.model)
    if is_single_file(location):
        raise ValueError(
            f"{location} is a single file: save it as a folder first (DiffusionPipeline.from_single_file, then "
            "save_pretrained), and give that as --base"
        )
    loras = finite_loras(lora, stock_of(source.family, source.model))
    if parsed.out.exists():
        parsed.out.rmdir()
    variant = None if parsed.base is not None else source.variant
    done = merge(_folder(location), loras, parsed.out, variant)
    print(f"wrote {parsed.out}: {done.layers} layers changed, in {' and '.join(done.dtypes)}")
    print(f"rounding to that dtype lost {done.lost:.2%} of the LoRA's change")
    if done.lost > NOTABLE:
        print("more is kept by a base in float32 (--base FOLDER), and all of it by base and LoRA apart")
    if variant is not None:
        print(f"open it with variant={variant!r}, as the base")
    return 0


def _folder(location: str) -> Path:
    try:
        return stock_folder(location)
    except ValueError as error:
        raise ValueError(
            f"the files of {location} are not in this machine's cache: download it to a folder and give that as --base"
        ) from error
