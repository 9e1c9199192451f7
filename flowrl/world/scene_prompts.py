"""Prompts of the embedded world: GenEval's six task types and wording over three shapes and four colours.

*Held-out* means: combinations of two_object, colors, position and color_attr that reinforcement learning never trains
on. single_object and counting have too few combinations to split; there training and evaluation differ in seeds only.

The held-out list has every combination that is held out: 3 single objects, 2 pairs, 9 counts, 4 colours, 8 positions
and 24 pairs of colours, 50 prompts, each repeated to 80 rows of a task. There are no more: the whole world has 3, 6, 9,
12, 24 and 72, and one wording, since the embedded models have read no other. Intervals draw these few prompts as if
from many like them (`flowrl.statistics.means`), which makes them wider than repeated images alone would.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from flowrl.benchmarks.geneval.metadata import RELATIONS
from flowrl.benchmarks.geneval.wording import color_attr, colors, counting, position, single_object, two_object
from flowrl.world.scenes import COLORS, SHAPES

Record = dict[str, Any]

_OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
_COUNTS = (2, 3, 4)
_HELD_OUT_SHARE = {"two_object": 1 / 3, "colors": 4 / 12, "position": 4 / 12, "color_attr": 12 / 36}
_SPLIT_SEED = 43
EVAL_IMAGES_PER_TASK = 80


def _counting(label: str, count: int) -> Record:
    """GenEval's record, with what is forbidden last, as the shipped lists have it."""
    record = counting(label, count)
    record["exclude"] = record.pop("exclude")
    return record


def combinations() -> dict[str, list[list[Record]]]:
    """All records by task, grouped so that prompts with one meaning ("a and b", "b and a") stay together."""
    pairs = list(itertools.combinations(SHAPES, 2))
    found: dict[str, list[list[Record]]] = {
        "single_object": [[single_object(a)] for a in SHAPES],
        "two_object": [[two_object(a, b), two_object(b, a)] for a, b in pairs],
        "counting": [[_counting(a, n)] for a in SHAPES for n in _COUNTS],
        "colors": [[colors(a, c)] for a in SHAPES for c in COLORS],
        "position": [
            [position(a, relation, b), position(b, _OPPOSITE[relation], a)] for a, b in pairs for relation in RELATIONS
        ],
        "color_attr": [
            [color_attr(a, c, b, d), color_attr(b, d, a, c)]
            for a, b in pairs
            for c, d in itertools.permutations(COLORS, 2)
        ],
    }
    return found


def split() -> tuple[dict[str, list[Record]], dict[str, list[Record]]]:
    """Training and held-out records by task; disjoint except for single_object and counting."""
    rng = np.random.default_rng(_SPLIT_SEED)
    train: dict[str, list[Record]] = {}
    held_out: dict[str, list[Record]] = {}
    for task, groups in combinations().items():
        share = _HELD_OUT_SHARE.get(task)
        if share is None:
            train[task] = [record for group in groups for record in group]
            held_out[task] = list(train[task])
            continue
        order = rng.permutation(len(groups))
        count = round(share * len(groups))
        held_out[task] = [record for i in sorted(order[:count]) for record in groups[i]]
        train[task] = [record for i in sorted(order[count:]) for record in groups[i]]
    return train, held_out


def train_records() -> list[Record]:
    """The prompt list that reinforcement learning trains on: equal numbers of the six tasks, in a fixed order.

    Tasks with few combinations repeat theirs; the list has 6 x 96 records, tasks alternating.
    """
    train, _ = split()
    rng = np.random.default_rng(_SPLIT_SEED)
    columns = []
    for records in train.values():
        picks = np.concatenate([rng.permutation(len(records)) for _ in range(-(-96 // len(records)))])[:96]
        columns.append([records[i] for i in picks])
    return [record for row in zip(*columns, strict=True) for record in row]


def eval_records() -> list[Record]:
    """The held-out list: 80 rows per task, its combinations repeated as evenly as they go, tasks one after another."""
    _, held_out = split()
    return [
        records[i % len(records)]
        for records in held_out.values()
        for i in sorted(range(EVAL_IMAGES_PER_TASK), key=lambda i: i % len(records))
    ]
