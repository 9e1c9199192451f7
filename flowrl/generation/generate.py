"""Draws a model's images or clips for a list of prompts in GenEval's folder layout; resumable.

The start noise of an image is a function of (seed, prompt, sample), as in evaluations during training, so any two
models share it. Images appear whole or not at all, and existing ones are not drawn again. `drawn.json` holds the
model's fingerprint and the settings; a folder can be continued only with the same ones.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import torch

from flowrl.generation.folders import DRAWN, IMAGES, ImageFile, read_drawn, read_folder
from flowrl.generation.models import Source, fingerprint, load_source, schedule_of, with_negative
from flowrl.generation.prompt_checks import refuse_sources
from flowrl.generation.subject import Settings, Subject
from flowrl.media.images import save_png
from flowrl.media.lossless import CLIPS, LOSSLESS, save_lossless
from flowrl.media.videos import save_mp4
from flowrl.pipelines import Pipeline
from flowrl.prompts.identity import contents, distinct, drawn_by
from flowrl.prompts.loading import Prompt, spread
from flowrl.runtime.digests import text_digest
from flowrl.runtime.files import write_atomically
from flowrl.runtime.progress import progress
from flowrl.runtime.randomness import sample_normals
from flowrl.training.heldout import decode, finished
from flowrl.training.prompting import encode_all, encode_prompts

ENCODED_FIRST = 2000
"""Up to so many prompts are embedded before the first image; embeddings of more would fill the host's memory."""

PNG = IMAGES[0]

T = TypeVar("T")
Item = tuple[int, int]  # number of the prompt, number of the sample


def choose(prompts: Sequence[Prompt], num_prompts: int | None) -> list[Prompt]:
    """Each row once, in the order of the list, or `num_prompts` of them spread evenly over it."""
    return some(distinct(prompts), num_prompts)


def some(listed: Sequence[T], number: int | None) -> list[T]:
    """That number of entries, spread evenly over the list; all for None."""
    return list(listed) if number is None else [listed[place] for place in spread(len(listed), number)]


def images_of(settings: Settings, subject: Subject, prompts: Sequence[Prompt], suffix: str = PNG) -> list[ImageFile]:
    """The images of a subject: existing ones are read, missing ones are drawn for `prompts`.

    Args:
        suffix: ending of drawn files: `PNG` for images; `LOSSLESS` or `PLAYED` for clips; existing ones may have any.

    Raises ValueError: the folder is half-written, foreign, or was drawn with other settings.
    """
    kinds = IMAGES if suffix == PNG else CLIPS
    if subject.images is not None:
        return given_images(settings, subject.images, kinds)
    assert subject.source is not None
    folder = subject.folder / "images"
    draw_folder(
        subject.source, prompts, folder, label=subject.label, samples=settings.samples, seed=settings.seed,
        batch_size=settings.batch_size, device=settings.device, suffix=suffix,
    )  # fmt: skip
    return read_folder(folder, kinds)


def given_images(settings: Settings, folder: Path, kinds: Sequence[str] = IMAGES) -> list[ImageFile]:
    """Existing images: the first `settings.samples` of each of `settings.num_prompts` prompts, spread evenly. Raises
    ValueError: the folder is half-written or foreign, or has fewer samples."""
    images = read_folder(folder, kinds)
    indexes = list(dict.fromkeys(image.index for image in images))
    kept = set(some(indexes, settings.num_prompts))
    samples = len(images) // len(indexes)
    if not 1 <= settings.samples <= samples:
        raise ValueError(f"`samples` must be 1 to {samples}, as many as {folder} has, got {settings.samples}")
    return [image for image in images if image.index in kept and image.sample < settings.samples]


def draw_folder(
    source: Source,
    prompts: Sequence[Prompt],
    folder: Path,
    *,
    label: str,
    samples: int,
    seed: int,
    batch_size: int,
    device: str,
    show: bool = True,
    suffix: str = PNG,
) -> None:
    """Draws the missing ones of `samples` images for each prompt; loads no model if none are missing.

    Batches do not depend on what is missing, so no image depends on when drawing stopped; `suffix` as in `images_of`.

    Raises ValueError: no prompts, or the folder holds something else.
    """
    if not prompts:
        raise ValueError("there is no prompt to draw: give a file with prompts")
    refuse_sources(prompts, source)
    _check_old(folder)
    mark, pipeline = fingerprint(source), None
    if mark is None:  # a hub id, whose commit is known once it was fetched
        pipeline = load_source(source, device)
        mark = fingerprint(source) or "unknown"
    _claim(folder, _settings(source, mark, prompts, samples=samples, seed=seed, suffix=suffix))
    prompts = with_negative(prompts, source)
    for index, prompt in enumerate(prompts):
        path = folder / f"{index:05d}" / "metadata.jsonl"
        if not path.is_file():
            (path.parent / "samples").mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(prompt.record) + "\n")
    items = [(index, sample) for index in range(len(prompts)) for sample in range(samples)]
    batches = [items[first : first + batch_size] for first in range(0, len(items), batch_size)]
    missing = [batch for batch in batches if not all(_place(folder, item, suffix).is_file() for item in batch)]
    if not missing:
        return
    pipeline = pipeline or load_source(source, device)
    done = len(batches) - len(missing)
    bar = progress(f"drawing {label}", len(batches), done, enabled=show)
    _draw(pipeline, source, prompts, _numbers(prompts, items), missing, folder, seed, suffix, bar)


