"""Rewards of grids, cell by cell: another reward's mean over cells, CLIP's likeness of cells, the embedded world's."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from drawn_grids import draw_grid
from pairwise_fakes import register_brightness
from PIL import Image
from scripted_judges import grey
from tiny_clip import assert_pointwise, inputs_of, random_images, write_tiny_clip

from flowrl.rewards import FunctionReward, Reward, RewardInputs, RewardOutput, build_reward, reward_options
from flowrl.rewards.base.outputs import check_output
from flowrl.rewards.embedded.world_verdicts import WorldGrids
from flowrl.rewards.judges.consistency import mean_over_cells
from flowrl.world.scene_grids import grid_record
from flowrl.world.scenes import Shape

CPU = torch.device("cpu")


def cells_of(**options: Any) -> Reward:
    return build_reward("subfigures", options=options)


def alike(**options: Any) -> Reward:
    return build_reward("subfigure_similarity", options=options)


def recorder(*, fails: tuple[str, ...] = ()) -> tuple[FunctionReward, list[RewardInputs]]:
    """Scores a cell's brightness, fails cells of some prompts, under the prompt's name, and keeps what it was given."""
    given: list[RewardInputs] = []

    def score(inputs: RewardInputs) -> RewardOutput:
        given.append(inputs)
        values = inputs.images.mean(dim=(1, 2, 3))
        valid = torch.tensor([prompt not in fails for prompt in inputs.prompts])
        errors = {prompt: inputs.prompts.count(prompt) for prompt in fails if prompt in inputs.prompts}
        parts = {"twice": 2 * values.detach()}
        return RewardOutput(values=torch.where(valid, values, torch.nan), valid=valid, parts=parts, errors=errors)

    needs = frozenset({"images", "prompts"})
    return FunctionReward(name="fake", score=score, needs=needs, version="fake-1", differentiable=True), given


def grid_images(levels: list[list[float]]) -> torch.Tensor:
    """2x2 grids of flat cells of 3 x 5 pixels, of these 8-bit levels, with a row and a column left over."""
    rows = [[torch.cat(list(grey(row, 5)[:, :, :3]), 2) for row in (own[:2], own[2:])] for own in levels]
    return torch.nn.functional.pad(torch.stack([torch.cat(row, 1) for row in rows]), (0, 1, 0, 1), value=1.0)


LEVELS: list[list[float]] = [[0, 51, 102, 153], [255, 0, 0, 51], [10, 20, 30, 40]]


def labelled(*texts: str, shape: str = "2x2") -> str:
    return f"a {shape} grid. " + " ".join(f"[{k}]: {text}." for k, text in enumerate(texts))


def test_each_cell_goes_with_its_own_prompt() -> None:
    inner, given = recorder()
    reward = mean_over_cells(inner, grid=None)
    record = {"prompt": "b", "tag": "x"}
    prompts = [labelled("p", "q", "r", "s"), "2 x 2 of own", labelled("t", "u", "v", "w")]
    inputs = replace(
        inputs_of(grid_images(LEVELS), prompts, reference_images=[[image] for image in grey([1, 2, 3])]),
        metadata=[{}, {"sub_prompts": ["a", record, "c", "d"]}, {"sub_prompts": None}],
    )
    output = check_output(reward(inputs), 3, "subfigures")
    np.testing.assert_allclose(output.values, np.mean(LEVELS, axis=1) / 255, atol=1e-6)
    np.testing.assert_allclose(output.parts["lowest"], np.min(LEVELS, axis=1) / 255, atol=1e-6)
    np.testing.assert_allclose(output.parts["twice"], 2 * np.mean(LEVELS, axis=1) / 255, atol=1e-6)
    (cells,) = given
    assert cells.images.shape == (12, 3, 3, 5)
    assert cells.prompts == ["p.", "q.", "r.", "s.", "a", "b", "c", "d", "t.", "u.", "v.", "w."]
    np.testing.assert_allclose(cells.images.mean((1, 2, 3)), np.ravel(LEVELS) / 255, atol=1e-6)
    assert cells.metadata == [{}] * 5 + [record] + [{}] * 6
    assert cells.sample_ids.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert cells.group_ids[:4].tolist() == cells.group_ids[4:8].tolist()  # two samples of one prompt
    assert len(set(cells.group_ids.tolist())) == 8
    assert cells.reference_images is not None
    assert torch.equal(cells.reference_images[5][0], grey([2])[0])
    assert_pointwise(reward, inputs)
    assert reward.needs == {"images", "prompts", "metadata"}
    assert reward.differentiable


def test_grids_of_several_shapes_keep_their_order_and_calls_hold_whole_images() -> None:
    inner, given = recorder()
    shapes, images = ["2x2", "1x3", "2x2", "2x2", "1x3"], random_images(5, 12, 12)
    texts = {"2x2": ("a", "b", "c", "d"), "1x3": ("e", "f", "g")}
    inputs = inputs_of(images, [labelled(*texts[shape], shape=shape) for shape in shapes])
    reward = mean_over_cells(inner, grid=None, cells_per_call=9)
    np.testing.assert_allclose(reward(inputs).values, images.mean((1, 2, 3)), atol=1e-6)
    assert [len(cells) for cells in given] == [8, 4, 6]
    assert [tuple(cells.images.shape[2:]) for cells in given] == [(6, 6), (6, 6), (12, 4)]
    given.clear()
    mean_over_cells(inner, grid=None, cells_per_call=1)(inputs)
    assert [len(cells) for cells in given] == [4, 4, 4, 3, 3]


def test_items_fail_without_grid_or_sub_prompts_and_with_a_failed_cell_as_an_error() -> None:
    prompts = [labelled("a", "b", "c", "d"), "four cats", labelled("a", "b", "c"), labelled("a", "b", "bad", "d")]
    inputs = inputs_of(grid_images([*LEVELS, LEVELS[0]]), prompts)
    inner, _ = recorder(fails=("bad.",))
    output = check_output(mean_over_cells(inner, grid=None)(inputs), 4, "subfigures")
    assert output.valid.tolist() == [True, False, False, False]
    assert output.errors == {"missing_field": 2, "bad.": 1}
    assert output.parts["lowest"].isnan().tolist() == [False, True, True, True]
    inner, _ = recorder(fails=("bad.", "c."))
    output = mean_over_cells(inner, grid=None)(inputs[[0, 3]])
    assert output.errors == {"cell_failed": 2}
    none = check_output(mean_over_cells(inner, grid=None)(inputs[[1]]), 1, "subfigures")
    assert none.errors == {"missing_field": 1}
    fixed = mean_over_cells(recorder()[0], grid="1x3")(inputs)
    assert fixed.valid.tolist() == [False, False, True, False]
    inputs.metadata[0]["sub_prompts"] = "abcd"
    with pytest.raises(ValueError, match="sub_prompts must be a list"):
        mean_over_cells(inner, grid=None)(inputs)


def test_gradient_reaches_every_cell_of_a_differentiable_reward() -> None:
    inner, _ = recorder()
    images = random_images(2, 8, 8).requires_grad_()
    prompts = ["no grid", labelled("a", "b", "c", "d")]
    output = mean_over_cells(inner, grid=None)(inputs_of(images, prompts))
    output.values[1].backward()
    assert images.grad is not None
    assert not images.grad[0].any()
    torch.testing.assert_close(images.grad[1], torch.full((3, 8, 8), 1 / (4 * 3 * 4 * 4)))


def test_the_inner_reward_is_named_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    register_brightness(monkeypatch)
    reward = cells_of(reward="brightness", options={"fails_below": 0.1}, grid="2x2")
    inputs = inputs_of(grid_images(LEVELS), [labelled("a", "b", "c", "d")] * 3)
    output = reward(inputs)
    assert output.errors == {"too_dark": 3}
    np.testing.assert_allclose(cells_of(reward="brightness")(inputs).values, np.mean(LEVELS, 1) / 255, atol=1e-6)
    assert (reward.kind, reward.waits) == ("pointwise", False)
    assert reward.version.startswith("subfigures:grid-2x2:")
    noisy = cells_of(reward="noisy", options={"reward": "brightness", "std": 0.5})
    clean = noisy(inputs).parts["clean"]
    np.testing.assert_allclose(clean, np.mean(LEVELS, axis=1) / 255, atol=1e-6)
    same = inputs_of(grid_images([[7.0] * 4] * 400), [labelled("a", "b", "c", "d")] * 400)
    spread = (noisy(same).values - 7 / 255).std()
    assert float(spread) == pytest.approx(0.25, rel=0.15)  # four draws an image, not one


def test_subfigures_of_clip_score_are_clips_own_cosines(tmp_path: Path) -> None:
    """Against the model's own forward pass on cells cut by hand; so is the likeness of cells."""
    folder = str(write_tiny_clip(tmp_path))
    inputs = inputs_of(random_images(3, 80, 97), ["a 2x2 set"] * 3)
    words = [["a cat", "a dog", "red", "a red hat"], ["x", "y", "zz", "a b"], ["blue", "two", "q", "r"]]
    inputs = replace(inputs, metadata=[{"sub_prompts": own} for own in words])
    by_text = cells_of(reward="clip_score", options={"model": folder})
    by_image = alike(model=folder)
    model = transformers.CLIPModel.from_pretrained(folder).eval()
    processor = transformers.CLIPProcessor.from_pretrained(folder)
    pixels = (inputs.images * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    for item, own in enumerate(words):
        places = [(slice(r, r + 40), slice(c, c + 48)) for r in (0, 40) for c in (0, 48)]
        cells = [Image.fromarray(pixels[item][place]) for place in places]
        batch = processor(text=own, images=cells, padding=True, return_tensors="pt")
        with torch.no_grad():
            out = model(**batch)
        own_cosine = (out.image_embeds * out.text_embeds).sum(-1)
        torch.testing.assert_close(by_text(inputs).values[item], own_cosine.mean(), rtol=0, atol=1e-5)
        torch.testing.assert_close(by_text(inputs).parts["lowest"][item], own_cosine.min(), rtol=0, atol=1e-5)
        pairs = torch.stack([(out.image_embeds[i] * out.image_embeds[j]).sum() for i, j in combinations(range(4), 2)])
        torch.testing.assert_close(by_image(inputs).values[item], pairs.mean(), rtol=0, atol=1e-5)
        torch.testing.assert_close(by_image(inputs).parts["lowest"][item], pairs.min(), rtol=0, atol=1e-5)
    assert_pointwise(by_text, inputs)
    assert_pointwise(by_image, inputs)
    assert by_image.needs == {"images", "prompts"}
    assert folder in by_image.version


def test_likeness_is_1_for_equal_cells_and_carries_gradient(tmp_path: Path) -> None:
    folder = str(write_tiny_clip(tmp_path))
    cell = random_images(1, 40)
    equal = cell.repeat(1, 1, 1, 3)
    images = torch.cat([equal, random_images(1, 40, 120, seed=1)]).requires_grad_()
    reward = alike(model=folder, preprocess="bilinear", grid="1x3")
    assert reward.differentiable
    output = check_output(reward(inputs_of(images)), 2, "subfigure_similarity")
    first, second = output.values.tolist()
    assert first == pytest.approx(1.0, abs=1e-5)
    assert second < 0.999
    output.values[1].backward()
    assert images.grad is not None
    assert not images.grad[0].any()
    assert all(images.grad[1, :, :, start : start + 40].any() for start in (0, 40, 80))
    broken = images.detach().clone()
    broken[0, 0, 0, 0] = torch.nan
    assert reward(inputs_of(broken)).errors == {"not_finite": 1}
    by_prompt = alike(model=folder)(inputs_of(images.detach(), ["a 1x3 strip", "a strip"]))
    assert by_prompt.errors == {"missing_field": 1}
    assert not alike(model=folder).differentiable


def test_the_embedded_worlds_grids() -> None:
    record = grid_record("circle", "red")
    red, blue = (Shape(label="circle", color=color, x=30.0, y=33.0, radius=18.0) for color in ("red", "blue"))
    grids = [draw_grid([red] * 4), draw_grid([blue] * 4), draw_grid([red, red, red, blue])]
    images = torch.from_numpy(np.stack([*grids, grids[0]])).permute(0, 3, 1, 2).float() / 255
    inputs = replace(inputs_of(images, [record["prompt"]] * 4), metadata=[record, record, record, {}])
    wanted: dict[Any, list[float]] = {
        "share": [1, 0, 0.75],
        "strict": [1, 0, 0],
        "consistency": [1, 1, 0.5],
    }
    for credit, values in wanted.items():
        output = check_output(WorldGrids(credit=credit).build(CPU)(inputs), 4, "grid_verdict")
        assert output.values[:3].tolist() == values
        assert output.errors == {"missing_field": 1}
        assert {name: part[:3].tolist() for name, part in output.parts.items()} == wanted
    by_cells = cells_of(reward="geneval", options={"credit": "strict"})(inputs)
    assert by_cells.values[:3].tolist() == [1, 0, 0.75]
    assert by_cells.errors == {"missing_field": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward": "clip_scor"}, "reward 'subfigures': unknown reward 'clip_scor'"),
        ({"reward": "win_rate"}, "does not judge an item by itself"),
        ({"reward": "clip_score", "options": {"scale": "x"}}, "reward 'subfigures': reward 'clip_score'"),
        ({"reward": "jpeg_compressibility", "grid": "2"}, "grid must be ROWSxCOLUMNS of 2 to 36 cells"),
        ({"reward": "jpeg_compressibility", "cells_per_call": 0}, "cells_per_call must be at least 1, got 0"),
    ],
)
def test_options_of_subfigures_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reward_options("subfigures", options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "/not/there"}, "reward 'subfigure_similarity'.* there is no folder"),
        ({"library": "open_clip", "model": "ViT-H-14"}, "architecture/weights"),
        ({"library": "open_clip", "model": "a/b", "preprocess": "bilinear"}, "preprocess is for library transformers"),
        ({"grid": "7x7"}, "grid must be ROWSxCOLUMNS"),
        ({"cells_per_call": -1}, "cells_per_call must be at least 1"),
    ],
)
def test_options_of_similarity_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reward_options("subfigure_similarity", options)


def test_a_reward_of_videos_is_refused() -> None:
    with pytest.raises(ValueError, match="reward 'temporal_smoothness' looks at videos"):
        cells_of(reward="temporal_smoothness")
