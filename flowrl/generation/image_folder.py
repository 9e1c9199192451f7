"""Reads folders of images with their prompts, and scores them with rewards.

A folder is one of

    images, at any depth, and `prompt` TEXT, or `prompts` FILE:
        .txt     one prompt per image, in the order of the files' names, numbers in them by value
        .jsonl   {"file": "a/0001.png", "prompt": ..., ...} per line; the whole object is the image's record, and the
                 images that it is about are named as in any file of prompts (`flowrl.prompts.prompt_files`)
    NNNNN/metadata.jsonl with NNNNN/samples/*.png   (GenEval's), which names its own prompts

Images of one prompt form a group: those with one text and, if a .jsonl file gives them, the same source images and
negative prompt. Without prompts, the images of one folder form a group.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowrl.config.train import resolve_path
from flowrl.generation.folders import ImageFile
from flowrl.media.lossless import clip_size, is_clip, read_clip, read_rate
from flowrl.media.name_order import check_order, is_hidden, natural_order
from flowrl.media.reading import image_size, read_rgb
from flowrl.media.sound_files import has_sound, read_sound
from flowrl.prompts.identity import contents, drawn_by
from flowrl.prompts.loading import Prompt, read_prompts
from flowrl.rewards import Reward, RewardInputs
from flowrl.rewards.base.outputs import check_output
from flowrl.runtime.digests import files_below
from flowrl.runtime.progress import progress
from flowrl.runtime.scrubbing import say as print
from flowrl.runtime.shapes import Float64

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
POINTWISE = ("pointwise", "remote")
Change = Callable[[Image.Image], Image.Image]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ItemScores:
    """A reward's values for N items."""

    values: Float64[np.ndarray, " n"]
    """[N], NaN for failures."""
    parts: dict[str, Float64[np.ndarray, " n"]]
    """Sub-scores [N] by name."""
    errors: list[str | None]
    """[N] why an item failed, None if it did not. A batch with several reasons has all of them, separated by commas."""
    seconds: Float64[np.ndarray, " n"]
    """[N] an item's share of its batch's time."""
    batches: np.ndarray
    """[N] number of its batch, -1 if it was in none."""

    @property
    def failed(self) -> int:
        """How many images have no score."""
        return int(np.isnan(self.values).sum())


