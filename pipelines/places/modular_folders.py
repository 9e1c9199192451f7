"""Modular repositories of diffusers: which parts they name, and what makes a stock pipeline of them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODULAR = "modular_model_index.json"
"""What says of such a repository where its parts are, in it or in others."""


def parts_of(index: Mapping[str, Any]) -> dict[str, Any]:
    """Where the parts of a modular index are, those whose class it names."""
    specs = {part: entry[2] for part, entry in index.items() if isinstance(entry, list) and len(entry) == 3}
    return {part: spec for part, spec in specs.items() if spec.get("type_hint")}


def stock_words(model: str, index: Mapping[str, Any]) -> str:
    """What to do with a folder or hub id that has such an index and no model_index.json: which one to write."""
    import diffusers

    name = str(index.get("_class_name")).replace("Modular", "")
    stock: Any = getattr(diffusers, name, None)
    what = f"{model} is a modular repository ({MODULAR} names {index.get('_class_name')})"
    if not (inspect.isclass(stock) and issubclass(stock, diffusers.DiffusionPipeline)):
        return (
            f"{what}, and diffusers {diffusers.__version__} has no stock pipeline {name}, which a model is trained by: "
            "take a checkpoint in diffusers' stock layout, with a model_index.json"
        )
    taken = dict(inspect.signature(stock.__init__).parameters)
    specs = parts_of(index)
    parts = {part: spec["type_hint"] for part, spec in specs.items() if part in taken}
    values = {key: one for key, one in index.items() if key in taken and not isinstance(one, list)}
    needed = {part for part, one in taken.items() if one.default is one.empty and part not in ("self", "kwargs")}
    if lacking := sorted(needed - parts.keys() - values.keys()):
        return f"{what}, which has no {', '.join(lacking)} for {name}: take a checkpoint in diffusers' stock layout"
    folder = model if Path(model).is_dir() else "FOLDER"
    copied = [
        f"copy {spec.get('subfolder') or part} of {spec.get('pretrained_model_name_or_path')} to {folder}/{part}"
        for part, spec in specs.items()
        if part in parts and not (Path(model) / part).is_dir()
    ]
    return (
        f"{what}, and stock {name} loads its parts: {'; '.join([*copied, 'write'])} {folder}/model_index.json, and set "
        f"pipeline.model to {folder}: {json.dumps({'_class_name': name, **values, **parts})}"
    )
