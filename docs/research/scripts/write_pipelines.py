"""Writes docs/generic.md's table of every stock pipeline: its family, the generic route, or why neither takes it.

.venv/bin/python docs/research/scripts/write_pipelines.py
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections import defaultdict
from pathlib import Path

from page_parts import fill, table

from flowrl.pipelines import STOCK
from flowrl.pipelines.generic.stock_classes import stock_class

ROOT = Path(__file__).resolve().parents[3]
PAGE, PART = ROOT / "docs/generic.md", "pipelines"
TRIED = ROOT / "docs/research/trials/generic_classes.json"
ALSO = (
    "AllegroPipeline",
    "Kandinsky5T2IPipeline",
    "LTXImageToVideoPipeline",
    "SkyReelsV2ImageToVideoPipeline",
)
"""Classes of the page's table of tried ones that its file of results does not have."""
REFUSED_AT_LOAD = ("LattePipeline",)
GUARDED = "Cosmos"
"""How the names of classes begin that stock cannot make without NVIDIA's guardrail."""
REFUSALS = {
    "has no ": "no family, and its call or class lacks what the generic route passes in",
    "begins at ": "begins at a given image (`strength`)",
    "fills what ": "fills what a mask leaves out (`mask_image`)",
    "steps two ": "steps two schedulers in a loop, of images and of sound",
    "draws from ": "draws from more than a prompt and an image",
}


def stock_pipelines() -> list[str]:
    """Names of the pipelines of the installed diffusers: not modular ones, those that it deprecates, or those whose
    libraries are not here."""
    import diffusers

    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in sorted(dir(diffusers)):
            if not name.endswith("Pipeline") or name.startswith(("Flax", "Onnx")):
                continue
            cls = getattr(diffusers, name)
            if inspect.isclass(cls) and issubclass(cls, diffusers.DiffusionPipeline) and cls.__name__ == name:
                found += [name] * (name != "DiffusionPipeline" and ".deprecated." not in cls.__module__)
    return found


def outcome(name: str, tried: set[str]) -> str:
    """What flowrl does with a class, as the table says it."""
    if name in STOCK:
        return "a family loads it"
    try:
        stock_class(name, "a model")
    except ValueError as error:
        said = str(error).split("cannot train, it ", 1)[1]
        return "refused: " + next(words for start, words in REFUSALS.items() if said.startswith(start))
    if name.startswith(GUARDED):
        return "refused at load: stock cannot be made without NVIDIA's guardrail"
    if name in REFUSED_AT_LOAD:
        return "refused by the test at load"
    return "generic route, tried here" if name in tried else "generic route by its call, not tried"


def text() -> str:
    """The table, and how many there are."""
    import diffusers

    tried = {row["class"] for row in json.loads(TRIED.read_text(encoding="utf-8"))["rows"]} | {*ALSO}
    rows = defaultdict[str, list[str]](list)
    for name in stock_pipelines():
        rows[outcome(name, tried)].append(name.removesuffix("Pipeline"))
    order = sorted(rows, key=lambda said: (said.startswith("refused"), said))
    cells = [[said, str(len(rows[said])), ", ".join(rows[said])] for said in order]
    total = sum(map(len, rows.values()))
    head = f"Of the {total} pipelines of diffusers {diffusers.__version__}; every name ends in `Pipeline`:"
    return f"{head}\n\n{table(['what happens', 'classes', 'which'], cells)}"


if __name__ == "__main__":
    fill(PAGE, PART, text())
