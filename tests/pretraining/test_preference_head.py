"""The preference head: its loss in closed form, what it recovers, its calibration, its folder, and a real small run."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tiny_clip import assert_pointwise, clip_inputs, inputs_of, random_images, write_tiny_clip, write_tiny_dinov2

from flowrl.cli import main
from flowrl.config.train import ConfigError
from flowrl.pretraining.head_data import PairSplit, pair_features, split_pairs
from flowrl.pretraining.train_head import (
    HeadConfig,
    bradley_terry_loss,
    calibration_error,
    fit,
    fit_temperature,
    head_config,
    measure,
    train_head,
)
from flowrl.prompts.pairs import Pair
from flowrl.rewards import build_reward, reward_options
from flowrl.rewards.networks.preference_features import Features, build_features, check_backbone
from flowrl.rewards.preference_head import Head, head_scores, load_head, read_config
from flowrl.world.scenes import Shape, draw_scene

CPU = torch.device("cpu")


# ---- the loss --------------------------------------------------------------------------------------------------------


def test_loss_in_numbers() -> None:
    # -log sigmoid(2) = 0.1269280, -log sigmoid(-1) = 1.3132617
    loss = bradley_terry_loss(torch.tensor([2.0, 0.0]), torch.tensor([0.0, 1.0]))
    assert float(loss) == pytest.approx((0.1269280 + 1.3132617) / 2, abs=1e-6)
    assert float(bradley_terry_loss(torch.zeros(3), torch.zeros(3))) == pytest.approx(math.log(2), abs=1e-6)


def test_gradient_of_a_linear_head_in_closed_form() -> None:
    rng = np.random.default_rng(0)
    winner, loser, out = rng.normal(size=(5, 3)), rng.normal(size=(5, 3)), rng.normal(size=(1, 3))
    weights = {"out": torch.tensor(out, requires_grad=True)}
    loss = bradley_terry_loss(head_scores(weights, torch.tensor(winner)), head_scores(weights, torch.tensor(loser)))
    loss.backward()
    difference = winner - loser
    missing = 1 / (1 + np.exp(difference @ out[0]))  # 1 - sigmoid(margin)
    expected = -(missing[:, None] * difference).mean(axis=0)
    assert weights["out"].grad is not None
    np.testing.assert_allclose(weights["out"].grad.numpy()[0], expected, atol=1e-12)


def test_scores_of_both_heads_in_numpy() -> None:
    rng = np.random.default_rng(1)
    features = rng.normal(size=(4, 3)).astype(np.float32)
    out, hidden, bias = rng.normal(size=(1, 3)), rng.normal(size=(2, 3)), rng.normal(size=2)
    mean, std = rng.normal(size=3), rng.uniform(1, 2, size=3)

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.tensor(array, dtype=torch.float32)

    plain = (features - mean) / std
    linear = Head(mean=tensor(mean), std=tensor(std), weights={"out": tensor(out)})
    np.testing.assert_allclose(linear(tensor(features)).numpy(), plain @ out[0], atol=1e-5)
    weights = {"hidden": tensor(hidden), "hidden_bias": tensor(bias), "out": tensor(out[:, :2])}
    below = plain @ hidden.T + bias
    gelu = below * 0.5 * (1 + np.vectorize(math.erf)(below / math.sqrt(2)))
    mlp = Head(mean=tensor(mean), std=tensor(std), weights=weights)
    np.testing.assert_allclose(mlp(tensor(features)).numpy(), gelu @ out[0, :2], atol=1e-5)


# ---- training on features --------------------------------------------------------------------------------------------


def thirds(count: int, learn: int, stop: int) -> PairSplit:
    """The first pairs to learn from, the next to stop at, the rest to measure on; each is its own unit."""
    places = np.arange(count)
    return PairSplit(
        learn=places[:learn], stop=places[learn : learn + stop], measure=places[learn + stop :], unit=places,
        by="image",
    )  # fmt: skip


def drawn_pairs(direction: np.ndarray, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of pairs whose winner was drawn with probability sigmoid(direction · (a - b))."""
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(2, count, len(direction)))
    wins = rng.random(count) < 1 / (1 + np.exp(-(a - b) @ direction))
    winner, loser = np.where(wins[:, None], a, b), np.where(wins[:, None], b, a)
    return torch.tensor(winner, dtype=torch.float32), torch.tensor(loser, dtype=torch.float32)


