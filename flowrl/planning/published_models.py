"""Sizes of a model's parts besides its denoiser: from a table for published checkpoints, from the files for folders."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from flowrl.config.locations import is_path, split_revision
from flowrl.pipelines import ModelFamily
from flowrl.pipelines.places import known_checkpoints
from flowrl.pipelines.places.hub_files import model_card, small_json
from flowrl.rewards import Model
from flowrl.runtime.files import safetensors_parameters

_DENOISERS = ("transformer", "transformer_2", "unet")

Parts = Mapping[str, int]
"""Name of a pipeline's part, which is also its folder's -> number of parameters."""


def other_parts(model: str) -> Parts | None:
    """The parts of a folder or a published checkpoint besides the denoiser; None if unknown."""
    if Path(model).is_dir():
        return {name: count for name, count in folder_parts(Path(model)).items() if name not in _DENOISERS}
    known = known_checkpoints.published(model)
    return None if known is None else known.parts


def find_counted(family: ModelFamily, model: str) -> str:
    """The model whose configuration is counted: the given one, or the family's first checkpoint if it is unknown."""
    if family.planned_size(model, {}) is not None or Path(model).exists():
        return model
    return next((name for name, known in known_checkpoints.checkpoints().items() if known.family == family.name), model)


def nearest(family: ModelFamily, model: str) -> str | None:
    """The family's published checkpoint whose denoiser configuration is nearest to a model's; None if there is none."""
    own = {} if Path(model).exists() else small_json(model, f"{family.denoisers[0]}/config.json") or {}
    alike = {
        name: sum(own.get(key) == value for key, value in known.network.items())
        for name, known in known_checkpoints.checkpoints().items()
        if known.family == family.name
    }
    return max(alike, key=alike.__getitem__, default=None)


def licence_of(model: str) -> tuple[str, bool] | None:
    """The licence of a hub id and whether the hub asks you to accept it; None if neither table nor hub says."""
    known = known_checkpoints.published(model)
    if known is not None:
        return known.licence, known.gated
    card = None if Path(model).exists() or is_path(model) else model_card(model)
    return None if card is None or card.licence is None else (card.licence, card.gated)


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
    """(model, parameters, bytes per weight) of a reward's models; None if one is unknown."""
    found = [(model.name, model.parameters, model.bytes_per_weight) for model in models]
    known = tuple((name, count, width) for name, count, width in found if count is not None)
    return known if len(known) == len(found) else None


def in_cache(model: str) -> bool:
    """Whether the hub's cache on this machine holds weights of a model, not only its small files."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", str(home / "hub"))).expanduser()
    repo, _ = split_revision(model)
    files = (cache / f"models--{repo.replace('/', '--')}").glob("snapshots/*/**/*")
    return any(path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".ckpt") for path in files)
