"""Images in place of a model's: flat colours in GenEval's layout, so that runners can be tested without sampling."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from flowrl.generation.folders import ImageFile, read_folder
from flowrl.generation.subject import Settings, Subject
from flowrl.prompts.loading import Prompt

SIZE = 8


def flat(level: int, size: int = SIZE) -> Image.Image:
    """A grey image of an 8-bit level."""
    return Image.fromarray(np.full((size, size, 3), level, dtype=np.uint8))


def draw_flat(settings: Settings, subject: Subject, prompts: Sequence[Prompt], suffix: str = ".png") -> list[ImageFile]:
    """Stands for `images_of`: an image's level is 10 * prompt + sample, one more for a subject named base."""
    folder = subject.folder / "images"
    for index, prompt in enumerate(prompts):
        place = folder / f"{index:05d}" / "samples"
        place.mkdir(parents=True, exist_ok=True)
        (place.parent / "metadata.jsonl").write_text(json.dumps({**prompt.metadata, "prompt": prompt.text}) + "\n")
        for sample in range(settings.samples):
            path = place / f"{sample:05d}.png"
            if not path.is_file():
                flat(10 * index + sample + (100 if subject.label == "base" else 0)).save(path)
    return read_folder(folder)


def settings_for(
    out: Path, benchmark: str, *, images: Path | None = None, base: bool = False, **more: object
) -> Settings:
    """Settings of a command about images that exist, or that `draw_flat` will make."""
    subject = Subject(label="model", folder=out / "model", images=images)
    other = Subject(label="base", folder=out / "base") if base else None
    return Settings(benchmark=benchmark, subject=subject, base=other, out=out, **more)  # type: ignore[arg-type]
