"""Captions that are wrong in one thing, as captions of photos from the web are.

What such a caption names is a *neighbour* of what its image shows: another shape, one object more or fewer, the colours
exchanged, the opposite relation. Captions drawn at random would not do: on average they say nothing of an image, and
that is what classifier-free guidance takes away.
"""

from __future__ import annotations

import numpy as np

from flowrl.benchmarks.geneval.wording import color_attr, colors, counting, position, single_object, two_object
from flowrl.world.scene_prompts import COUNTS, OPPOSITE, Record
from flowrl.world.scenes import LOOKS_LIKE, SHAPES

WRONG = {
    "single_object": "the next of circle, square, triangle",
    "two_object": "one of the two is the third shape",
    "counting": "one more or one fewer of them",
    "colors": "red for yellow, green for blue, and the reverse",
    "position": "the opposite relation",
    "color_attr": "the two colours exchanged",
}
"""The wrong part of a neighbour of each task's prompts; everything else is as in the prompt."""


def neighbour(record: Record, rng: np.random.Generator) -> Record:
    """A wrong image's content for a record's prompt: a record of the task that differs in one thing; `rng` chooses."""
    tag, clauses = record["tag"], record["include"]
    names = [clause["class"] for clause in clauses]
    if tag == "single_object":
        return single_object(SHAPES[(SHAPES.index(names[0]) + 1) % len(SHAPES)])
    if tag == "two_object":
        (missing,) = set(SHAPES) - set(names)
        return two_object(names[0], missing) if rng.random() < 0.5 else two_object(missing, names[1])
    if tag == "counting":
        near = [count for count in COUNTS if abs(count - clauses[0]["count"]) == 1]
        return counting(names[0], near[int(rng.integers(len(near)))])
    if tag == "colors":
        return colors(names[0], LOOKS_LIKE[clauses[0]["color"]])
    if tag == "position":
        relation = clauses[1]["position"][0]
        return position(names[1], OPPOSITE[relation], names[0])
    if tag == "color_attr":
        return color_attr(names[0], clauses[1]["color"], names[1], clauses[0]["color"])
    raise ValueError(f"no neighbours of a record of task {tag!r}: the world has {', '.join(WRONG)}")