def _draw(
    pipeline: Pipeline, source: Source, prompts: Sequence[Prompt], numbers: Mapping[Item, int],
    batches: Sequence[Sequence[Item]], folder: Path, seed: int, suffix: str,
    bar: AbstractContextManager[Callable[[str], None]],
) -> None:  # fmt: skip
    """Draws batches of items, and writes each while the next is drawn."""
    schedule = schedule_of(source, pipeline)
    different = {drawn_by(prompts[index]): prompts[index] for batch in batches for index, _ in batch}
    if len(different) <= ENCODED_FIRST:
        encode_all(pipeline, different.values())
        pipeline.free_text_encoders()  # which may be larger than the network
    fps, save = pipeline.fps, save_lossless if suffix == LOSSLESS else save_mp4
    with bar as advance, ThreadPoolExecutor(1) as writer:
        written: list[Future[Path]] = []
        for batch in batches:
            rows = [prompts[index] for index, _ in batch]
            keys = [(seed, "eval", row.noise_name, numbers[item]) for row, item in zip(rows, batch, strict=True)]
            x = sample_normals(pipeline.latent_shape, keys)
            how = source.guidance_scale, source.first_block_cache
            with torch.no_grad():
                made = decode(pipeline, finished(pipeline, encode_prompts(pipeline, rows), x, schedule, *how))
            clips = zip(made.images.cpu(), made.tracks(pipeline.sound_rate), strict=True)
            for future in written:  # errors of the batch before; at most one batch waits
                future.result()
            written = [
                writer.submit(*((save_png, image, place) if fps is None else (save, image, place, fps, track)))
                for (image, track), place in zip(clips, (_place(folder, item, suffix) for item in batch), strict=True)
                if not place.is_file()
            ]
            advance("")
        for future in written:
            future.result()


def _numbers(prompts: Sequence[Prompt], items: Sequence[Item]) -> dict[Item, int]:
    """The number of each image among those whose noise has one name: the sample, unless rows of the list share it."""
    seen, numbers = Counter[str](), dict[Item, int]()
    for item in items:
        name = prompts[item[0]].noise_name
        numbers[item] = seen[name]
        seen[name] += 1
    return numbers


def _place(folder: Path, item: Item, suffix: str) -> Path:
    return folder / f"{item[0]:05d}" / "samples" / f"{item[1]:05d}{suffix}"


def _settings(
    source: Source, mark: str, prompts: Sequence[Prompt], *, samples: int, seed: int, suffix: str
) -> dict[str, Any]:
    """All that an image depends on but machine and batch size: they change last digits, with First-Block Cache more.

    A key that older folders lack is None by default, so that they can be continued.
    """
    listed = json.dumps([prompt.record for prompt in prompts], sort_keys=True)
    files = [contents((*prompt.sources, *prompt.clips)) for prompt in prompts]
    apart = ("height", "width", "vae_slice")  # keys of their own, and one that changes last digits
    options = {name: value for name, value in source.options.items() if name not in apart}
    return {
        "format": 1, "model": source.model, "fingerprint": mark, "lora": source.lora and str(source.lora),
        "num_steps": source.num_steps, "guidance_scale": source.guidance_scale, "grid": source.grid,
        "max_sequence_length": source.max_sequence_length, "dtype": source.dtype,
        "variant": source.variant, "quantize": None if source.quantize == "none" else source.quantize,
        "height": source.height, "width": source.width, "options": options or None, "shift": source.shift,
        "first_block_cache": source.first_block_cache or None,
        "training_size": source.training_size and list(source.training_size), "negative": source.negative or None,
        "seed": seed, "samples": samples, "num_prompts": len(prompts), "files": None if suffix == PNG else suffix,
        "prompts": text_digest(listed), "sources": text_digest(json.dumps(files)) if any(files) else None,
    }  # fmt: skip


def _check_old(folder: Path) -> None:
    """Refuses a folder of another program before the model is looked at."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: give another `out`.")
    if not folder.is_dir() or read_drawn(folder) is not None:
        return
    if any(not path.name.startswith(".") for path in folder.iterdir()):  # a dot: a first note that was cut short
        raise ValueError(
            f"{folder} is not empty and was not drawn by this command (it has no {DRAWN}): give another `out`, or "
            f"judge what is in it with `images` {folder}."
        )


def _claim(folder: Path, wanted: Mapping[str, Any]) -> None:
    """Writes the settings of a new folder, or checks that those of an old one are the same."""
    old = read_drawn(folder)
    if old is None:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / DRAWN, json.dumps(wanted, indent=1) + "\n")
        return
    ignored = {"model", "lora"} if old.get("fingerprint") == wanted["fingerprint"] != "unknown" else set()
    changed = [key for key in wanted.keys() | old.keys() if key not in ignored and old.get(key) != wanted.get(key)]
    if changed:
        words = ", ".join(f"{key} {old.get(key)!r} (now {wanted.get(key)!r})" for key in sorted(changed))
        raise ValueError(
            f"{folder} was drawn with other settings: {words}. Give the same ones to continue, another `out` to "
            f"start again, or delete the folder."
        )
    for leftover in folder.glob("*/samples/.*.tmp"):  # of a process that was killed while it wrote
        leftover.unlink()
