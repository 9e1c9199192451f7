"""`flowrl reward realism RUN ...`: did training bring a run's images nearer to drawn scenes, by another measure?"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flowrl.config.train import load_config
from flowrl.media.name_order import natural_order
from flowrl.media.reading import read_image
from flowrl.prompts.loading import EvalItem, eval_items
from flowrl.rewards.embedded.realism import scene_images, world_features, world_realism
from flowrl.runtime.scrubbing import say as print
from flowrl.statistics.bootstrap import Interval
from flowrl.statistics.kernel_distance import kernel_change
from flowrl.training.parts import read_prompts


def run(parsed: argparse.Namespace) -> int:
    """Prints, for each run, the distance of its first and last evaluation's images to drawn scenes, and the change.

    Args:
        parsed: `runs`, folders whose configuration keeps every evaluation image (`eval.num_images` at least their
            number).

    Raises:
        ValueError: a folder is not such a run.
    """
    print(f"{'run':30} {'before':>7} {'after':>7} {'change (95 %)':>29}")
    for folder in parsed.runs:
        items, (first, last) = _items(folder), _evaluations(folder)
        before, after = _images(folder, first, len(items)), _images(folder, last, len(items))
        records = [item.prompt.metadata for item in items]
        labels = [item.prompt.text for item in items]
        real = world_features(scene_images(records))
        change: Interval = kernel_change(world_features(before), world_features(after), real, labels)
        levels = [world_realism(images, records, num_resamples=2).mean for images in (before, after)]
        print(
            f"{folder.name[-30:]:30} {levels[0]:7.4f} {levels[1]:7.4f} "
            f"{change.mean:+9.4f} ({change.low:+.4f} to {change.high:+.4f})"
        )
    return 0


def _items(run: Path) -> list[EvalItem]:
    if not (run / "config.yaml").is_file():
        raise ValueError(f"{run} is not a run folder (no config.yaml)")
    config = load_config(run / "config.yaml")
    if config.prompts.eval is None:
        raise ValueError(f"{run}: the run was never evaluated: set prompts.eval and eval_every")
    items = eval_items(
        read_prompts(config.prompts, config.prompts.eval), num_prompts=config.eval.num_prompts,
        samples_per_prompt=config.eval.samples_per_prompt,
    )  # fmt: skip
    if "include" not in items[0].prompt.metadata:
        raise ValueError(
            f"{run}: drawn scenes need GenEval records with the prompts, as in asset:prompts/world_heldout.jsonl"
        )
    return items


def _evaluations(run: Path) -> tuple[str, str]:
    """Names of the first and the last evaluation."""
    names = sorted(path.stem for path in (run / "eval").glob("iteration_*.jsonl"))
    if len(names) < 2:
        raise ValueError(f"{run}: needs an evaluation before and one after training, it has {len(names)}")
    return names[0], names[-1]


def _images(run: Path, name: str, count: int) -> Tensor:
    """Float32 [count, 3, H, W]; the files stand in the order of the evaluation's items."""
    files = natural_order((run / "samples" / name).glob("*.png"), run)
    if len(files) != count:
        raise ValueError(
            f"{run}: evaluation {name} kept {len(files)} of {count} images: train with eval.num_images={count}"
        )
    rows = (run / "eval" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(rows) == count
    images = np.stack([read_image(file) for file in files])
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255.0
