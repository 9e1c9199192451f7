"""Short trainings of the embedded models by the command that users call, and what they log."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from gpu_networks import kernel_of
from gpu_place import Figures, Place
from safetensors.torch import load_file
from torch import Tensor

from flowrl.cli import main
from flowrl.recipes import grpo

SHORT = (
    "num_iterations=2",
    "prompts_per_step=2",
    "group_size=4",
    "micro_batch_size=4",
    "eval_every=0",
    "eval.initial=false",
    "checkpoint_every=2",
    "logging.tensorboard=false",
)
DIFFERS = "rewards=[{name: jpeg_compressibility}]"
"""A reward of which no two images have the same, so that every group teaches something."""
DEVIATION = "ratio_first_deviation"
MOST_DEVIATION = 0.1
"""Of the first ratio from 1: above it two kernels do not only round apart."""


def train(place: Place, folder: Path, name: str, *settings: str, code: int = 0) -> list[dict[str, Any]]:
    """Trains a shipped configuration shortly; its rows, or what it tells where it is to end otherwise."""
    words = [name, f"out={folder}", *SHORT, *place.settings(), *settings]
    told = command(*words, code=code)
    return rows_of(folder) if code == 0 else [{"error": told}]


def command(*words: str, code: int = 0) -> str:
    """`flowrl train` with some words; what it prints to standard error, also where it ends with another code."""
    with contextlib.redirect_stderr(io.StringIO()) as told, contextlib.redirect_stdout(io.StringIO()):
        ended = main(["train", *words])
    assert ended == code, f"flowrl train ended with {ended}: {told.getvalue()[-600:]} (train {' '.join(words)})"
    return told.getvalue()


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of iterations, without those of evaluations."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "seconds" in row]


def lora_of(folder: Path) -> dict[str, Tensor]:
    """What a run has trained."""
    return load_file(folder / "lora" / "pytorch_lora_weights.safetensors")


def numbers(rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Numbers that repeat where arithmetic does: no times, no memory, no counts of workers."""
    left_out = ("seconds", "memory/", "workers/", "budget")
    return [
        {key: value for key, value in row.items() if isinstance(value, int | float) and not key.startswith(left_out)}
        for row in rows
    ]


def apart(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> float:
    """The largest difference of two runs' numbers, over the larger of 1 and the number."""
    mine, theirs = numbers(first), numbers(second)
    assert [row.keys() for row in mine] == [row.keys() for row in theirs]
    pairs = [(row[key], other[key]) for row, other in zip(mine, theirs, strict=True) for key in row]
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs)


def weights_apart(first: Path, second: Path) -> float:
    """The largest difference of two runs' LoRAs, over the largest weight."""
    mine, theirs = lora_of(first), lora_of(second)
    assert mine.keys() == theirs.keys()
    largest = max(float(value.abs().max()) for value in theirs.values())
    return max(float((mine[key] - theirs[key]).abs().max()) for key in theirs) / largest


@contextlib.contextmanager
def update_by(word: str, figures: Figures) -> Iterator[None]:
    """Inside, runs of recipe grpo attend by another kernel in their updates than in their rollouts."""
    update = grpo.update

    def other(record: Any, *args: Any) -> None:
        loop = record.loop
        with kernel_of(_Network(loop.pipeline), word, figures):
            update(record, *args)

    with mock.patch.object(grpo, "update", other):
        yield


class _Network:
    """A run's pipeline where a subject is wanted."""

    def __init__(self, pipeline: Any) -> None:
        self.pipeline, self.device = pipeline, pipeline.device
        self.denoisers = [pipeline.denoiser]
