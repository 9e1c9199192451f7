"""`flowrl export`: writes a LoRA in the file forms that other programs read."""

from __future__ import annotations

import argparse

import flowrl
from flowrl.commands.sampling_arguments import add_out
from flowrl.runtime.scrubbing import say as print

FORMS = ("diffusers", "comfyui", "kohya", "peft")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl export` takes."""
    add = parser.add_argument
    add("model", metavar="RUN", help="run folder, or folder of a LoRA")
    add("--format", dest="form", choices=FORMS, required=True, help="program that will read it")
    add_out(parser, "where to write", "RUN/export-FORMAT")
    add(
        "--save-dtype",
        dest="dtype",
        metavar="NAME",
        default="float32",
        help="dtype of the tensors: float32, bfloat16 or float16 (default: float32, as trained)",
    )


def run(parsed: argparse.Namespace) -> int:
    """Writes the files and prints their names."""
    for path, tensors in flowrl.export(**vars(parsed)).files.items():
        print(f"wrote {path}: {tensors} tensors, {path.stat().st_size / 1e6:.1f} MB")
    return 0
