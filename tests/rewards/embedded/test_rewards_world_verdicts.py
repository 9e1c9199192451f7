"""The verdicts on clips and edits as rewards: values, parts, failures, and no dependence on the batch."""

from __future__ import annotations

import math

import numpy as np
import torch

from flowrl.rewards import RewardInputs, build_reward
from flowrl.world.clips import clip_shapes, draw_clip, motion_records, motion_verdict
from flowrl.world.edits import draw_edit, edit_records, edit_verdict

CPU = torch.device("cpu")


def tensor(pixels: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(pixels.copy()).float().div(255).movedim(-1, -3)


def clips(count: int) -> RewardInputs:
    """Drawn clips, every second one under another clip's prompt."""
    records = motion_records()[0]
    drawn = torch.stack([tensor(draw_clip(clip_shapes(records[i], np.random.default_rng(i)))) for i in range(count)])
    asked = [records[i if i % 2 == 0 else i + 5] for i in range(count)]
    return RewardInputs(
        prompts=[str(record["prompt"]) for record in asked], images=drawn[:, 0], videos=drawn, fps=8.0, metadata=asked,
        group_ids=torch.arange(count), sample_ids=torch.arange(count),
    )  # fmt: skip


def edits(count: int) -> RewardInputs:
    """Edited images, every second one left as it was."""
    records = edit_records()[0][:count]
    pairs = [draw_edit(record) for record in records]
    return RewardInputs(
        prompts=[str(record["prompt"]) for record in records],
        images=torch.stack([tensor(pair[1 - i % 2]) for i, pair in enumerate(pairs)]),
        metadata=records, source_images=[[tensor(pair[0])] for pair in pairs],
        group_ids=torch.arange(count), sample_ids=torch.arange(count),
    )  # fmt: skip


def test_motion_values_are_the_verdicts() -> None:
    inputs = clips(6)
    assert inputs.videos is not None
    reward = build_reward("motion_verdict", device=CPU)
    output = reward(inputs)
    for i, record in enumerate(inputs.metadata):
        found = motion_verdict((inputs.videos[i].movedim(1, -1) * 255).round().byte().numpy(), record)
        assert float(output.values[i]) == np.float32(found.graded)
        assert float(output.parts["strict"][i]) == found.correct == (i % 2 == 0)
    strict = build_reward("motion_verdict", device=CPU, options={"credit": "strict"})(inputs)
    assert strict.values.tolist() == [1, 0, 1, 0, 1, 0]
    singly = torch.cat([reward(inputs[[i]]).values for i in (5, 0, 3)])
    assert torch.equal(singly, output.values[[5, 0, 3]])


def test_edit_values_are_the_verdicts() -> None:
    inputs = edits(6)
    assert inputs.source_images is not None
    reward = build_reward("edit_verdict", device=CPU)
    output = reward(inputs)
    assert output.values.tolist() == [1, 0, 1, 0, 1, 0]
    for i, record in enumerate(inputs.metadata):
        pixels = [
            (x.movedim(0, -1) * 255).round().byte().numpy() for x in (inputs.images[i], inputs.source_images[i][0])
        ]
        found = edit_verdict(pixels[0], pixels[1], record)
        assert float(output.parts["done"][i]) == np.float32(found.done)
        assert float(output.parts["kept"][i]) == np.float32(found.kept)
    assert torch.equal(torch.cat([reward(inputs[[i]]).values for i in (3, 0)]), output.values[[3, 0]])


def test_items_without_record_video_or_source_have_failed_with_an_error() -> None:
    some = clips(3)
    some.metadata[1] = {}
    output = build_reward("motion_verdict", device=CPU)(some)
    assert output.valid.tolist() == [True, False, True]
    assert math.isnan(output.values[1])
    assert output.errors == {"missing_field": 1}
    images = edits(3)
    assert build_reward("motion_verdict", device=CPU)(images).errors == {"missing_field": 3}
    images.source_images[2].clear()  # type: ignore[index]
    output = build_reward("edit_verdict", device=CPU)(images)
    assert output.valid.tolist() == [True, True, False]
