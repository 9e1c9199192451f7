"""Grids of the embedded world: a 2x2 grid of scenes of one shape each in a 64 x 64 image, and whether it is right.

Each cell is a quarter of the image, 32 x 32 pixels, which the world's detector reads. Nothing is drawn between cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from flowrl.benchmarks.geneval.metadata import parse_record
from flowrl.benchmarks.geneval.rules import MIN_SCORE
from flowrl.benchmarks.geneval.wording import colors
from flowrl.prompts.grids import cell_pairs, cell_prompts, split_grid
from flowrl.runtime.shapes import UInt8
from flowrl.world.detector import color_of, detect_in_batch
from flowrl.world.scene_prompts import Record, split

ROWS = COLUMNS = 2
CELLS = ROWS * COLUMNS

Content = tuple[tuple[str, str], ...]
"""What a cell holds: label and colour of each object, sorted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GridVerdict:
    """The answer for one image."""

    cells: tuple[bool, ...]
    """Whether each cell holds exactly the object that was asked for, and nothing else."""
    consistency: float
    """Share of the pairs of cells that hold the same, whatever was asked for; an empty cell is like no other."""
    seen: tuple[Content, ...]
    """What each cell holds."""

    @property
    def correct(self) -> bool:
        """Whether every cell is right."""
        return all(self.cells)

    @property
    def share(self) -> float:
        """Share of the cells that are right."""
        return sum(self.cells) / len(self.cells)


def grid_record(label: str, color: str) -> Record:
    """The record "a 2x2 grid of photos of a COLOR LABEL"; `sub_prompts` holds a GenEval record for each cell."""
    cell = colors(label, color)
    prompt = f"a {ROWS}x{COLUMNS} grid of photos of {cell['prompt'].removeprefix('a photo of ')}"
    return {"tag": "grid", "sub_prompts": [cell] * CELLS, "prompt": prompt}


def grid_records() -> tuple[list[Record], list[Record]]:
    """All records to train on and held out: shape and colour are held out as in the world's own prompts."""
    train, held_out = split()

    def of(records: Sequence[Record]) -> list[Record]:
        shown = [(clause["class"], clause["color"]) for record in records for clause in record["include"]]
        return [grid_record(*names) for names in dict.fromkeys(shown)]

    return of(train["colors"]), of(held_out["colors"])


def grid_verdict(image: UInt8[np.ndarray, " h w 3"], record: Mapping[str, Any]) -> GridVerdict:
    """Judges an image of the embedded world, uint8 `[H, W, 3]`, RGB: what does each quarter hold, is it what the
    record's `sub_prompts` ask for, one object each, and do they agree? Raises ValueError: not `grid_record`'s."""
    asked = asked_objects(record)
    channels_first = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)
    cells = split_grid(channels_first[None], ROWS, COLUMNS)[0].permute(0, 2, 3, 1).numpy()
    seen = tuple(
        tuple(sorted((one.label, color_of(cell, one)) for one in found if one.score > MIN_SCORE))
        for cell, found in zip(cells, detect_in_batch(cells), strict=True)
    )
    pairs = cell_pairs(CELLS)
    return GridVerdict(
        cells=tuple(content == (wanted,) for content, wanted in zip(seen, asked, strict=True)),
        consistency=sum(bool(seen[i]) and seen[i] == seen[j] for i, j in pairs) / len(pairs),
        seen=seen,
    )


def asked_objects(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Label and colour of the object that a grid's record asks for in each cell. Raises ValueError if it does not ask
    for exactly one object with a colour in each of the cells."""
    cells = [parse_record(cell.metadata).include for cell in cell_prompts("", record)]
    asked = [(own[0].label, own[0].color) for own in cells if len(own) == 1 and own[0].count == 1]
    found = [(label, color) for label, color in asked if color is not None]
    if not len(found) == len(cells) == CELLS:
        raise ValueError(
            f"a grid's record needs sub_prompts: {CELLS} GenEval records that ask for one object with a colour each, "
            f"got {record.get('sub_prompts')!r}"
        )
    return found
