"""Answers that were kept are used again for the same image, record, files and reward alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flowrl.generation.folders import ImageFile
from flowrl.generation.scorers import answers_of, score_images
from flowrl.rewards import FunctionReward, RewardInputs, RewardOutput, output_of

Change = Callable[[Path, ImageFile], ImageFile]


def shade(path: Path, level: int) -> Path:
    """A flat image; all have the same number of bytes, and the time of change of the one before."""
    before = path.stat() if path.exists() else None
    Image.fromarray(np.full((4, 4, 3), level, dtype=np.uint8)).save(path, format="BMP")
    if before is not None:
        assert path.stat().st_size == before.st_size
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return path


def other_pixels(folder: Path, image: ImageFile) -> ImageFile:
    shade(image.path, 200)
    return image


def other_source(folder: Path, image: ImageFile) -> ImageFile:
    shade(folder / "source.png", 200)
    return image


def other_reference(folder: Path, image: ImageFile) -> ImageFile:
    shade(folder / "reference.png", 200)
    return image


def other_named(folder: Path, image: ImageFile) -> ImageFile:
    shade(folder / "named.png", 200)
    return image


def other_record(folder: Path, image: ImageFile) -> ImageFile:
    return replace(image, record={**image.record, "text": "HELLO"})


def other_prompt(folder: Path, image: ImageFile) -> ImageFile:
    return replace(image, prompt="another")


def same(folder: Path, image: ImageFile) -> ImageFile:
    return replace(image)


@pytest.mark.parametrize(
    "change", [same, other_pixels, other_source, other_reference, other_named, other_record, other_prompt]
)
def test_what_a_reward_reads_is_part_of_the_key(tmp_path: Path, change: Change) -> None:
    asked: list[Any] = []

    def score(inputs: RewardInputs) -> RewardOutput:
        asked.append(inputs)
        return output_of([0.5] * len(inputs), inputs)

    reward = FunctionReward(name="r", score=score, needs=frozenset({"images"}), version="1")
    record = {"prompt": "a sign", "text": "WRONG", "sources": [str(shade(tmp_path / "named.png", 1))]}
    image = ImageFile(
        file="a.png", path=shade(tmp_path / "a.png", 1), prompt="a sign", index=0, record=record,
        source_images=(shade(tmp_path / "source.png", 1),), reference_images=(shade(tmp_path / "reference.png", 1),),
    )  # fmt: skip
    for shown in (image, image, None):
        shown = shown or change(tmp_path, image)
        with answers_of("panel", "r", reward, {"name": "ocr"}, tmp_path) as journal:
            score_images("r", reward, [shown], journal, batch_size=1, label="x")
    assert len(asked) == (1 if change is same else 2)


def test_options_of_a_reward_and_files_that_they_name_have_journals_of_their_own(tmp_path: Path) -> None:
    reward = FunctionReward(name="r", score=lambda inputs: output_of([], inputs), needs=frozenset(), version="1")
    weights = tmp_path / "weights.pt"
    weights.write_bytes(b"a")

    def journal(**options: Any) -> str:
        with answers_of("panel", "r", reward, {"name": "ocr", "options": options}, tmp_path) as opened:
            return opened.path.name

    names = [journal(), journal(target_field="text"), journal(model=str(weights))]
    assert names == [journal(), journal(target_field="text"), journal(model=str(weights))]
    weights.write_bytes(b"b")
    assert len({*names, journal(model=str(weights))}) == 4
