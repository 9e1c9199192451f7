"""Clips of several frame rates in one folder: each is scored at its own."""

from __future__ import annotations

from pathlib import Path

import torch

from flowrl.generation.folders import ImageFile
from flowrl.generation.image_folder import score_items
from flowrl.media.lossless import save_lossless
from flowrl.rewards import FunctionReward, RewardInputs, RewardOutput, tensor_output


def test_each_clip_is_scored_at_its_own_rate(tmp_path: Path) -> None:
    items = []
    for number, fps in enumerate((8.0, 24.0, 8.0)):
        path = save_lossless(torch.full((4, 3, 8, 8), 0.5), tmp_path / f"{number}.mkv", fps)
        items.append(ImageFile(file=path.name, path=path, prompt="", index=number))

    def rate(inputs: RewardInputs) -> RewardOutput:
        return tensor_output(torch.full((len(inputs.images),), inputs.fps or 0.0))

    reward = FunctionReward(name="rate", score=rate, needs=frozenset({"videos"}), version="rate:1")
    found = score_items(reward, items, key="rate", batch_size=8)
    assert found.values.tolist() == [8.0, 24.0, 8.0]
