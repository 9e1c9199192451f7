"""Writes the embedded world's prompt lists, as `assets/prompts` holds them: `flowrl pretrain prompts [out=FOLDER]`.

Of each kind a list to train on and a held-out one: `world_*` and `world_grids_*` (GenEval records), `motion_*` (clips),
`edits_*` with the drawn images that they are about. All are functions of fixed seeds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from flowrl.runtime.files import write_atomically
from flowrl.world.clips import motion_records
from flowrl.world.edits import draw_edit, edit_records
from flowrl.world.scene_grids import grid_records
from flowrl.world.scene_prompts import eval_records, train_records

_SOURCES = "edit_sources"


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptListsConfig:
    """Settings of `flowrl pretrain prompts`."""

    out: str = "runs/prompts"
    """Folder of the lists."""


def main(config: PromptListsConfig) -> Path:
    """Writes the lists and the images; returns their folder."""
    out = Path(config.out)
    (out / _SOURCES).mkdir(parents=True, exist_ok=True)
    lists = {
        "world": (train_records(), eval_records()),
        "world_grids": grid_records(),
        "motion": motion_records(),
        "edits": edit_records(),
    }
    for kind, parts in lists.items():
        for part, records in zip(("train", "heldout"), parts, strict=True):
            if kind == "edits":
                sources = [f"{_SOURCES}/{part}_{n:03d}.png" for n in range(len(records))]
                for source, record in zip(sources, records, strict=True):
                    Image.fromarray(draw_edit(record)[0]).save(out / source, optimize=True)
                records = [{"prompt": r["prompt"], "source": s, **r} for s, r in zip(sources, records, strict=True)]
            write_atomically(out / f"{kind}_{part}.jsonl", "".join(json.dumps(r) + "\n" for r in records))
    return out
