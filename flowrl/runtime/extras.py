"""Packages that only some runs need: each is in an extra of flowrl's, and imported where it is used."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

EXTRAS: Mapping[str, str] = {
    "av": "video",
    "httpx2": "remote",
    "scipy": "compare",
    "tensorboard": "tensorboard",
    "torchvision": "scorers",
}
"""Module -> the extra that installs it, of those that are imported without a look before."""


def remedy(module: str | None) -> str:
    """How to install a missing module, as an imperative."""
    extra = EXTRAS.get(str(module).partition(".")[0])
    return "install it" if extra is None else f"in flowrl's folder, pip install -e '.[{extra}]'"


def check_extra(module: str, what: str) -> None:
    """Refuses a feature whose module of `EXTRAS` is not installed."""
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"{what} needs the package {module}, which is not installed: {remedy(module)}")
