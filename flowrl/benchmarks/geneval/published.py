"""GenEval's 553 prompts, drawn again: `published_records()` gives those of the official metadata file in its order.

The file was drawn at random by Ghosh et al. 2023 (arXiv 2310.11513); the same draws from the same generator give the
same bytes, so nothing has to be copied or downloaded.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from flowrl.benchmarks.geneval import wording
from flowrl.benchmarks.geneval.metadata import COLORS, RELATIONS
from flowrl.benchmarks.geneval.wording import MetadataRecord
from flowrl.runtime.files import read_text

_SEED, _DRAWS = 43, 100  # the authors'

CLASSES = tuple(read_text(Path(__file__).with_name("classes.txt")).splitlines())
"""COCO's 80 classes by index under GenEval's names; they differ from COCO's at 64 to 66 (mouse, remote, keyboard)."""

_PERSON = CLASSES.index("person")


def published_records() -> list[MetadataRecord]:
    """The 553 records of the official metadata file: every class once, then a hundred draws of each other task without
    those drawn before, so tasks end with fewer. No colour is asked of a person."""
    rng = np.random.default_rng(_SEED)
    records = [
        wording.single_object(CLASSES[int(i)]) for i in rng.choice(len(CLASSES), size=len(CLASSES), replace=False)
    ]
    records += [wording.two_object(*_two_classes(rng)) for _ in range(_DRAWS)]
    for _ in range(_DRAWS):
        name = CLASSES[int(rng.choice(len(CLASSES)))]
        records.append(wording.counting(name, int(rng.integers(2, 4, endpoint=True))))
    for _ in range(_DRAWS):
        name = _not_a_person(int(rng.choice(len(CLASSES) - 1)))
        records.append(wording.colors(name, COLORS[int(rng.choice(len(COLORS)))]))
    for _ in range(_DRAWS):
        subject, reference = _two_classes(rng)
        records.append(wording.position(subject, RELATIONS[int(rng.choice(len(RELATIONS)))], reference))
    for _ in range(_DRAWS):
        first, second = (_not_a_person(int(i)) for i in rng.choice(len(CLASSES) - 1, size=2, replace=False))
        one, other = (COLORS[int(i)] for i in rng.choice(len(COLORS), size=2, replace=False))
        records.append(wording.color_attr(first, one, second, other))
    return list({json.dumps(record): record for record in records}.values())


def _two_classes(rng: np.random.Generator) -> tuple[str, str]:
    first, second = rng.choice(len(CLASSES), size=2, replace=False)
    return CLASSES[int(first)], CLASSES[int(second)]


def _not_a_person(index: int) -> str:
    """The class of a draw among the 79 others: they are counted from the one after `person`."""
    return CLASSES[(_PERSON + 1 + index) % len(CLASSES)]
