"""Prompts of the embedded world: GenEval's six task types over three shapes and four colours, in ten wordings.

The first wording is GenEval's own, "a photo of ..."; the others begin with another of `OPENINGS`.

*Held-out* means: prompts that reinforcement learning never trains on. Of two_object, colors, position and color_attr
whole combinations are held out, in all wordings. single_object and counting have too few (3 and 9); there wordings of
them are held out. Each task has 20 distinct held-out prompts, each with four images.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from flowrl.benchmarks.geneval.metadata import RELATIONS
from flowrl.benchmarks.geneval.wording import color_attr, colors, counting, position, single_object, two_object
from flowrl.world.scenes import COLORS, SHAPES

Record = dict[str, Any]

OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
"""Relation -> the one that holds the other way round."""
COUNTS = (2, 3, 4)
"""How many objects counting asks for."""
OPENINGS = (
    "a photo of", "a picture of", "an image of", "a drawing of", "a painting of", "a print of", "a sketch of",
    "a poster of", "a view of", "a scene of",
)  # fmt: skip
"""How the world's prompts begin; the first is GenEval's."""

_HELD_OUT_SHARE = {"two_object": 1 / 3, "colors": 4 / 12, "position": 4 / 12, "color_attr": 10 / 36}
_HELD_OUT = 20  # distinct prompts of a task
_SPLIT_SEED = 43
EVAL_IMAGES_PER_TASK = 80


def word_record(record: Record, opening: str) -> Record:
    """The record with another of `OPENINGS` before what its prompt names."""
    return {**record, "prompt": f"{opening} {record['prompt'].removeprefix(f'{OPENINGS[0]} ')}"}


def combinations() -> dict[str, list[list[Record]]]:
    """All records by task in GenEval's wording; prompts with one meaning ("a and b", "b and a") stay together."""
    pairs = list(itertools.combinations(SHAPES, 2))
    found: dict[str, list[list[Record]]] = {
        "single_object": [[single_object(a)] for a in SHAPES],
        "two_object": [[two_object(a, b), two_object(b, a)] for a, b in pairs],
        "counting": [[counting(a, n)] for a in SHAPES for n in COUNTS],
        "colors": [[colors(a, c)] for a in SHAPES for c in COLORS],
        "position": [
            [position(a, relation, b), position(b, OPPOSITE[relation], a)] for a, b in pairs for relation in RELATIONS
        ],
        "color_attr": [
            [color_attr(a, c, b, d), color_attr(b, d, a, c)]
            for a, b in pairs
            for c, d in itertools.permutations(COLORS, 2)
        ],
    }
    for [record] in found["counting"]:  # what is forbidden comes last, as the shipped lists have it
        record["exclude"] = record.pop("exclude")
    return found


def split() -> tuple[dict[str, list[Record]], dict[str, list[Record]]]:
    """Training and held-out records by task, disjoint; 20 are held out of each, their wordings as even as they go."""
    rng = np.random.default_rng(_SPLIT_SEED)
    train: dict[str, list[Record]] = {}
    held_out: dict[str, list[Record]] = {}
    for task, groups in combinations().items():
        share = _HELD_OUT_SHARE.get(task, 1.0)
        order = rng.permutation(len(groups))
        count = round(share * len(groups))
        hidden = _in_all_words([record for i in sorted(order[:count]) for record in groups[i]])
        known = _in_all_words([record for i in sorted(order[count:]) for record in groups[i]])
        held_out[task] = hidden[:_HELD_OUT]
        train[task] = known or hidden[_HELD_OUT:]
    return train, held_out


def _in_all_words(records: Sequence[Record]) -> list[Record]:
    """Every record in every wording; any stretch of the list has records and wordings in about equal numbers."""
    return [
        word_record(record, OPENINGS[(turn + 3 * place) % len(OPENINGS)])
        for turn in range(len(OPENINGS))
        for place, record in enumerate(records)
    ]


def train_records() -> list[Record]:
    """The prompts to train on: 6 x 96 records in a fixed order, tasks alternating; tasks of few combinations repeat."""
    train, _ = split()
    rng = np.random.default_rng(_SPLIT_SEED)
    columns = []
    for records in train.values():
        picks = np.concatenate([rng.permutation(len(records)) for _ in range(-(-96 // len(records)))])[:96]
        columns.append([records[i] for i in picks])
    return [record for row in zip(*columns, strict=True) for record in row]


def eval_records() -> list[Record]:
    """The held-out list: 80 rows per task, its 20 prompts four times each, tasks one after another."""
    _, held_out = split()
    return [
        record
        for records in held_out.values()
        for record in records
        for _ in range(EVAL_IMAGES_PER_TASK // len(records))
    ]
