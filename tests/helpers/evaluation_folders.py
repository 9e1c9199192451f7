"""Folders of drawn scenes with known answers, and the command as a user calls it, for tests of evaluations."""

from __future__ import annotations

import importlib
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flowrl import cli
from flowrl.benchmarks.geneval import wording as world
from flowrl.evaluation import evaluate
from flowrl.generation.subject import Settings
from flowrl.runtime.call import answering
from flowrl.world.scenes import draw_scene, random_scene

RECORDS = [
    world.single_object("circle"),
    world.two_object("square", "triangle"),
    world.counting("circle", 3),
    world.colors("square", "red"),
    world.position("triangle", "above", "circle"),
    world.color_attr("circle", "blue", "square", "yellow"),
]
"""One prompt of each task."""


def right(record: dict[str, Any], sample: int) -> np.ndarray:
    """A scene in which the record holds."""
    return draw_scene(random_scene(record, np.random.default_rng([sample, len(record["prompt"])])))


def empty(record: dict[str, Any], sample: int) -> np.ndarray:
    """The world's ground with nothing on it."""
    return draw_scene(())


def mixed(record: dict[str, Any], sample: int) -> np.ndarray:
    """Right, then empty."""
    return right(record, sample) if sample % 2 == 0 else empty(record, sample)


def write_folder(
    folder: Path,
    records: Sequence[dict[str, Any]] = RECORDS,
    *,
    samples: int = 2,
    image: Callable[[dict[str, Any], int], np.ndarray] = right,
    name: str = "{:05d}.png",
) -> Path:
    """A folder as the original scripts write it."""
    for index, record in enumerate(records):
        place = folder / f"{index:05d}" / "samples"
        place.mkdir(parents=True)
        (place.parent / "metadata.jsonl").write_text(json.dumps(record))
        for sample in range(samples):
            Image.fromarray(image(record, sample)).save(place / name.format(sample))
    return folder


def flowrl_eval(*arguments: object) -> int:
    """`flowrl eval ARGUMENTS`, errors as exceptions that say what the terminal does."""
    return raising("eval", *arguments)


def raising(command: str, *arguments: object) -> int:
    """A command as a user calls it, errors as exceptions that say what the terminal does."""
    words = [str(argument) for argument in arguments]
    module = importlib.import_module(f"flowrl.commands.{command.replace(' ', '_')}")
    try:
        with answering(shlex.join(["flowrl", command, *words])):
            return int(module.run(cli.parse(command, words)))
    except ValueError as error:
        raise ValueError(cli.in_flags(str(error), command)) from error


class _Stop(Exception):
    """Ends a command where its settings are known."""


def settings_of(*arguments: object) -> list[Settings]:
    """What `flowrl eval ARGUMENTS` hands to its benchmark, for each model; nothing is looked for or drawn."""
    seen: list[Settings] = []

    def stop(settings: Settings) -> None:
        raise _Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "check_source", lambda source, **options: None)
        patch.setattr(evaluate, "check", seen.append)
        patch.setattr(evaluate, "run", stop)
        with pytest.raises(_Stop):
            flowrl_eval(*arguments)
    return seen


def read_rows(path: Path) -> list[dict[str, Any]]:
    """A file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]
