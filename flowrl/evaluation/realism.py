"""Whether training brought a run's images nearer to drawn scenes, by a separate measure: `flowrl.realism`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from flowrl.config.train import load_config
from flowrl.media.name_order import natural_order
from flowrl.media.reading import read_image
from flowrl.prompts.loading import eval_items
from flowrl.rewards.embedded.realism import scene_images, world_features, world_realism
from flowrl.runtime.public import public
from flowrl.statistics.bootstrap import Interval
from flowrl.statistics.kernel_distance import kernel_interval
from flowrl.training.parts import read_prompts

__all__ = ["Realism", "realism"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Realism:
    """Distance of a run's images to drawn scenes at its first and last evaluation, and the change."""

    folder: Path
    before: float
    after: float
    change: Interval


@public
def realism(runs: str | Path | Sequence[str | Path]) -> list[Realism]:
    """Measures the distance of runs' images to drawn scenes of the embedded world, before and after training.

    Args:
        runs: run folders that keep every evaluation image (`eval.num_images` is at least their number).

    Raises:
        FlowrlError: a folder is not such a run.
    """
    found = []
    for folder in map(Path, [runs] if isinstance(runs, str | Path) else runs):
        if not (folder / "config.yaml").is_file():
            raise ValueError(f"{folder} is not a run folder (no config.yaml)")
        config = load_config(folder / "config.yaml")
        if config.prompts.eval is None:
            raise ValueError(f"{folder}: the run was never evaluated: set prompts.eval and eval_every")
        items = eval_items(
            read_prompts(config.prompts, config.prompts.eval),
            num_prompts=config.eval.num_prompts,
            samples_per_prompt=config.eval.samples_per_prompt,
        )
        if "include" not in items[0].prompt.metadata:
            raise ValueError(
                f"{folder}: drawn scenes need GenEval records with the prompts, as in asset:prompts/world_heldout.jsonl"
            )
        names = sorted(path.stem for path in (folder / "eval").glob("iteration_*.jsonl"))
        if len(names) < 2:
            raise ValueError(f"{folder}: needs an evaluation before and one after training, it has {len(names)}")
        images = []
        for name in (names[0], names[-1]):
            files = natural_order((folder / "samples" / name).glob("*.png"), folder)  # in the order of the items
            if len(files) != len(items):
                raise ValueError(
                    f"{folder}: evaluation {name} kept {len(files)} of {len(items)} images: train with "
                    f"eval.num_images={len(items)}"
                )
            rows = (folder / "eval" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
            assert len(rows) == len(items)
            pixels = torch.from_numpy(np.stack([read_image(file) for file in files]))
            images.append(pixels.permute(0, 3, 1, 2).float() / 255.0)
        before, after = images
        records = [item.prompt.metadata for item in items]
        real = world_features(scene_images(records))
        texts = [item.prompt.text for item in items]
        change = kernel_interval(world_features(after), real, texts, before=world_features(before))
        levels = [world_realism(side, records, num_resamples=2).mean for side in images]
        found.append(Realism(folder=folder, before=levels[0], after=levels[1], change=change))
    return found