SETTINGS = HeadConfig(epochs=60, patience=8, weight_decay=0.0)


def test_a_linear_preference_is_recovered() -> None:
    direction = np.array([2.0, -1.0, 0.5, 0.0, 0.0, 0.0])
    winner, loser = drawn_pairs(direction, 3000, seed=0)
    fitted = fit(winner, loser, thirds(3000, 2000, 500), SETTINGS)
    # The score is linear in the raw features, and its slope, in log-odds, is the direction that drew the winners.
    # Newton's method on the same 2000 pairs gives standard errors of 0.09, 0.06 and 0.05 for the coefficients.
    slope = (fitted.head.weights["out"][0] / fitted.head.std).double().numpy()
    np.testing.assert_allclose(slope, direction, atol=0.25)
    assert slope @ direction > 0.99 * np.linalg.norm(slope) * np.linalg.norm(direction)
    assert fitted.temperature == pytest.approx(1.0, abs=0.25)
    told = measure(fitted, winner, loser, np.arange(2500, 3000), np.arange(3000))
    margin = (winner - loser)[2500:].numpy() @ direction
    best = float((margin > 0).mean())  # of a judge who knows the direction
    assert told["accuracy"] == pytest.approx(best, abs=0.02)
    assert told["accuracy_low"] < best < told["accuracy_high"]
    assert told["loss"] == pytest.approx(np.log1p(np.exp(-margin)).mean(), abs=0.02)
    assert told["calibration_error"] < 0.08  # ten bins of 50 pairs: chance alone gives about 0.04


def test_an_mlp_learns_what_a_line_cannot() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 1200, 2))
    wins = (np.abs(a[:, 0]) > np.abs(b[:, 0]))[:, None]
    winner, loser = (torch.tensor(part, dtype=torch.float32) for part in (np.where(wins, a, b), np.where(wins, b, a)))
    split, places, unit = thirds(1200, 800, 200), np.arange(1000, 1200), np.arange(1200)
    told = {
        kind: measure(fit(winner, loser, split, dataclasses.replace(SETTINGS, head=kind, hidden=16)),
                       winner, loser, places, unit)["accuracy"]
        for kind in ("linear", "mlp")
    }  # fmt: skip
    assert told["mlp"] > 0.9
    assert told["linear"] < 0.65


def test_training_repeats_itself_and_touches_no_global_generator() -> None:
    winner, loser = drawn_pairs(np.array([1.0, 0.0]), 200, seed=3)
    config = dataclasses.replace(SETTINGS, head="mlp", hidden=4, epochs=3)
    before = torch.random.get_rng_state()
    first, second = (fit(winner, loser, thirds(200, 150, 25), config) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(first.head.weights[name], second.head.weights[name]) for name in first.head.weights)
    other = fit(winner, loser, thirds(200, 150, 25), dataclasses.replace(config, seed=1))
    assert not torch.equal(first.head.weights["hidden"], other.head.weights["hidden"])


def test_training_stops_early_on_pairs_without_a_preference() -> None:
    rng = np.random.default_rng(0)
    winner, loser = torch.tensor(rng.normal(size=(2, 1200, 30)), dtype=torch.float32)
    fitted = fit(winner, loser, thirds(1200, 600, 300), dataclasses.replace(SETTINGS, epochs=300, patience=5))
    assert fitted.epochs == fitted.best_epoch + 5
    assert fitted.epochs < 100
    told = measure(fitted, winner, loser, np.arange(900, 1200), np.arange(1200))
    assert told["accuracy_low"] < 0.5 < told["accuracy_high"]
    assert told["loss"] == pytest.approx(math.log(2), abs=0.05)


def test_features_that_never_change_do_no_harm() -> None:
    winner, loser = drawn_pairs(np.array([2.0]), 200, seed=1)
    constant = torch.full((200, 1), 7.3)
    winner, loser = torch.cat([winner, constant], dim=1), torch.cat([loser, constant], dim=1)
    fitted = fit(winner, loser, thirds(200, 150, 25), SETTINGS)
    assert bool(torch.isfinite(fitted.head(winner)).all())
    assert float(fitted.head.std[1]) == 1.0


@pytest.mark.parametrize("count", [4, 99])
def test_temperature_of_equal_margins(count: int) -> None:
    # All right: sigmoid(m / T) is the target (n + 1) / (n + 2), so T = m / log(n + 1).
    assert fit_temperature(np.full(count, 3.0)) == pytest.approx(3.0 / math.log(count + 1), rel=1e-9)


