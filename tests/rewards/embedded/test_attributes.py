"""The differentiable scorer: its formula in numbers, its gradient by finite differences, its weights, its training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reward_inputs import weighted_sum
from safetensors import safe_open
from torch import Tensor

from flowrl.benchmarks.geneval import wording as prompts
from flowrl.cli import main
from flowrl.pretraining import make_scorer as scorer
from flowrl.pretraining.make_scorer import ScorerConfig, accuracy, roc_auc, train
from flowrl.pretraining.scorer_data import corrupt, labels_of, signed_distance, training_scene
from flowrl.rewards import Reward, RewardInputs, build_reward, reward_options
from flowrl.rewards.base.outputs import check_output
from flowrl.rewards.embedded.attributes import (
    PAIRS,
    AttributeNet,
    Attributes,
    attribute_scores,
    load_net,
    shipped_weights,
)
from flowrl.world.scenes import BACKGROUND, COLORS, Shape, draw_scene, random_scene

TASKS: dict[str, tuple[prompts.MetadataRecord, prompts.MetadataRecord]] = {
    "single_object": (prompts.single_object("circle"), prompts.single_object("triangle")),
    "two_object": (prompts.two_object("circle", "square"), prompts.two_object("circle", "triangle")),
    "counting": (prompts.counting("square", 3), prompts.counting("square", 4)),
    "colors": (prompts.colors("triangle", "blue"), prompts.colors("triangle", "red")),
    "position": (prompts.position("circle", "left of", "square"), prompts.position("circle", "right of", "square")),
    "color_attr": (
        prompts.color_attr("circle", "red", "square", "green"),
        prompts.color_attr("circle", "green", "square", "red"),
    ),
}
"""A record of each task, and another that differs from it in what the task is about."""


def as_images(images: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255.0


def drawn(record: prompts.MetadataRecord, count: int, seed: int = 0) -> Tensor:
    """Images in which a record holds."""
    rng = np.random.default_rng(seed)
    return as_images([draw_scene(random_scene(record, rng)) for _ in range(count)])


def inputs_of(images: Tensor, record: dict[str, Any]) -> RewardInputs:
    batch = len(images)
    return RewardInputs(
        prompts=[str(record.get("prompt", "a photo"))] * batch,
        images=images,
        metadata=[record] * batch,
        group_ids=torch.zeros(batch, dtype=torch.int64),
        sample_ids=torch.arange(batch),
    )


@pytest.fixture(scope="module")
def net() -> AttributeNet:
    return load_net(shipped_weights())


@pytest.fixture(scope="module")
def reward() -> Reward:
    return build_reward("attributes")


def made_up(counts: dict[int, list[float]], cells: dict[int, tuple[int, int]] | None = None) -> Attributes:
    """Attributes of one image in float64: count probabilities by counter, and cells (row, column) all of one pair."""
    probabilities = torch.full((1, 15, 6), 1e-30, dtype=torch.float64)
    probabilities[:, :, 0] = 1.0
    for counter, row in counts.items():
        probabilities[0, counter] = torch.tensor(row, dtype=torch.float64)
    grid = torch.full((1, 13, 8, 8), -1e3, dtype=torch.float64)
    grid[:, 0] = 0.0
    for pair, (down, along) in (cells or {}).items():
        grid[0, :, down, along] = -1e3
        grid[0, 1 + pair, down, along] = 0.0
    return Attributes(probabilities.log(), grid)


def test_counters_are_twelve_pairs_then_three_shapes() -> None:
    assert PAIRS[0] == ("circle", "red")
    assert PAIRS[7] == ("square", "blue")
    assert PAIRS[8] == ("triangle", "red")
    assert len(PAIRS) == 12


def test_count_clauses_in_numbers() -> None:
    square = [0.1, 0.2, 0.3, 0.25, 0.1, 0.05]
    found = made_up({13: square, 4: [0.4, 0.6, 0, 0, 0, 0], 12: [0.3, 0.7, 0, 0, 0, 0]})
    cases: list[tuple[prompts.MetadataRecord, float, float]] = [
        (prompts.single_object("square"), 0.9, 0.9),  # at least one: extra squares harm nothing
        (prompts.counting("square", 3), 0.25, 0.25),  # its exclude clause makes it exactly three
        (prompts.counting("square", 4), 0.10, 0.10),
        (prompts.colors("square", "red"), 0.6, 0.6),  # counter 4 of the pairs
        (prompts.two_object("square", "circle"), (0.9 + 0.7) / 2, 0.9 * 0.7),
        (prompts.single_object("square") | {"exclude": [{"class": "circle", "count": 1}]}, 0.6, 0.9 * 0.3),
        (prompts.colors("square", "red") | {"exclude": [{"class": "square", "count": 2}]}, 0.45, 0.6 * 0.3),
    ]
    for record, mean, product in cases:
        assert attribute_scores(found, [record], combine="mean").item() == pytest.approx(mean, abs=1e-12), record
        assert attribute_scores(found, [record], combine="product").item() == pytest.approx(product, abs=1e-12), record


def test_relation_in_numbers() -> None:
    """A red circle in cell (row 3, column 1), a blue square in cell (row 3, column 6), both there for certain.

    Their centres: x = 0.1875 and 0.8125 in shares of the width, y = 0.4375, each drawn to 0.5 by the prior weight 0.05.
    """
    found = made_up({12: [0, 1, 0, 0, 0, 0], 13: [0, 1, 0, 0, 0, 0]}, {0: (3, 1), 7: (3, 6)})
    distance = (0.8125 - 0.1875) / 1.05
    expected = {}
    for relation, along in {"left of": distance, "right of": -distance, "above": 0.0, "below": 0.0}.items():
        cosine = (along - 0.06) / math.hypot(distance, 0.05)
        expected[relation] = 1 / (1 + math.exp(-10 * (cosine - 0.5)))
    for relation, probability in expected.items():
        score = attribute_scores(found, [prompts.position("circle", relation, "square")], combine="product")
        assert score.item() == pytest.approx(probability, abs=1e-9)
        score = attribute_scores(found, [prompts.position("circle", relation, "square")], combine="mean")
        assert score.item() == pytest.approx((1 + probability) / 2, abs=1e-9)
    assert expected["left of"] > 0.97
    assert expected["above"] < 0.01


@pytest.mark.parametrize("size", [(64, 64), (80, 48)])
def test_gradient_is_that_of_finite_differences(net: AttributeNet, size: tuple[int, int]) -> None:
    """In float64, at the eight pixels that matter most; central differences err by step^2 = 1e-10 and 1e-16 / step."""
    double = AttributeNet().double().requires_grad_(False)
    double.load_state_dict({name: value.double() for name, value in net.state_dict().items()})
    record = prompts.position("circle", "above", "triangle")
    image = draw_scene(random_scene(prompts.position("circle", "left of", "square"), np.random.default_rng(4)), 80)
    images = as_images([image]).double()[..., : size[0], : size[1]]

    def score(x: Tensor) -> Tensor:
        return attribute_scores(double(x), [record], combine="mean").sum()

    images.requires_grad_()
    (gradient,) = torch.autograd.grad(score(images), images)
    chosen = gradient.abs().flatten().topk(8).indices.tolist()
    step = 1e-5
    with torch.no_grad():
        for index in chosen:
            change = torch.zeros(images.numel(), dtype=torch.float64)
            change[index] = step
            change = change.reshape(images.shape)
            numeric = (score(images + change) - score(images - change)).item() / (2 * step)
            assert gradient.flatten()[index].item() == pytest.approx(numeric, rel=1e-5)


def test_gradient_reaches_every_image_through_reward_and_weighted_sum(reward: Reward) -> None:
    record, _ = TASKS["color_attr"]
    images = drawn(prompts.two_object("triangle", "square"), 3).requires_grad_()
    output = reward(inputs_of(images, record))
    assert reward.differentiable
    assert output.values.requires_grad
    assert not any(part.requires_grad for part in output.parts.values())
    (alone,) = torch.autograd.grad(output.values.sum(), images)
    assert bool(torch.isfinite(alone).all())
    assert bool((alone.flatten(1).norm(dim=1) > 1e-4).all())
    total = weighted_sum([reward, build_reward("jpeg_compressibility")], [2.0, 0.0])
    assert total.differentiable
    (doubled,) = torch.autograd.grad(total(inputs_of(images, record)).values.sum(), images)
    torch.testing.assert_close(doubled, 2 * alone, rtol=1e-5, atol=1e-8)


def test_is_an_ordinary_reward_too(reward: Reward) -> None:
    record, _ = TASKS["counting"]
    inputs = inputs_of(torch.cat([drawn(record, 3), drawn(prompts.single_object("circle"), 3)]), record)
    output = check_output(reward(inputs), 6, "attributes")
    assert not output.values.requires_grad
    assert bool(((output.values >= 0) & (output.values <= 1)).all())
    for i in range(6):  # an item's value depends on that item alone; float32 sums differ by the order of a batch
        one = reward(inputs_of(inputs.images[i : i + 1], record)).values
        torch.testing.assert_close(one, output.values[i : i + 1], rtol=0, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(reward(inputs).values, output.values)
    product = build_reward("attributes", options={"combine": "product"})
    assert torch.equal(product(inputs).values, output.parts["product"])
    assert product.version != reward.version


@pytest.mark.parametrize("task", list(TASKS))
def test_the_right_scene_scores_higher_than_a_wrong_one(reward: Reward, task: str) -> None:
    record, other = TASKS[task]
    right = reward(inputs_of(drawn(record, 16), record)).values
    wrong = reward(inputs_of(drawn(other, 16), record)).values
    if task in ("two_object", "position"):  # one of two clauses holds in the wrong scenes as well
        assert float(right.mean()) > float(wrong.mean()) + 0.3
    else:
        assert float(right.mean()) > float(wrong.mean()) + 0.6
    assert float((right > wrong.max()).float().mean()) >= 0.9


def test_following_the_gradient_makes_a_wrong_image_score_right(reward: Reward) -> None:
    record, other = TASKS["colors"]
    images = drawn(other, 4)
    before = reward(inputs_of(images, record)).values
    for _ in range(20):
        images.requires_grad_()
        value = reward(inputs_of(images, record)).values.clamp_min(1e-6).log().sum()
        (gradient,) = torch.autograd.grad(value, images)
        size = gradient.flatten(1).norm(dim=1)[:, None, None, None]
        images = (images.detach() + 0.5 * gradient / size).clamp(0, 1)
    after = reward(inputs_of(images, record)).values
    assert float(before.max()) < 0.3
    assert float(after.min()) > 0.7


def test_shipped_weights_are_small_and_accurate(net: AttributeNet, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shipped_weights().parent
    assert sum(path.stat().st_size for path in folder.iterdir()) < 1_000_000
    assert "flowrl pretrain scorer" in (folder / "README.md").read_text(encoding="utf-8")
    monkeypatch.setattr(scorer, "_SCENES_A_TASK", 20)
    for corrupted, least in ((False, 0.9), (True, 0.85)):
        figures = accuracy(net, 5, corrupted=corrupted)
        assert min(figures["pairs"], figures["shapes"], figures["relation"]) > least, figures


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "has no tag and no include"),
        ({"tag": "colors"}, "has no include in its metadata: prompts must come from a JSONL file"),
        ({"tag": "colors", "include": []}, "include is empty"),
        (prompts.colors("square", "purple"), "asks for the colour 'purple': the scorer knows red, yellow, green, blue"),
        (prompts.single_object("cat"), "asks for 'cat': the scorer knows circle, square, triangle"),
        (prompts.counting("square", 4) | {"exclude": [{"class": "square", "count": 6}]}, "counts up to 5"),
    ],
)
def test_refuses_records_it_cannot_judge(reward: Reward, record: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reward(inputs_of(drawn(prompts.single_object("circle"), 1), record))


def test_refuses_wrong_numbers_of_records_options_and_files(net: AttributeNet, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got 1 records for 2 images"):
        attribute_scores(net(torch.zeros(2, 3, 64, 64)), [prompts.single_object("circle")])
    with pytest.raises(ValueError, match="mean, product, got 'sum'"):
        reward_options("attributes", {"combine": "sum"})
    with pytest.raises(ValueError, match="there is no file"):
        reward_options("attributes", {"weights": str(tmp_path / "none.safetensors")})
    (tmp_path / "text.safetensors").write_text("no weights")
    with pytest.raises(ValueError, match="holds no weights of the attribute scorer"):
        build_reward("attributes", options={"weights": str(tmp_path / "text.safetensors")})


def test_training_outlines_are_those_of_the_world() -> None:
    rows, columns = np.mgrid[0:64, 0:64] + 0.5
    ground, red = np.asarray(BACKGROUND), np.asarray(COLORS["red"])
    for label in ("circle", "square", "triangle"):
        inside = np.clip(0.5 - signed_distance(label, columns - 30, rows - 34, 12.0), 0, 1)[..., None]
        expected = draw_scene([Shape(label=label, color="red", x=30.0, y=34.0, radius=12.0)])
        difference = np.abs(ground + inside * (red - ground) - expected)
        assert difference.mean() < 0.5  # of 255; edges are anti-aliased in two ways
        assert (difference.max(axis=-1) > 100).mean() < 0.002


def test_labels_are_counts_and_places_of_what_was_drawn() -> None:
    shapes = [
        Shape(label="square", color="blue", x=16.0, y=16.0, radius=8.0),
        Shape(label="square", color="blue", x=48.0, y=16.0, radius=8.0),
        Shape(label="circle", color="red", x=32.0, y=48.0, radius=10.0),
    ]
    counts, cells = labels_of(draw_scene(shapes))
    for row in counts:
        assert {i: n for i, n in enumerate(row.tolist()) if n} == {7: 2, 0: 1, 13: 2, 12: 1}
    assert cells.shape == (12, 8, 8)
    assert cells[7, 1:3, 1:3].mean() > 0.95  # a square of 16 x 16 pixels fills four cells of 8 x 8
    assert cells[7].sum() == pytest.approx(8.0, rel=0.15)
    assert cells[0].sum() == pytest.approx(math.pi * 100 / 64, rel=0.1)


def test_scenes_and_corruptions_are_functions_of_their_seeds() -> None:
    scenes = [training_scene(np.random.default_rng(k)) for k in (1, 2, 1)]
    assert np.array_equal(scenes[0], scenes[2])
    assert not np.array_equal(scenes[0], scenes[1])
    images = as_images(scenes)
    first, again, other = (corrupt(images, torch.Generator().manual_seed(k)) for k in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == images.shape
    assert 0 <= float(first.min()) <= float(first.max()) <= 1


def test_training_twice_gives_equal_weights() -> None:
    config = ScorerConfig(num_scenes=8, steps=2, batch_size=4)
    state = torch.get_rng_state()
    first, again = train(config).state_dict(), train(config).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    other = train(ScorerConfig(num_scenes=8, steps=2, batch_size=4, seed=1)).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["counts.0.weight"], other["counts.0.weight"])


def test_command_trains_writes_and_measures_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scorer, "_SCENES_A_TASK", 2)
    out = tmp_path / "scorer"
    sizes = ["num_scenes=8", "steps=2", "batch_size=4", "generated=0"]
    assert main(["pretrain", "scorer", f"out={out}", *sizes]) == 0
    assert "wrote" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "model.safetensors"]
    text = (out / "README.md").read_text(encoding="utf-8")
    assert "Made by `flowrl pretrain scorer num_scenes=8 steps=2 batch_size=4`." in text
    assert "| all twelve counts of an image |" in text
    assert "verdict" not in text
    with safe_open(out / "model.safetensors", framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float16}
    (out / "README.md").unlink()
    assert main(["pretrain", "scorer", "measure_only=true", f"out={out}", "generated=0"]) == 0
    assert (out / "README.md").read_text(encoding="utf-8") == text
    weights = build_reward("attributes", options={"weights": str(out / "model.safetensors")})
    assert weights.version != build_reward("attributes").version


def test_command_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["pretrain", "scorer", "measure_only=true", f"out={tmp_path}"]) == 1
    assert "there is no file" in capsys.readouterr().err
    assert main(["pretrain", "scorer", "stepz=3"]) == 1
    assert "did you mean 'steps'" in capsys.readouterr().err


def test_area_under_the_curve() -> None:
    assert roc_auc([0.9, 0.8, 0.3], [True, True, False]) == 1.0
    assert roc_auc([0.1, 0.8, 0.3, 0.3], [True, True, False, False]) == 0.5
    assert roc_auc([0.5, 0.5], [True, False]) == 0.5
    assert roc_auc([0.9, 0.2, 0.4, 0.6], [True, False, True, False]) == 0.75
    assert math.isnan(roc_auc([0.5, 0.6], [True, True]))
