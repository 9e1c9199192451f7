"""GenEval's 553 prompts, drawn again: `published_records()` gives those of the official metadata file in its order.

The file was drawn at random by Ghosh et al. 2023 (arXiv 2310.11513); the same draws from the same generator give the
same bytes, so nothing has to be copied or downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from flowrl.benchmarks.geneval.metadata import COLORS, RELATIONS, TASKS

GenEvalRecord = dict[str, Any]

_SEED, _DRAWS = 43, 100  # the authors'

CLASSES = tuple(
    "person,bicycle,car,motorcycle,airplane,bus,train,truck,boat,traffic light,fire hydrant,stop sign,parking meter,"
    "bench,bird,cat,dog,horse,sheep,cow,elephant,bear,zebra,giraffe,backpack,umbrella,handbag,tie,suitcase,frisbee,"
    "skis,snowboard,sports ball,kite,baseball bat,baseball glove,skateboard,surfboard,tennis racket,bottle,wine glass,"
    "cup,fork,knife,spoon,bowl,banana,apple,sandwich,orange,broccoli,carrot,hot dog,pizza,donut,cake,chair,couch,"
    "potted plant,bed,dining table,toilet,tv,laptop,computer mouse,tv remote,computer keyboard,cell phone,microwave,"
    "oven,toaster,sink,refrigerator,book,clock,vase,scissors,teddy bear,hair drier,toothbrush".split(",")
)
"""COCO's 80 classes by index under GenEval's names; they differ from COCO's at 64 to 66 (mouse, remote, keyboard)."""

NUMBERS = ("zero", "one", "two", "three", "four")
_PERSON = CLASSES.index("person")


def published_records() -> list[GenEvalRecord]:
    """The 553 records of the official metadata file: every class once, then a hundred draws of each other task.

    Records that were drawn before are left out, so that tasks end with fewer. No colour is asked of a person.
    """
    rng = np.random.default_rng(_SEED)
    records = [_single_object(int(i)) for i in rng.choice(len(CLASSES), size=len(CLASSES), replace=False)]
    draw: Callable[[np.random.Generator], GenEvalRecord]
    for draw in (_two_object, _counting, _colors, _position, _color_attr):
        records += [draw(rng) for _ in range(_DRAWS)]
    return list({json.dumps(record): record for record in records}.values())


def _single_object(index: int) -> GenEvalRecord:
    name = CLASSES[index]
    return _record("single_object", [_clause(name)], f"a photo of {_with_article(name)}")


def _two_object(rng: np.random.Generator) -> GenEvalRecord:
    first, second = _two_classes(rng)
    prompt = f"a photo of {_with_article(first)} and {_with_article(second)}"
    return _record("two_object", [_clause(first), _clause(second)], prompt)


def _counting(rng: np.random.Generator) -> GenEvalRecord:
    name = CLASSES[int(rng.choice(len(CLASSES)))]
    count = int(rng.integers(2, 4, endpoint=True))
    plural = f"{name}es" if name.endswith("s") else f"{name}s"  # the only rule: "benchs" and "sheeps" are official
    prompt = f"a photo of {NUMBERS[count]} {plural}"
    return _record("counting", [_clause(name, count)], prompt, exclude=[_clause(name, count + 1)])


def _colors(rng: np.random.Generator) -> GenEvalRecord:
    name = _not_a_person(int(rng.choice(len(CLASSES) - 1)))
    color = COLORS[int(rng.choice(len(COLORS)))]
    return _record("colors", [_clause(name, color=color)], f"a photo of {_with_article(color)} {name}")


def _position(rng: np.random.Generator) -> GenEvalRecord:
    subject, reference = _two_classes(rng)
    relation = RELATIONS[int(rng.choice(len(RELATIONS)))]
    include = [_clause(reference), _clause(subject, position=[relation, 0])]
    prompt = f"a photo of {_with_article(subject)} {relation} {_with_article(reference)}"
    return _record("position", include, prompt)


def _color_attr(rng: np.random.Generator) -> GenEvalRecord:
    first, second = (_not_a_person(int(i)) for i in rng.choice(len(CLASSES) - 1, size=2, replace=False))
    one, other = (COLORS[int(i)] for i in rng.choice(len(COLORS), size=2, replace=False))
    prompt = f"a photo of {_with_article(one)} {first} and {_with_article(other)} {second}"
    return _record("color_attr", [_clause(first, color=one), _clause(second, color=other)], prompt)


def _record(
    tag: str, include: list[dict[str, Any]], prompt: str, exclude: list[dict[str, Any]] | None = None
) -> GenEvalRecord:
    """A record, its keys in the order of the official file."""
    assert tag in TASKS
    forbidden = {} if exclude is None else {"exclude": exclude}
    return {"tag": tag, "include": include, **forbidden, "prompt": prompt}


def _clause(name: str, count: int = 1, **more: Any) -> dict[str, Any]:
    return {"class": name, "count": count, **more}


def _two_classes(rng: np.random.Generator) -> tuple[str, str]:
    first, second = rng.choice(len(CLASSES), size=2, replace=False)
    return CLASSES[int(first)], CLASSES[int(second)]


def _not_a_person(index: int) -> str:
    """The class of a draw among the 79 others: they are counted from the one after `person`."""
    return CLASSES[(_PERSON + 1 + index) % len(CLASSES)]


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
