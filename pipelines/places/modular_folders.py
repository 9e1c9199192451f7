"""Modular repositories of diffusers: which parts they name, and what makes a stock pipeline of them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODULAR = "modular_model_index.json"
"""What says of such a repository where its parts are, in it or in others."""


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
    specs = {part: entry[2] for part, entry in index.items() if isinstance(entry, list) and len(entry) == 3}
    parts = {part: hint for part, spec in specs.items() if part in taken and (hint := spec.get("type_hint"))}
    values = {key: one for key, one in index.items() if key in taken and key not in specs}
    needed = {part for part, one in taken.items() if one.default is one.empty and part not in ("self", "kwargs")}
    if lacking := sorted(needed - parts.keys() - values.keys()):
        return f"{what}, which has no {', '.join(lacking)} for {name}: take a checkpoint in diffusers' stock layout"
    fetched = [
        f"hf download {spec.get('pretrained_model_name_or_path')} --include '{spec.get('subfolder') or part}/*' "
        f"--local-dir {model if Path(model).is_dir() else 'FOLDER'}"
        for part, spec in specs.items()
        if part in parts and not (Path(model) / part).is_dir()
    ]
    folder = model if Path(model).is_dir() else "FOLDER"
    first = f"{'; '.join(fetched)}; then write" if fetched else "write"
    return (
        f"{what}, and stock {name} loads its parts: {first} {folder}/model_index.json, and set pipeline.model to "
        f"{folder}: {json.dumps({'_class_name': name, **values, **parts})}"
    )
