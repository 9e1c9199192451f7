"""What a model's parts weigh besides its denoiser: of published checkpoints by a table, of folders by their files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from flowrl.files import safetensors_parameters
from flowrl.pipelines import known_checkpoints
from flowrl.rewards import Model

_DENOISERS = ("transformer", "transformer_2", "unet")

Parts = Mapping[str, int]
"""Name of a pipeline's part, which is that of its folder -> number of its parameters."""


def other_parts(model: str) -> Parts | None:
    """The parts of a folder or a published checkpoint besides the denoiser; None where nothing is known."""
    if Path(model).is_dir():
        return {name: count for name, count in folder_parts(Path(model)).items() if name not in _DENOISERS}
    known = known_checkpoints.checkpoints().get(model)
    return None if known is None else known.parts


def folder_parts(folder: Path) -> Parts:
    """Every part of a pipeline folder that has weights, read from the headers of its safetensors files."""
    parts = {}
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        files = sorted(path.glob("*.safetensors"))
        plain = [file for file in files if ".fp16." not in file.name] or files
        if plain:
            parts[path.name] = sum(map(safetensors_parameters, plain))
    return parts


def reward_models(models: Sequence[Model]) -> tuple[tuple[str, int, int], ...] | None:
    """(model, parameters, bytes per weight) of a reward's models; None where one is not known."""
    found = [(model.name, model.parameters, model.bytes_per_weight) for model in models]
    known = tuple((name, count, width) for name, count, width in found if count is not None)
    return known if len(known) == len(found) else None


def in_cache(model: str) -> bool:
    """Whether the hub's cache on this machine holds a snapshot of a model."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", str(home / "hub"))).expanduser()
    return any((cache / f"models--{model.replace('/', '--')}").glob("snapshots/*/*"))