def read_items(folder: Path, *, prompt: str | None = None, prompts: str | Path | None = None) -> list[ImageFile]:
    """The images of a folder with their prompts; see the module. Raises ValueError: no folder or no images, prompts
    that do not fit, or both `prompt` and `prompts`."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}: give one with images ({', '.join(SUFFIXES)}).")
    if prompt is not None and prompts is not None:
        raise ValueError("`prompt` gives all images one prompt and `prompts` each its own: give one of them.")
    file = None if prompts is None else resolve_path(str(prompts))
    records = natural_order(folder.glob("*/metadata.jsonl"), folder)
    if records:
        if prompt is not None or prompts is not None:
            raise ValueError(f"{folder} has GenEval's layout, which names its own prompts: drop `prompt` and `prompts`")
        rows: list[_Row] = [
            (path, read_prompts(record)[0], record.parent.name)
            for record in records
            for path in images_in(record.parent / "samples")
        ]
    elif file is not None and file.suffix == ".jsonl":
        rows = _read_listed(folder, file)
    else:
        rows = _in_order(folder, prompt, file)
    if not rows:
        raise ValueError(f"{folder} holds no images ({', '.join(SUFFIXES)}).")
    samples: dict[Hashable, int] = {}
    numbers: dict[Hashable, int] = {}
    found = []
    for path, row, group in rows:
        found.append(ImageFile(
            file=path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path), path=path,
            prompt=row.text, index=numbers.setdefault(group, len(numbers)), sample=samples.setdefault(group, 0),
            record=row.metadata, source_images=tuple(map(Path, row.sources)),
            reference_images=tuple(map(Path, row.references)),
        ))  # fmt: skip
        samples[group] += 1
    return found


_Row = tuple[Path, Prompt, Hashable]


def images_in(folder: Path) -> list[Path]:
    """All visible images of a folder and its subfolders, in the order of their names, numbers by value."""
    found = [path for path in files_below(folder).values() if path.suffix.lower() in SUFFIXES]
    seen = [path for path in found if not is_hidden(path, folder)]
    if len(seen) < len(found):
        first = min(set(found) - set(seen)).relative_to(folder)
        _say(f"{folder}: hidden files are no images of a folder: {len(found) - len(seen)} left out, such as {first}")
    return natural_order(seen, folder)


def _in_order(folder: Path, prompt: str | None, prompts: Path | None) -> list[_Row]:
    files = images_in(folder)
    if prompts is None:
        asked = Prompt(text=prompt or "", metadata={})
        return [(path, asked, str(path.parent) if prompt is None else "") for path in files]
    rows = read_prompts(prompts)
    if len(rows) != len(files):
        raise ValueError(
            f"{prompts} holds {len(rows)} prompts for the {len(files)} images of {folder}: a .txt file has one line "
            f"for each image, in the order of their names; a .jsonl file names them (file, prompt)."
        )
    check_order(files, folder)
    for path, letters in zip(files, sorted(files, key=lambda path: path.relative_to(folder).parts), strict=True):
        if path != letters:
            names = [one.relative_to(folder).as_posix() for one in (path, letters)]
            _say(f"prompts of {prompts} go to the images of {folder} by their numbers: {names[0]} before {names[1]}")
            break
    return [(path, row, _group_of(row)) for path, row in zip(files, rows, strict=True)]


@cache  # a check and a run read the same folder
def _say(text: str) -> None:
    print(f"flowrl: {text}", file=sys.stderr, flush=True)


def _group_of(row: Prompt) -> Hashable:
    """The key of a group: text, negative prompt, and the content of the images that the prompt is about."""
    return drawn_by(row), *contents(row.references)


def _read_listed(folder: Path, prompts: Path) -> list[_Row]:
    rows: list[_Row] = []
    for number, row in enumerate(read_prompts(prompts), start=1):
        name = row.metadata.get("file")
        if not isinstance(name, str) or not (folder / name).is_file():
            what = "has no text under 'file'" if not isinstance(name, str) else f"names {name!r}, which is not there"
            raise ValueError(f"{prompts}, entry {number}: {what}; give the image's path relative to {folder}.")
        rows.append((folder / name, row, _group_of(row)))
    return rows


def check_needs(reward: Reward, items: Sequence[ImageFile], *, key: str, prompts_given: bool) -> None:
    """Refuses a reward (`key` in messages) that needs more than a folder of images and perhaps prompts, even empty
    ones, and one that must be trained first."""
    if reward.kind == "adversarial":
        raise ValueError(f"reward {key!r} learns during a training run and says nothing before: take another.")
    if "videos" in reward.needs and "images" not in reward.needs and not all(is_clip(item.path) for item in items):
        raise ValueError(f"reward {key!r} judges videos, and a folder of images has none: take another.")
    if _hears(reward) and (silent := next((item for item in items if not has_sound(item.path)), None)):
        raise ValueError(
            f"reward {key!r} judges sounds, and {silent.file} has none that can be read: give clips with a track of "
            "sound, or take another reward."
        )
    if "prompts" in reward.needs and not prompts_given:
        raise ValueError(f"reward {key!r} reads prompts: give `prompt` TEXT or `prompts` FILE (.txt or .jsonl).")
    for what in ("source_images", "reference_images"):
        if what in reward.needs and (lacking := next((item for item in items if not getattr(item, what)), None)):
            raise ValueError(
                f"reward {key!r} needs {what}, and {lacking.file} has none: list them in a .jsonl file of `prompts`."
            )


@torch.no_grad()
def score_items(
    reward: Reward, items: Sequence[ImageFile], *, key: str, batch_size: int, iteration: int = 0,
    change: Change | None = None, label: str | None = None,
) -> ItemScores:  # fmt: skip
    """Scores every item. Items of a batch have one size; a groupwise or pairwise reward gets whole groups.

    Args:
        key: the reward's name, for messages.
        batch_size: items at once; more if a group is larger.
        iteration: the iteration that the reward gets, on which its random draws depend.
        change: a change of each image before scoring.
        label: of the progress bar.

    Raises ValueError: a group of images of several sizes for a reward that compares them.
    """
    count = len(items)
    values, seconds, number = np.full(count, np.nan), np.zeros(count), np.full(count, -1)
    parts: dict[str, np.ndarray] = {}
    errors: list[str | None] = [None] * count
    sizes = [_size(item.path, heard=_hears(reward)) for item in items]
    for place, size in enumerate(sizes):
        errors[place] = "unreadable" if size is None else None
    batches = make_batches(items, sizes, whole_groups=reward.kind not in POINTWISE, batch_size=batch_size)
    with progress(label or f"scoring {key}", len(batches)) as advance:
        failed = errors.count("unreadable")
        for index, places in enumerate(batches):
            images = {place: image for place in places if (image := _load(items[place].path, change)) is not None}
            for place in set(places) - images.keys():
                errors[place] = "unreadable"
            if read := list(images):
                inputs = _inputs(items, read, list(images.values()), iteration, heard=_hears(reward))
                start = time.perf_counter()
                output = check_output(reward(inputs), len(read), key)
                values[read] = output.values.double().cpu().numpy()
                seconds[read] = (time.perf_counter() - start) / len(read)
                number[read] = index
                for name, part in output.parts.items():
                    parts.setdefault(name, np.full(count, np.nan))[read] = part.double().cpu().numpy()
                said = ", ".join(sorted(output.errors)) or "not_finite"
                for place in read:
                    errors[place] = said if np.isnan(values[place]) else None
            failed += sum(errors[place] is not None for place in places)
            advance(f"{failed} failed" if failed else "")
    return ItemScores(values=values, parts=parts, errors=errors, seconds=seconds, batches=number)


def inputs_of(items: Sequence[ImageFile], places: Sequence[int]) -> RewardInputs | None:
    """Items of one size in the form for rewards, without those that cannot be read; None if none can."""
    images = {place: _load(items[place].path) for place in places}
    readable = [place for place in places if images[place] is not None]
    return _inputs(items, readable, [images[place] for place in readable], 0) if readable else None


def make_batches(
    items: Sequence[ImageFile], sizes: Sequence[tuple[float, ...] | None], *, whole_groups: bool, batch_size: int
) -> list[list[int]]:
    """Positions of the items by batch, with one size per batch; an item without a size is in none. Raises ValueError:
    whole groups are requested, and one has several sizes."""
    units: dict[Hashable, list[int]] = {}
    for place, (item, size) in enumerate(zip(items, sizes, strict=True)):
        if size is not None:
            units.setdefault(item.index if whole_groups else place, []).append(place)
    by_size: dict[Hashable, list[list[int]]] = {}
    for unit in units.values():
        found = sorted({size for place in unit if (size := sizes[place]) is not None})
        if len(found) > 1:
            raise ValueError(
                f"this reward compares the images of a prompt, and those of {items[unit[0]].prompt!r} have several "
                f"sizes, such as {found[0]} and {found[1]}: resize them."
            )
        rows = by_size.setdefault(found[0], [[]])
        if rows[-1] and len(rows[-1]) + len(unit) > batch_size:
            rows.append([])
        rows[-1].extend(unit)
    return [row for rows in by_size.values() for row in rows]


def _hears(reward: Reward) -> bool:
    return "sounds" in reward.needs


def _size(path: Path, *, heard: bool) -> tuple[float, ...] | None:
    """Width and height; for a clip also its frames and their rate and, if it is `heard`, the shape and rate of its
    sound, because a batch is one tensor with one rate; None if the file is damaged."""
    if is_clip(path):
        found = clip_size(path)
        if found is None:
            return None
        size = (*found, read_rate(path) or 0.0)
        if not heard:
            return size
        try:
            sound = read_sound(path)  # and again with its frames, a hundredth of their cost: all sounds are too many
        except ValueError:
            return None
        return None if sound is None else (*size, *sound[0].shape, sound[1])
    try:
        return image_size(path)
    except ValueError:
        return None


def _load(path: Path, change: Change | None = None) -> Tensor | None:
    """Float32 [3, H, W] in [0, 1], or [F, 3, H, W] for a clip; None if the file is damaged."""
    try:
        if is_clip(path):
            return read_clip(path)
        image = read_rgb(path)
    except ValueError:
        return None
    pixels = np.array(image if change is None else change(image))
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255.0


def _inputs(
    items: Sequence[ImageFile], places: Sequence[int], images: Sequence[Any], iteration: int, *, heard: bool = False
) -> RewardInputs:
    chosen = [items[place] for place in places]
    stacked = torch.stack(list(images))
    clips = stacked.ndim == 5
    sounds = [sound for item in chosen if (sound := read_sound(item.path))] if heard else []
    return RewardInputs(
        prompts=[item.prompt for item in chosen],
        images=stacked[:, 0] if clips else stacked,
        videos=stacked if clips else None,
        fps=read_rate(chosen[0].path) if clips else None,
        sounds=torch.stack([sound for sound, _ in sounds]) if sounds else None,
        sound_rate=sounds[0][1] if sounds else None,
        metadata=[item.record for item in chosen],
        group_ids=torch.tensor([item.index for item in chosen]),
        sample_ids=torch.tensor(list(places)),
        source_images=_load_all([item.source_images for item in chosen]),
        reference_images=_load_all([item.reference_images for item in chosen]),
        iteration=iteration,
    )


def _load_all(places: Sequence[Sequence[Path]]) -> list[list[Tensor]] | None:
    """The images that each prompt is about; None if no prompt has any."""
    found = [[(path, _load(path)) for path in row] for row in places]
    for path, image in (pair for row in found for pair in row):
        if image is None:
            raise ValueError(f"{path} cannot be read as an image: replace it.")
    return [[image for _, image in row if image is not None] for row in found] if any(places) else None
