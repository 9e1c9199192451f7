"""What is known of published checkpoints without a download: `published.json`, written from their configuration files.

`networks` are configurations of denoisers, where "like" takes over another one; `part_parameters` are the parameters of
the stock classes of other parts; `families` is the one table of model families: the stock classes that a family loads,
the class of their autoencoder, how it is usually sampled (`sampling`, as stock pipelines or model cards say; a
checkpoint may have its own), and its published checkpoints: licence, whether the hub asks to accept it (`gated`),
denoiser, other parts, and what `model_index.json` (`index`) and the autoencoder's configuration (`vae`) say besides.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from flowrl.config.locations import split_revision


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A published checkpoint."""

    family: str
    """Its family."""
    index: Mapping[str, Any]
    """What its model_index.json says, the stock class first."""
    network: Mapping[str, Any]
    """Configuration of its denoiser."""
    vae: Mapping[str, Any]
    """What is unusual in its autoencoder's configuration."""
    licence: str
    """Of the weights."""
    gated: bool
    """Whether the hub asks you to accept the licence."""
    parts: Mapping[str, int]
    """Parameters of every part except the denoiser."""
    sampling: Mapping[str, float]
    """Its sampling settings that differ from its family's."""
    trained_in: str | None = None
    """The precision that its makers name, if another one is known to do worse."""


AGAIN = "download the model again, or save it with save_pretrained"
"""What to do about a damaged model folder."""


@functools.cache
def tables() -> Any:
    """The file as it stands."""
    return json.loads(resources.files("flowrl.pipelines").joinpath("published.json").read_text(encoding="utf-8"))


@functools.cache
def checkpoints() -> dict[str, Published]:
    """Hub id -> what is known of it."""
    parameters = tables()["part_parameters"]
    return {
        model: Published(
            family=name, index={"_class_name": family["stock"][0], **entry.get("index", {})},
            network=_network(entry["network"]), vae=entry.get("vae", {}), licence=entry["licence"],
            gated=entry.get("gated", False), parts={part: parameters[kind] for part, kind in entry["parts"].items()},
            sampling=entry.get("sampling", {}), trained_in=entry.get("trained_in"),
        )
        for name, family in tables()["families"].items() for model, entry in family["checkpoints"].items()
    }  # fmt: skip


def published(model: str) -> Published | None:
    """What is known of a hub id, at any revision; None for a folder, and for ids not listed here."""
    if Path(model).exists():
        return None
    return checkpoints().get(model) or checkpoints().get(split_revision(model)[0])


def precision_note(model: str, dtype: str) -> str | None:
    """A note on a checkpoint in a 16-bit precision that it was not made for, or None."""
    known = published(model)
    if known is None or known.trained_in is None or dtype in ("float32", known.trained_in):
        return None
    return (
        f"{model} is published for {known.trained_in} or float32, and pipeline.dtype is {dtype}: set "
        f"pipeline.dtype={known.trained_in}, or take a checkpoint of its family that was made in {dtype}"
    )


def usual_sampling(family: str, model: str) -> dict[str, Any]:
    """`num_steps` and `guidance_scale` of a family, or those of a checkpoint that has its own."""
    known = published(model)
    return tables()["families"][family]["sampling"] | (dict(known.sampling) if known is not None else {})


def _network(entry: str | Mapping[str, Any]) -> dict[str, Any]:
    """A denoiser's configuration: a name in `networks`, or one that is like another."""
    given = dict(tables()["networks"][entry] if isinstance(entry, str) else entry)
    like = given.pop("like", None)
    return given if like is None else {**_network(like), **given}
