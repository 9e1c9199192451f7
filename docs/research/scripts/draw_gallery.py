"""Draws docs/gallery from three finished runs: of images, of clips and of edits.

    .venv/bin/python docs/research/scripts/draw_gallery.py IMAGES_RUN CLIPS_RUN EDITS_RUN

A run keeps samples of the same prompts from the same noise at each evaluation; the first of each kind of prompt is
shown, in the order of the run's list, so none is chosen by its look. `-` for a run leaves its files as they are.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import av
import torch
from PIL import Image
from torch import Tensor

from flowrl.config.train import resolve_path
from flowrl.media.images import as_tensor, beside, grid, save_png
from flowrl.prompts.loading import read_prompts

OUT = Path(__file__).resolve().parents[2] / "gallery"
SHOWN, SCALE = 6, 2


def evaluations(run: Path) -> list[Path]:
    """Folders of the samples of each evaluation."""
    return sorted(path for path in (run / "samples").glob("iteration_*") if path.is_dir())


def stages(run: Path, most: int) -> list[Path]:
    """At most so many of a run's evaluations, evenly spread, the first and the last among them."""
    folders = evaluations(run)
    most = min(most, len(folders))
    return [folders[round(place * (len(folders) - 1) / (most - 1))] for place in range(most)]


def iteration(folder: Path) -> int:
    """That of an evaluation's folder."""
    return int(folder.name.removeprefix("iteration_"))


def shown(run: Path, tasks: dict[str, str]) -> tuple[list[int], list[str]]:
    """Numbers and prompts of what is shown: the first sample of each task, then the second and so on."""
    prompts = [entry["prompt"] for entry in json.loads((run / "samples" / "prompts.json").read_text(encoding="utf-8"))]
    seen: dict[str, int] = {}
    order = []
    for number, prompt in enumerate(prompts):
        task = tasks[prompt]
        seen[task] = seen.get(task, 0) + 1
        order.append((seen[task], number))
    numbers = sorted(number for _, number in sorted(order)[:SHOWN])
    return numbers, [prompts[number] for number in numbers]


def still(folder: Path, number: int) -> Tensor:
    """A sample's image."""
    with Image.open(folder / f"{number:04d}.png") as image:
        return as_tensor(image.convert("RGB"))


def clip(folder: Path, number: int) -> list[Tensor]:
    """A sample's frames."""
    with av.open(str(folder / f"{number:04d}.mp4")) as file:
        return [as_tensor(Image.fromarray(frame.to_ndarray(format="rgb24"))) for frame in file.decode(video=0)]


def draw_images(run: Path, numbers: list[int], prompts: list[str]) -> None:
    """Before and after, and on the way."""
    folders = evaluations(run)
    for name, rows in (("before_after", [folders[0], folders[-1]]), ("images", stages(run, 5))):
        captions = [caption(folder, folders, prompt) for folder in rows for prompt in prompts]
        images = torch.stack([still(folder, number) for folder in rows for number in numbers])
        save_png(grid(images, columns=len(numbers), captions=captions, scale=SCALE), OUT / f"{name}.png")


def caption(folder: Path, folders: list[Path], prompt: str) -> str:
    """What is below a sample: when it was drawn, and what was asked for."""
    when = "before" if iteration(folder) == 0 else f"iteration {iteration(folder)}"
    return f"{'after' if folder == folders[-1] else when}: {prompt}"


def draw_clips(run: Path, numbers: list[int], prompts: list[str]) -> None:
    """Clips before (above), on the way, and after (below), moving."""
    folders = stages(run, 3)
    clips = [clip(folder, number) for folder in folders for number in numbers]
    captions = [caption(folder, folders, prompt) for folder in folders for prompt in prompts]
    frames = [
        grid(torch.stack(frame), columns=len(numbers), captions=captions) for frame in zip(*clips, strict=True)
    ]  # fmt: skip
    OUT.mkdir(parents=True, exist_ok=True)
    colours = frames[0].quantize(64)
    first, *others = [frame.quantize(palette=colours, dither=Image.Dither.NONE) for frame in frames]
    hold = [120] * len(others) + [800]
    first.save(OUT / "clips.gif", save_all=True, append_images=others, duration=hold, loop=0, optimize=True)


def draw_edits(run: Path, numbers: list[int], prompts: list[str]) -> None:
    """Source of edits, then before, on the way and after."""
    sources = [still(run / "samples" / "sources", number) for number in numbers]
    both = [torch.cat([still(folder, number) for folder in stages(run, 5)], dim=-1) for number in numbers]
    save_png(beside([[source] for source in sources], both, prompts), OUT / "edits.png")


def tasks_of(*files: str) -> dict[str, str]:
    """Kind of each prompt of the embedded world's held-out lists."""
    return {
        row.text: str(row.metadata.get("tag", row.metadata.get("task", "")))
        for file in files for row in read_prompts(resolve_path(f"asset:prompts/{file}"))
    }  # fmt: skip


def main(arguments: list[str]) -> None:
    """Draws what was asked for."""
    tasks = tasks_of("world_heldout.jsonl", "motion_heldout.jsonl", "edits_heldout.jsonl")
    for given, draw in zip(arguments, (draw_images, draw_clips, draw_edits), strict=True):
        if given != "-":
            draw(Path(given), *shown(Path(given), tasks))
    for path in sorted(OUT.iterdir()):
        print(path.name, f"{path.stat().st_size / 1024:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
