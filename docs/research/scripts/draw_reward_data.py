"""Draws what two embedded configurations learn their reward from.

    .venv/bin/python docs/research/scripts/draw_reward_data.py pairs runs/pairs
    .venv/bin/python docs/research/scripts/draw_reward_data.py style assets/style-warm

`pairs`: preference pairs for `flowrl reward rubric`. The model before training draws every training prompt four times;
the image with the highest credit by GenEval's rule (graded) and the one with the lowest are a pair where they differ,
and the difference is the margin. `style`: 48 scenes of the embedded world in red and yellow alone, of training prompts
that name no colour; nothing of a file says which.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image

import flowrl
from flowrl.config.train import resolve_path
from flowrl.prompts.loading import read_prompts
from flowrl.rewards import RewardInputs, build_reward
from flowrl.runtime.files import write_atomically
from flowrl.world import scenes

SEEDS, PROMPTS, STYLE = 4, 288, 48
WARM = ("red", "yellow")


def draw_pairs(folder: Path) -> None:
    """Draws images, scores them, and writes pairs.jsonl beside them."""
    prompts = read_prompts(resolve_path("asset:prompts/world_train.jsonl"))
    distinct = list({prompt.text: prompt for prompt in prompts}.values())[:PROMPTS]
    drawn = flowrl.sample("asset:tiny-sd3", [prompt.text for prompt in distinct], seeds=range(SEEDS), batch_size=24)
    images = torch.from_numpy(np.stack([np.asarray(image) for image in drawn.images]))
    numbers, rows = torch.arange(len(images)), [prompt for prompt in distinct for _ in range(SEEDS)]
    inputs = RewardInputs(
        images=images.permute(0, 3, 1, 2).float() / 255, prompts=[row.text for row in rows],
        metadata=[dict(row.metadata) for row in rows], group_ids=numbers // SEEDS, sample_ids=numbers % SEEDS,
    )  # fmt: skip
    credit = build_reward("geneval", options={"credit": "graded", "clip_min": 0.0})(inputs).values.view(-1, SEEDS)
    lines = []
    for place, (prompt, values) in enumerate(zip(distinct, credit, strict=True)):
        best, worst = int(values.argmax()), int(values.argmin())
        if values[best] == values[worst]:
            continue
        names = {kind: f"{place:03d}_{kind}.png" for kind in ("winner", "loser")}
        for name, chosen in zip(names.values(), (best, worst), strict=True):
            Image.fromarray(images[place * SEEDS + chosen].numpy()).save(folder / name)
        line = {"prompt": prompt.text, "margin": round(float(values[best] - values[worst]), 4), **names}
        lines.append(json.dumps(line))
    write_atomically(folder / "pairs.jsonl", "\n".join(lines) + "\n")
    print(f"{len(lines)} pairs of {len(distinct)} prompts")


def draw_style(folder: Path) -> None:
    """Draws scenes in warm colours."""
    prompts = read_prompts(resolve_path("asset:prompts/world_train.jsonl"))
    plain = [prompt for prompt in prompts if prompt.metadata["tag"] not in ("colors", "color_attr")][:STYLE]
    with patch.object(scenes, "COLORS", {name: scenes.COLORS[name] for name in WARM}):
        for place, prompt in enumerate(plain):
            rng = np.random.default_rng((61, place))
            scene = scenes.draw_scene(scenes.random_scene(prompt.metadata, rng))
            Image.fromarray(scene).save(folder / f"{place:02d}.png", optimize=True)


if __name__ == "__main__":
    what, where = sys.argv[1:]
    Path(where).mkdir(parents=True, exist_ok=True)
    {"pairs": draw_pairs, "style": draw_style}[what](Path(where))
