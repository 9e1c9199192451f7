"""Arguments of `flowrl export`; nothing heavy is imported here."""

from __future__ import annotations

import argparse
from pathlib import Path

FORMATS = ("diffusers", "comfyui", "kohya", "peft")
"""Forms of a LoRA."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl export` takes."""
    parser.add_argument("model", metavar="RUN", help="run folder, or folder of a LoRA")
    parser.add_argument("--format", choices=FORMATS, required=True, help="who is to read it")
    parser.add_argument("--out", type=Path, metavar="PATH", help="where to (default: RUN/export-FORMAT)")
    parser.add_argument("--save-dtype", metavar="NAME", default="float32",
                        help="of the tensors: float32, bfloat16 or float16 (default: float32, as trained)")  # fmt: skip
