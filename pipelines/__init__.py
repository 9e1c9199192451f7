"""Model families: one file each, all behind the same small contract.

A pipeline encodes prompts, evaluates the denoising network, decodes latents, and knows its schedule and LoRA targets.
It wraps diffusers' own classes, so any checkpoint of the family loads from a folder or the hub.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from flowrl.config.locations import is_path
from flowrl.config.options import entry_of
from flowrl.pipelines.generic.stock_classes import stock_class
from flowrl.pipelines.places.hub_files import INDEX, ask, refusal, small_json
from flowrl.pipelines.places.known_checkpoints import published, tables
from flowrl.pipelines.places.model_folders import no_pipeline, read_index
from flowrl.pipelines.places.single_files import check_plain, config_of, is_single_file, small_part
from flowrl.pipelines.shared.cards import read_part
from flowrl.pipelines.shared.contract import ModelFamily as ModelFamily
from flowrl.pipelines.shared.contract import Pipeline as Pipeline
from flowrl.pipelines.weights.lora_names import Stock

PIPELINES = {name: f"flowrl.pipelines.families.{name}" for name in tables()["families"]}
"""Family name -> module with `FAMILY`, a `ModelFamily`; the table of families is `published.json`."""
GENERIC = {"generic": "flowrl.pipelines.generic.generic_family"}
"""The family of stock classes that no other family loads, and its module."""


STOCK = {stock: name for name, entry in tables()["families"].items() for stock in entry["stock"]}
"""Stock pipeline class, as folders name it -> family."""


def family_of(model: str) -> str:
    """The family of a model: for a folder from its model_index.json, for a hub id from the published checkpoints or
    from that file, which it fetches. Raises ValueError: no family loads the class, or the hub id is not found."""
    found = known_family(model)
    if found is None:
        raise ValueError(refusal(model, ask(model), list(PIPELINES)))
    return found


def known_family(model: str) -> str | None:
    """As `family_of`; None for a hub id not in the hub's cache while the hub is out of reach. Raises as `family_of`."""
    if Path(model).is_dir() and (Path(model) / INDEX).is_file():
        return family_of_class(read_index(model)["_class_name"], model)
    if is_single_file(model):
        check_plain(model)
        index = small_part(model, INDEX)
        return family_of_class(f"file like {config_of(model)}" if index is None else index.get("_class_name"), model)
    if Path(model).exists():
        raise ValueError(no_pipeline(model))
    known = published(model)
    if known is not None:
        return known.family
    if is_path(model):
        raise ValueError(f"there is no {model}: correct pipeline.model, a folder, a single file or a hub id")
    asked = ask(model)
    if asked.why == "found":
        return family_of_class((small_json(model, INDEX) or {}).get("_class_name"), model)
    if asked.why == "offline":
        return None
    raise ValueError(refusal(model, asked, list(PIPELINES)))


def stock_of(family: str, model: str) -> Stock | None:
    """The stock pipeline that reads LoRAs for a model; None for an unknown model."""
    index = read_part(model, INDEX) if family in GENERIC else {"_class_name": tables()["families"][family]["stock"][0]}
    name = (index or {}).get("_class_name")
    if not isinstance(name, str):
        return None
    unet = read_part(model, "unet/config.json") or {} if family in ("sd", "sdxl") else {}
    return Stock(name=name, layers_per_block=unet.get("layers_per_block") or 2)


def family_of_class(stock: Any, model: str) -> str:
    """The family that loads a stock class: the one place where a class finds its family. Raises ValueError: no family
    loads it, and the call of the class, if there is one, cannot be stepped from outside."""
    if isinstance(stock, str) and stock in STOCK:
        return STOCK[stock]
    if isinstance(stock, str) and stock.isidentifier():
        stock_class(stock, model)
        return next(iter(GENERIC))
    raise ValueError(f"{model} is a {stock}, and no family loads that: there are {', '.join(STOCK)}")


def family_name(name: str | None, model: str) -> str:
    """The family that a configuration means: the one it names, or that of its model. Raises ValueError: no family has
    the name, the model belongs to another one, or its family is unknown."""
    if name is None:
        return family_of(model)
    entry_of(PIPELINES | GENERIC, name, "pipeline.name")
    if name in GENERIC:
        return name  # any model may have this family
    own = known_family(model)
    if own not in (None, name):
        mine = next(iter(tables()["families"][name]["checkpoints"]), None)
        other = f", or set pipeline.model to one of {name}, such as {mine}" if mine is not None else ""
        raise ValueError(f"{model} is of the family {own}, got pipeline.name={name}: leave pipeline.name out{other}")
    return name


def family(name: str) -> ModelFamily:
    """A model family. Raises ValueError: no family has this name."""
    found: ModelFamily = importlib.import_module(entry_of(PIPELINES | GENERIC, name, "pipeline.name")).FAMILY
    return found


def family_for(name: str, model: str) -> ModelFamily:
    """A model family for a model: a stock pipeline without a family makes images or videos by its own class.
    Raises ValueError: no family has this name, or the stock class of the model cannot be called from outside."""
    found: Any = family(name)
    known: ModelFamily = found.of(model) if name in GENERIC else found
    return known
