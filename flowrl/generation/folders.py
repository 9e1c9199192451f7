"""Folders of images in GenEval's layout: NNNNN/metadata.jsonl holds a prompt's record, NNNNN/samples its images.
Clips lie in the same layout, a file each.

It reads folders of this toolkit and of the original scripts, with sample names of any number of digits. It refuses
incomplete folders, because a score over some of the images is another number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.media.reading import read_image
from flowrl.prompts.identity import contents
from flowrl.prompts.prompt_files import CLIPS, REFERENCES, SOURCES
from flowrl.runtime.digests import content_digest, text_digest
from flowrl.runtime.files import read_json, read_json_lines
from flowrl.runtime.shapes import UInt8

DRAWN = "drawn.json"
"""File on what drew the images, with which settings; only this toolkit's folders have it."""

IMAGES = (".png",)
"""Endings of image samples; `flowrl.media.lossless.CLIPS` are those of clips."""

_LETTERS = 16  # of digests in keys
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageFile:
    """One image: `file` is its path in the folder, `index` its prompt's number (its group), `sample` its number in the
    group, `record` the facts in the folder or a file about it or its prompt."""

    file: str
    path: Path
    prompt: str
    index: int
    sample: int = 0
    record: dict[str, Any] = field(default_factory=dict)
    source_images: tuple[Path, ...] = ()
    reference_images: tuple[Path, ...] = ()

    @property
    def stamp(self) -> str:
        """File and content, as a key for results about exactly this image."""
        return f"{self.file}:{content_digest(self.path)[:_LETTERS]}"

    @property
    def read_with(self) -> str:
        """All that a reward may read besides pixels, as text: prompt, record, and content of its images and clips."""
        files = [
            contents((*given, *_named_files(self.record, keys)))
            for given, keys in (
                (self.source_images, (*SOURCES, *CLIPS)),
                (self.reference_images, REFERENCES),
            )
        ]
        return json.dumps([self.prompt, self.record, files], sort_keys=True, default=str)

    @property
    def asked_for(self) -> str:
        """The key of an image's prompt: the text, with the content of images and clips that it is about."""
        files = contents(self.source_images or _named_files(self.record, (*SOURCES, *CLIPS)))
        return json.dumps([self.prompt, files], ensure_ascii=False) if files else self.prompt

    def key_with(self, text: str) -> str:
        """A key from the image's content and the text of a question."""
        return f"{self.stamp}:{text_digest(text)}"

    def pixels(self) -> UInt8[np.ndarray, " h w 3"]:
        """The image as RGB. Raises ValueError: it cannot be read to its end."""
        return read_image(self.path)


def _named_files(record: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """The files that some keys of a record name."""
    found = [record.get(key) or () for key in keys]
    return [str(name) for part in found for name in ([part] if isinstance(part, str) else part)]


def is_folder_of_images(folder: Path) -> bool:
    """Whether a folder has this layout, complete or not."""
    return folder.is_dir() and any((path / "metadata.jsonl").is_file() for path in _numbered_folders(folder))


def read_folder(folder: Path, suffixes: Sequence[str] = IMAGES) -> list[ImageFile]:
    """All images, or clips, of a folder in GenEval's layout with these `suffixes`, in the order of prompts and samples.
    Raises ValueError: there is no such folder, it has another layout, or images are missing."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}: give one that holds NNNNN/metadata.jsonl and NNNNN/samples.")
    places = _numbered_folders(folder)
    if not places:
        raise ValueError(
            f"{folder} has no sub-folder with a number for a name: GenEval's layout is NNNNN/metadata.jsonl with "
            f"NNNNN/samples/<digits>.png, a sub-folder for each prompt."
        )
    images: list[ImageFile] = []
    for place in places:
        record, samples = read_record(place / "metadata.jsonl"), place / "samples"
        names = [path.name for path in _samples_of(place) if path.suffix in suffixes]
        by_number = {int(Path(name).stem): name for name in names}
        if len(by_number) < len(names):
            raise ValueError(f"{samples} holds two images of one number (such as 0000.png and 00000.png): keep one.")
        images += [
            ImageFile(file=f"{place.name}/samples/{by_number[number]}", path=samples / by_number[number],
                      prompt=record["prompt"], index=int(place.name), sample=sample, record=record)
            for sample, number in enumerate(sorted(by_number))
        ]  # fmt: skip
    if not images and (other := next((path for place in places for path in _samples_of(place)), None)) is not None:
        raise ValueError(
            f"{folder} holds no samples with names that end in {', '.join(suffixes)}, but {other.name}: benchmarks of "
            f"images take images, those of videos clips."
        )
    _check_complete(folder, places, images)
    return images


def _numbered_folders(folder: Path) -> list[Path]:
    found = [path for path in folder.iterdir() if _NUMBER.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: (int(path.name), path.name))


def _samples_of(place: Path) -> list[Path]:
    """The files whose names are numbers."""
    samples = place / "samples"
    return [path for path in samples.iterdir() if _NUMBER.fullmatch(path.stem)] if samples.is_dir() else []


def read_record(path: Path) -> dict[str, Any]:
    """The one record of a metadata file. Raises ValueError: no file, or it holds something else."""
    try:
        records = read_json_lines(path)
    except ValueError as error:
        raise ValueError(f"{error}: the folder is half-written or another kind.") from error
    if len(records) != 1 or not isinstance(records[0].get("prompt"), str):
        raise ValueError(f"{path} must hold one JSON object with a prompt: the folder is half-written or another kind.")
    return records[0]


def _check_complete(folder: Path, places: Sequence[Path], images: Sequence[ImageFile]) -> None:
    counts = {int(place.name): 0 for place in places}
    if len(counts) < len(places):
        raise ValueError(f"{folder} has two sub-folders of one number (such as 0001 and 00001): keep one.")
    for image in images:
        counts[image.index] += 1
    num_prompts, samples = len(counts), max(counts.values())
    drawn = read_drawn(folder)
    if drawn is not None:
        num_prompts, samples = drawn["num_prompts"], drawn["samples"]
    short = next((index for index, count in counts.items() if count != samples or count == 0), None)
    if short is not None or len(counts) != num_prompts:
        where = f"prompt {short:05d} has {counts[short]} images" if short is not None else f"{len(counts)} are there"
        more = "Finish it with the command that drew it" if drawn is not None else "Draw what is missing"
        raise ValueError(
            f"{folder} is half-written: {num_prompts} prompts with {max(samples, 1)} images each are expected, "
            f"{where}. {more}, or take the prompts in question out of the folder."
        )


def read_drawn(folder: Path) -> dict[str, Any] | None:
    """This toolkit's note on how it drew a folder; None if it did not. Raises ValueError: the note cannot be read."""
    path = folder / DRAWN
    return read_json(path, "delete the folder and draw it again.") if path.is_file() else None