def test_temperature_of_right_and_wrong() -> None:
    # 80 of 100 right by the same margin 5: sigmoid(5 a) - t weighs 80, (1 - sigmoid(5 a)) - t weighs -20.
    margin = np.array([5.0] * 80 + [-5.0] * 20)
    share = (80 * (101 / 102) + 20 * (1 / 102)) / 100
    assert fit_temperature(margin) == pytest.approx(5.0 / math.log(share / (1 - share)), rel=1e-9)
    assert fit_temperature(-margin) == 1e3  # worse than chance


def test_calibration_error_in_numbers() -> None:
    # Sides at 0.9 (three of four right: gap 0.15) and at 0.6 (one of two right: gap 0.1).
    probability = np.array([0.9, 0.9, 0.9, 0.1, 0.6, 0.4])
    assert calibration_error(probability) == pytest.approx((4 * 0.15 + 2 * 0.1) / 6)


# ---- pairs -----------------------------------------------------------------------------------------------------------


def pair(prompt: str, winner: str, loser: str) -> Pair:
    return Pair(prompt=prompt, winner=Path(winner), loser=Path(loser))


def test_parts_share_no_prompt_and_no_image() -> None:
    rows = [pair(f"p{i % 20}", f"{i % 20}-{i % 3}.png", f"{i % 20}-{i % 3 + 1}.png") for i in range(100)]
    split = split_pairs(rows, 0.3, seed=0)
    parts = (split.learn, split.stop, split.measure)
    assert split.by == "prompt"
    assert sorted(np.concatenate(parts).tolist()) == list(range(100))
    assert [len({rows[i].prompt for i in part}) for part in parts] == [14, 3, 3]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        for what in ("prompt", "winner", "loser"):
            assert not {getattr(rows[i], what) for i in parts[one]} & {getattr(rows[i], what) for i in parts[other]}


def test_pairs_of_one_prompt_are_split_by_images() -> None:
    rows = [pair("p", f"{i}.png", f"{i}b.png") for i in range(10)] + [pair("p", "0.png", "1.png")]
    split = split_pairs(rows, 0.5, seed=0)
    assert split.by == "image"
    assert split.unit[0] == split.unit[1] == split.unit[10]  # joined by the pair of their winners
    assert int(split.unit.max()) + 1 == 9


def test_too_few_sets_are_refused() -> None:
    chain = [pair("p", f"{i}.png", f"{i + 1}.png") for i in range(30)]
    with pytest.raises(ValueError, match="30 pairs hang together by shared images in 1 sets, and 6 are needed"):
        split_pairs(chain, 0.3, seed=0)


def test_an_image_goes_through_the_backbone_once(tmp_path: Path) -> None:
    for name, size in (("a", 8), ("b", 8), ("c", 12)):  # of two sizes
        Image.new("RGB", (size, size), (10 * size, 0, 0)).save(tmp_path / f"{name}.png")
    seen: list[tuple[int, list[str]]] = []

    def of(images: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        seen.append((images.shape[-1], prompts))
        return images.mean(dim=(2, 3))

    features = Features(of=of, width=3, reads_prompts=False, differentiable=True, version="means")
    rows = [pair("x", str(tmp_path / "a.png"), str(tmp_path / "b.png")),
            pair("y", str(tmp_path / "c.png"), str(tmp_path / "a.png"))]  # fmt: skip
    winner, loser = pair_features(rows, features, batch_size=8)
    assert seen == [(8, ["", ""]), (12, [""])]
    np.testing.assert_allclose(winner[:, 0].numpy(), [80 / 255, 120 / 255], atol=1e-6)
    np.testing.assert_allclose(loser[:, 0].numpy(), [80 / 255, 80 / 255], atol=1e-6)
    seen.clear()
    pair_features(rows, dataclasses.replace(features, reads_prompts=True), batch_size=8)
    assert sorted(prompt for _, prompts in seen for prompt in prompts) == ["x", "x", "y", "y"]


# ---- backbones -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def dinov2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_dinov2(tmp_path_factory.mktemp("dinov2"), width=16)


def test_clip_features_hold_the_score_of_clip(clip_folder: Path) -> None:
    inputs = clip_inputs()
    features = build_features("clip", model=str(clip_folder), device=CPU, owner="test")
    found = features.of(inputs.images, inputs.prompts)
    assert found.shape == (4, features.width)
    image, product = found.chunk(2, dim=1)
    np.testing.assert_allclose(image.norm(dim=1).numpy(), 1.0, atol=1e-5)
    cosine = build_reward("clip_score", options={"model": str(clip_folder)})(inputs).values
    np.testing.assert_allclose(product.sum(dim=1).numpy(), cosine.numpy(), atol=1e-5)


def test_dinov2_features_are_class_token_and_mean_of_patches(dinov2_folder: Path) -> None:
    images = random_images(2, 28)
    features = build_features("dinov2", model=str(dinov2_folder), image_size=28, device=CPU, owner="test")
    network: Any = transformers.Dinov2Model.from_pretrained(dinov2_folder).eval()
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    pixels = (images.numpy() - mean[:, None, None]) / std[:, None, None]
    with torch.no_grad():
        tokens = network(pixel_values=torch.tensor(pixels, dtype=torch.float32)).last_hidden_state.numpy()
        found = features.of(images, ["", ""]).numpy()
    np.testing.assert_allclose(found, np.concatenate([tokens[:, 0], tokens[:, 1:].mean(axis=1)], axis=1), atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("attributes", "x", 224), "comes with flowrl and takes no model"),
        (("clip", "./nowhere", 224), "there is no folder './nowhere'"),
        (("dinov2", None, 3), "at least one patch"),
    ],
)
def test_bad_backbones_are_refused(options: tuple[Any, str | None, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_backbone(*options)


def test_an_image_size_between_patches_is_refused(dinov2_folder: Path) -> None:
    with pytest.raises(ValueError, match="multiple of the model's patches of 14 pixels, got 30: take 28"):
        build_features("dinov2", model=str(dinov2_folder), image_size=30, device=CPU, owner="test")


# ---- a whole run -----------------------------------------------------------------------------------------------------


def scene(rng: np.random.Generator, red: float) -> np.ndarray:
    """A red shape of a radius, and one of another colour anywhere beside it."""
    labels = ("circle", "square", "triangle")
    other = ("yellow", "green", "blue")[rng.integers(3)]
    shapes = (
        Shape(label=labels[rng.integers(3)], color="red", x=rng.uniform(15, 20), y=rng.uniform(15, 49), radius=red),
        Shape(label=labels[rng.integers(3)], color=other, x=45, y=rng.uniform(18, 46), radius=rng.uniform(6, 13)),
    )  # fmt: skip
    return draw_scene(shapes)


@pytest.fixture(scope="module")
def world_pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of scenes in which the one with more red won."""
    folder, rng, lines = tmp_path_factory.mktemp("world"), np.random.default_rng(0), []
    for number in range(240):
        small, large = np.sort(rng.uniform(4, 13, size=2)) + np.array([0.0, 1.0])
        for side, radius in (("winner", large), ("loser", small)):
            Image.fromarray(scene(rng, radius)).save(folder / f"{number}-{side}.png")
        row = {"prompt": f"prompt {number}", "winner": f"{number}-winner.png", "loser": f"{number}-loser.png"}
        lines.append(json.dumps(row) + "\n")
    (folder / "pairs.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder / "pairs.jsonl"


@pytest.fixture(scope="module")
def head_folder(world_pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("heads") / "red"
    given = ["reward", "train", str(world_pairs), f"out={out}", "backbone=attributes", "held_out=0.5"]
    assert main(given) == 0
    return out


def test_a_head_learns_to_like_red(head_folder: Path) -> None:
    report = json.loads((head_folder / "report.json").read_text(encoding="utf-8"))
    assert report["pairs"] == 240
    assert (report["learned_from"], report["stopped_at"], report["measured_on"]) == (120, 60, 60)
    assert report["measured"]["accuracy"] > 0.9
    assert report["measured"]["accuracy_low"] > 0.8
    assert report["measured"]["loss"] < 0.35
    assert sorted(path.name for path in head_folder.iterdir()) == ["config.json", "head.safetensors", "report.json"]


def test_the_reward_scores_as_the_head_did(head_folder: Path, world_pairs: Path) -> None:
    reward = build_reward("preference_head", options={"model": str(head_folder)})
    rng = np.random.default_rng(9)
    sizes = np.array([4.0, 6.0, 8.0, 10.0, 12.0, 14.0])
    images = np.stack([scene(rng, radius) for radius in sizes])
    inputs = inputs_of(torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255.0)
    values = reward(inputs).values.numpy()
    assert np.corrcoef(sizes, values)[0, 1] > 0.9
    assert_pointwise(reward, inputs, atol=1e-4)  # sums of other sizes round otherwise
    config = read_config(head_folder)
    features = build_features("attributes", device=CPU, owner="test")
    head = load_head(head_folder / "head.safetensors", features.width, CPU)
    raw = head(features.of(inputs.images, inputs.prompts)).detach().double().numpy()
    np.testing.assert_allclose(values, (raw - config["center"]) / config["temperature"], atol=1e-4)
    assert reward.needs == {"images"}
    assert features.version in reward.version


def test_the_gradient_of_the_images_passes(head_folder: Path) -> None:
    reward = build_reward("preference_head", options={"model": str(head_folder)})
    assert reward.differentiable
    images = torch.from_numpy(scene(np.random.default_rng(2), 9.0).copy()).permute(2, 0, 1)[None].float() / 255.0
    with_grad = images.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(reward(inputs_of(with_grad)).values.sum(), with_grad)
    direction = slope / slope.norm()
    step = 0.05
    ends = [float(reward(inputs_of(images + sign * step * direction)).values) for sign in (1, -1)]
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(float((slope * direction).sum()), rel=0.02)


def test_broken_images_fail_alone(head_folder: Path) -> None:
    reward = build_reward("preference_head", options={"model": str(head_folder)})
    images = random_images(3, 64)
    images[1, 0, 0, 0] = torch.nan
    output = reward(inputs_of(images))
    assert output.valid.tolist() == [True, False, True]
    assert output.errors == {"not_finite": 1}


def test_a_clip_head_reads_prompts_and_finds_its_backbone_again(
    world_pairs: Path, clip_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "clip"
    shutil.copytree(clip_folder, folder)
    rows = world_pairs.read_text(encoding="utf-8").splitlines()[:24]
    short = world_pairs.with_name("short.jsonl")
    short.write_text("\n".join(rows), encoding="utf-8")
    config = HeadConfig(out=str(tmp_path / "head"), model=str(folder), epochs=2, head="mlp", hidden=4)
    report = train_head(short, config)
    assert report["epochs"] == 2
    options = {"model": config.out}
    reward = build_reward("preference_head", options=options)
    assert reward.needs == {"images", "prompts"}
    inputs = clip_inputs()
    values = reward(inputs).values
    other = dataclasses.replace(inputs, prompts=list(reversed(inputs.prompts)))
    assert not torch.allclose(values, reward(other).values)
    folder.rename(tmp_path / "moved")
    with pytest.raises(ValueError, match="there is no folder"):
        reward_options("preference_head", options)
    moved = build_reward("preference_head", options=options | {"backbone_model": str(tmp_path / "moved")})
    torch.testing.assert_close(moved(inputs).values, values)
    strange = write_tiny_clip(tmp_path / "strange", seed=5)
    with pytest.raises(ValueError, match="was trained on features clip:"):
        build_reward("preference_head", options=options | {"backbone_model": str(strange)})


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_a_folder_without_a_head_is_refused(head_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        reward_options("preference_head", {"model": str(tmp_path / "none")})
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        reward_options("preference_head", {"model": str(tmp_path)})
    copy = tmp_path / "copy"
    shutil.copytree(head_folder, copy)
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    for text, message in (("{", "is not JSON"), ("[]", "must hold an object"),
                          (json.dumps(config | {"temperature": -1.0}), "does not describe a head")):  # fmt: skip
        (copy / "config.json").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            reward_options("preference_head", {"model": str(copy)})


def test_weights_of_another_head_are_refused(head_folder: Path) -> None:
    with pytest.raises(ValueError, match="holds no head for 7 features"):
        load_head(head_folder / "head.safetensors", 7, CPU)


def test_a_folder_that_is_taken_is_refused(world_pairs: Path, head_folder: Path) -> None:
    with pytest.raises(ValueError, match="will not be overwritten"):
        train_head(world_pairs, HeadConfig(out=str(head_folder), backbone="attributes"))


@pytest.mark.parametrize("text", ["epochs=0", "held_out=1.0", "lr=-1", "backbone=vgg", "learning_rate=1"])
def test_bad_settings_are_refused(text: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=text.partition("=")[0]):
        head_config([text])
