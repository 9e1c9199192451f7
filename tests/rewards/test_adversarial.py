"""The adversarial reward: discriminators on tiny random backbones and on the embedded one, what they learn and keep."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tiny_clip import assert_pointwise, clip_inputs, inputs_of, random_images, write_tiny_clip, write_tiny_dinov2
from torch import Tensor

from flowrl.rewards import RewardInputs, build_reward, reward_options, to_uint8
from flowrl.rewards.adversarial import AdversarialReward
from flowrl.rewards.base.outputs import check_output
from flowrl.rewards.embedded.attributes import load_net, shipped_weights
from flowrl.rewards.networks.discriminators import (
    ClipDiscriminator,
    HeadDiscriminator,
    _squares,
    discriminator_loss,
    make_head,
    patch_places,
)
from flowrl.rewards.references import FileReferences, WorldReferences, open_references
from flowrl.world.scene_prompts import train_records
from flowrl.world.scenes import draw_scene, random_scene

WORLD: dict[str, Any] = {"references": "world", "backbone": "attributes"}
SMALL: dict[str, Any] = {"pretrain_steps": 2, "steps_per_iteration": 2, "batch_size": 4}


@pytest.fixture(scope="module")
def tiny_dino(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_dinov2(tmp_path_factory.mktemp("dinov2"))


@pytest.fixture(scope="module")
def tiny_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def white(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of five white images of other sizes than what is generated."""
    folder = tmp_path_factory.mktemp("white")
    for i in range(5):
        Image.new("RGB", (30 + i, 40), (255, 255, 255)).save(folder / f"{i}.png")
    return folder


def made(**options: Any) -> AdversarialReward:
    reward = build_reward("adversarial", options=options)
    assert isinstance(reward, AdversarialReward)
    return reward


def of_dino(tiny_dino: Path, white: Path, **options: Any) -> AdversarialReward:
    return made(model=str(tiny_dino), references=str(white), image_size=28, held_out=0.2, **options)


def world_inputs(batch: int = 6, iteration: int = 0) -> RewardInputs:
    """Noise of 64 pixels under the first prompts of the embedded world."""
    records = train_records()[:batch]
    ids = torch.arange(batch)
    return RewardInputs(
        prompts=[record["prompt"] for record in records], images=random_images(batch, 64, seed=iteration),
        metadata=records, group_ids=ids, sample_ids=ids, iteration=iteration,
    )  # fmt: skip


def fill_head(reward: AdversarialReward, seed: int = 0) -> None:
    """Gives the head a last layer that is not zero, as after some learning."""
    generator = torch.Generator().manual_seed(seed)
    for weight in reward.discriminator.trained.values():
        weight.data.add_(torch.randn(weight.shape, generator=generator))


def head_by_hand(reward: AdversarialReward, tokens: Tensor) -> np.ndarray:
    """Linear, GELU by the error function, Linear in numpy: [b, 1 + p, d] to [b, 1 + p]."""
    weights = [weight.detach().numpy().astype(np.float64) for weight in reward.discriminator.trained.values()]
    hidden = tokens.detach().numpy().astype(np.float64) @ weights[0].T + weights[1]
    hidden = hidden * 0.5 * (1.0 + np.vectorize(math.erf)(hidden / math.sqrt(2.0)))
    return np.asarray((hidden @ weights[2].T + weights[3])[..., 0])


# ---- losses, head, patches -------------------------------------------------------------------------------------------


def test_losses() -> None:
    real, fake = torch.tensor([2.0, 0.5]), torch.tensor([-2.0, 0.5])
    assert float(discriminator_loss("hinge", real, fake)) == 0.5
    softplus = [math.log1p(math.exp(z)) for z in (-2.0, -0.5, -2.0, 0.5)]
    assert float(discriminator_loss("logistic", real, fake)) == pytest.approx(sum(softplus) / 4, abs=1e-6)
    pairs = [-math.log(math.exp(r) / (math.exp(r) + math.exp(f))) for r, f in ((2.0, -2.0), (0.5, 0.5))]
    assert float(discriminator_loss("pairwise", real, fake)) == pytest.approx(sum(pairs) / 2, abs=1e-6)
    assert float(discriminator_loss("pairwise", fake, fake)) == pytest.approx(math.log(2), abs=1e-6)
    assert float(discriminator_loss("logistic", 0 * real, 0 * fake)) == pytest.approx(math.log(2), abs=1e-6)


def test_losses_refuse_to_broadcast() -> None:
    with pytest.raises(ValueError, match=r"real \[2, 1\] and fake \[2\] must have one shape"):
        discriminator_loss("hinge", torch.zeros(2, 1), torch.zeros(2))


def test_head_of_dinov2_base() -> None:
    head = make_head(768, seed=0)
    assert sum(weight.numel() for weight in head.parameters()) == 394_241
    assert torch.equal(head.forward(torch.ones(3, 768)), torch.zeros(3, 1)), "knows nothing yet"
    first = head.state_dict()["0.weight"]
    assert float(first.std()) == pytest.approx(1 / math.sqrt(3 * 768), rel=0.02)
    assert torch.equal(first, make_head(768, seed=0).state_dict()["0.weight"])
    assert not torch.equal(first, make_head(768, seed=1).state_dict()["0.weight"])


def test_patches_are_drawn_from_the_seed() -> None:
    places = patch_places(1369, 64, 100, 7)
    assert torch.equal(places, patch_places(1369, 64, 100, 7))
    assert not torch.equal(places, patch_places(1369, 64, 100, 8))
    assert places.shape == (100, 64)
    assert 0 <= int(places.min()) < 20
    assert 1350 <= int(places.max()) < 1369
    assert len(set(places[0].tolist())) < 64 or len(set(places[1].tolist())) < 64, "with replacement"


def test_images_are_cut_to_the_middle_square_and_resized_as_pillow_does() -> None:
    image = np.random.default_rng(0).integers(0, 256, (60, 40, 3), dtype=np.uint8)
    own = _squares([image, image[10:50]], 16, torch.device("cpu"), antialias=True)
    assert torch.equal(own[0], own[1])
    pillow = np.asarray(Image.fromarray(image[10:50]).resize((16, 16), Image.Resampling.BICUBIC))
    assert np.abs(own[0].permute(1, 2, 0).numpy() * 255 - pillow).max() < 1.0  # Pillow rounds, twice
    assert torch.equal(
        _squares([image[:40]], 40, torch.device("cpu"), antialias=True)[0],
        torch.from_numpy(image[:40]).permute(2, 0, 1).float() / 255,
    )


# ---- DINOv2 ----------------------------------------------------------------------------------------------------------


def dino_tokens(tiny_dino: Path, images: Tensor) -> Tensor:
    """The model's own last hidden state of 8-bit images that already have its size."""
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    pixels = torch.from_numpy(to_uint8(images)).float() / 255
    network = transformers.Dinov2Model.from_pretrained(tiny_dino).eval()
    with torch.no_grad():
        tokens: Tensor = network(((pixels - mean) / std).permute(0, 3, 1, 2)).last_hidden_state
    return tokens


def test_reward_is_seven_tenths_class_and_three_tenths_mean_of_patches(tiny_dino: Path, white: Path) -> None:
    reward, inputs = of_dino(tiny_dino, white), inputs_of(random_images(3, 28))
    fill_head(reward)
    logits = head_by_hand(reward, dino_tokens(tiny_dino, inputs.images))
    output = check_output(reward(inputs), 3, "adversarial")
    assert logits.shape == (3, 5)
    expected = 0.7 * logits[:, 0] + 0.3 * logits[:, 1:].mean(axis=1)
    np.testing.assert_allclose(output.values.numpy(), expected, rtol=1e-4)
    np.testing.assert_allclose(output.parts["class"].numpy(), logits[:, 0], rtol=1e-4)
    np.testing.assert_allclose(output.parts["patches"].numpy(), logits[:, 1:].mean(axis=1), rtol=1e-4, atol=1e-3)
    twice = of_dino(tiny_dino, white, class_weight=0.0, patch_weight=2.0)
    fill_head(twice)
    np.testing.assert_allclose(twice(inputs).values.numpy(), 2 * logits[:, 1:].mean(axis=1), rtol=1e-4, atol=1e-3)


def test_some_patches_are_the_same_ones_for_all_images_of_an_iteration(tiny_dino: Path, white: Path) -> None:
    reward = of_dino(tiny_dino, white, patches=2)
    fill_head(reward)
    images = random_images(3, 28)
    logits = head_by_hand(reward, dino_tokens(tiny_dino, images))[:, 1:]
    found = []
    for iteration in range(6):
        part = reward(inputs_of(images, iteration=iteration)).parts["patches"].numpy()
        means = [(logits[:, i] + logits[:, j]) / 2 for i in range(4) for j in range(4)]
        assert min(np.abs(part - mean).max() for mean in means) < 1e-3, "the mean of two patches, the same in all rows"
        found.append(tuple(part.tolist()))
        assert torch.equal(reward(inputs_of(images, iteration=iteration)).parts["patches"], torch.tensor(part))
    assert len(set(found)) > 1, "other patches in other iterations"


@pytest.mark.parametrize("patches", ["all", 2])
def test_scores_are_pointwise(patches: int | str, tiny_dino: Path, white: Path) -> None:
    reward = of_dino(tiny_dino, white, patches=patches)
    fill_head(reward)
    assert_pointwise(reward, inputs_of(random_images(20, 28)), atol=2e-4)  # of values around 30


def test_published_normalises_in_the_reward_only(tiny_dino: Path, white: Path) -> None:
    reward, inputs = of_dino(tiny_dino, white, published=True), inputs_of(random_images(3, 28))
    fill_head(reward)
    tokens = dino_tokens(tiny_dino, inputs.images)
    logits = head_by_hand(reward, tokens / tokens.norm(dim=-1, keepdim=True))
    expected = 0.7 * logits[:, 0] + 0.3 * logits[:, 1:].mean(axis=1)
    np.testing.assert_allclose(reward(inputs).values.numpy(), expected, rtol=1e-4)
    learned = reward.discriminator.judge(list(to_uint8(inputs.images)), inputs.prompts, None, as_reward=False)
    np.testing.assert_allclose(learned.whole.detach().numpy(), head_by_hand(reward, tokens)[:, 0], rtol=1e-4)


def test_published_resizes_without_antialiasing_in_the_reward(tiny_dino: Path, white: Path) -> None:
    images = list(to_uint8(random_images(2, 90)))
    scored = {}
    for published in (False, True):
        reward = of_dino(tiny_dino, white, published=published)
        fill_head(reward)
        scored[published] = [
            reward.discriminator.judge(images, ["", ""], None, as_reward=flag).whole.detach() for flag in (True, False)
        ]
    assert torch.equal(scored[False][0], scored[False][1]), "one preprocessing for both uses"
    assert torch.equal(scored[True][1], scored[False][1])
    assert not torch.allclose(scored[True][0], scored[True][1])


def test_fifty_steps_tell_black_from_white(tiny_dino: Path, white: Path) -> None:
    reward = of_dino(tiny_dino, white, pretrain_steps=50, batch_size=8, patches=3, max_accuracy=1.0)
    inputs = inputs_of(torch.zeros(8, 3, 28, 28))
    assert torch.equal(reward(inputs).values, torch.zeros(8)), "before it has learned"
    metrics = reward.learn(inputs)
    assert metrics["accuracy"] == 1.0
    assert metrics["steps"] == 54
    assert metrics["reward_references"] > 0 > metrics["reward_frozen"]
    assert metrics["reward_frozen"] == pytest.approx(float(reward(inputs).values.mean()), rel=0.2)  # other patches
    assert isinstance(reward.discriminator, HeadDiscriminator)
    backbone = [cell.cell_contents for cell in reward.discriminator.tokens.__closure__ or ()]
    frozen = [weight for network in backbone for weight in network.parameters()]
    assert len(frozen) > 20
    assert all(weight.grad is None and not weight.requires_grad for weight in frozen)


# ---- CLIP ------------------------------------------------------------------------------------------------------------


def clip_options(tiny_clip: Path, tmp_path: Path, inputs: RewardInputs) -> dict[str, Any]:
    """References that are exactly what is generated."""
    for i, image in enumerate(to_uint8(inputs.images)):
        Image.fromarray(image).save(tmp_path / f"{i}.png")
    listed = {prompt: f"{i}.png" for i, prompt in enumerate(inputs.prompts)}
    (tmp_path / "references.json").write_text(json.dumps(listed))
    return {
        "backbone": "clip", "model": str(tiny_clip), "references": str(tmp_path / "references.json"), "held_out": 0,
        "pretrain_steps": 0, "batch_size": 4, "steps_per_iteration": 1,
    }  # fmt: skip


def test_clip_is_pick_score_and_only_its_last_vision_block_learns(tiny_clip: Path, tmp_path: Path) -> None:
    inputs = clip_inputs()
    reward = made(**clip_options(tiny_clip, tmp_path, inputs), lr=1e-3)
    frozen = build_reward("pick_score", options={"model": str(tiny_clip)})
    before = frozen(inputs).values
    torch.testing.assert_close(reward(inputs).values, before, rtol=0, atol=1e-6)
    assert len(set(before.tolist())) == 4
    assert isinstance(reward.discriminator, ClipDiscriminator)
    network = reward.discriminator.network
    trained = {name for name, weight in network.named_parameters() if weight.requires_grad}
    assert trained == {name for name, _ in network.named_parameters() if "vision_model.encoder.layers.1." in name}
    weights = {name: weight.detach().clone() for name, weight in network.named_parameters()}
    metrics = reward.learn(inputs_of(random_images(4, 40, 56, seed=5), inputs.prompts))
    assert "reward_references" not in metrics, "none are held out"
    moved = {name for name, weight in network.named_parameters() if not torch.equal(weight, weights[name])}
    assert moved <= trained
    assert moved >= {name for name in trained if name.endswith("weight")}
    assert torch.equal(frozen(inputs).values, before), "the reward of the same checkpoint beside it stays"


def test_clip_loss_is_log_two_where_references_are_what_was_generated(tiny_clip: Path, tmp_path: Path) -> None:
    inputs = clip_inputs()
    metrics = made(**clip_options(tiny_clip, tmp_path, inputs)).learn(inputs)
    assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert metrics["accuracy"] == 0.5, "ties"
    assert metrics["margin"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.slow
def test_clip_learns_to_prefer_references(tiny_clip: Path, tmp_path: Path) -> None:
    inputs = clip_inputs()
    options = clip_options(tiny_clip, tmp_path, inputs) | {"steps_per_iteration": 20, "lr": 1e-3, "max_accuracy": 1.0}
    reward = made(**options)
    black = inputs_of(torch.zeros(4, 3, 40, 56), inputs.prompts)
    first = reward.learn(black)["margin"]
    assert reward.learn(black)["margin"] > first
    assert bool((reward(inputs).values > reward(black).values).all())


# ---- learning --------------------------------------------------------------------------------------------------------


def test_attributes_backbone_reads_the_scorers_cells() -> None:
    reward, inputs = made(**WORLD), world_inputs(3)
    fill_head(reward)
    pixels = torch.from_numpy(to_uint8(inputs.images)).permute(0, 3, 1, 2).float() / 255
    with torch.no_grad():
        cells = load_net(shipped_weights()).trunk(2 * pixels - 1).flatten(2).transpose(1, 2)
    assert cells.shape == (3, 64, 80)
    logits = head_by_hand(reward, torch.cat([cells.mean(dim=1, keepdim=True), cells], dim=1))
    expected = 0.7 * logits[:, 0] + 0.3 * logits[:, 1:].mean(axis=1)
    np.testing.assert_allclose(reward(inputs).values.numpy(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_it_learns_what_scenes_look_like_and_not_by_heart() -> None:
    reward = made(**WORLD, pretrain_steps=30, batch_size=8, lr=1e-3, patches=8, max_accuracy=1.0)
    metrics = reward.learn(world_inputs(12))
    assert metrics["accuracy"] > 0.9
    fresh = world_inputs(12, iteration=1)
    assert metrics["reward_references"] > float(reward(fresh).values.max())


def test_equal_inputs_give_equal_weights_and_no_global_randomness_is_used() -> None:
    rewards = [made(**WORLD, **SMALL, patches=5) for _ in range(2)]
    torch.manual_seed(1)
    generators = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index, union-attr]
    metrics = [[reward.learn(world_inputs(iteration=i)) for i in range(2)] for reward in rewards]
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert np.array_equal(np.random.get_state()[1], generators[1])  # type: ignore[index]
    assert metrics[0] == metrics[1]
    first, second = (reward.discriminator.trained for reward in rewards)
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = made(**WORLD, **SMALL, patches=5, seed=1)
    other.learn(world_inputs())
    assert not torch.equal(other.discriminator.trained["0.weight"], first["0.weight"])


def test_a_restored_reward_goes_on_bit_by_bit(tmp_path: Path) -> None:
    whole = made(**WORLD, **SMALL)
    whole.learn(world_inputs())
    torch.save(whole.state(), tmp_path / "state.pt")
    kept = {name: weight.clone() for name, weight in whole.state()["weights"].items()}
    expected = [whole.learn(world_inputs(iteration=i)) for i in (1, 2)]
    continued = made(**WORLD, **SMALL)
    continued.restore(torch.load(tmp_path / "state.pt", weights_only=True))
    assert all(torch.equal(weight, kept[name]) for name, weight in continued.discriminator.trained.items())
    assert [continued.learn(world_inputs(iteration=i)) for i in (1, 2)] == expected
    assert torch.equal(continued(world_inputs()).values, whole(world_inputs()).values)
    assert continued.state()["snapshot"]["images"].dtype == torch.uint8
    first, second = (_flat(reward.state()["optimizer"]) for reward in (continued, whole))
    assert first.keys() == second.keys()
    assert len(first) == 4 * 3  # of each weight: two moments and the step
    assert all(torch.equal(first[key], second[key]) for key in first)


def _flat(state: dict[str, Any]) -> dict[str, Tensor]:
    return {f"{i}.{name}": value for i, slots in state["state"].items() for name, value in slots.items()}


def test_another_discriminators_state_is_refused(tiny_dino: Path, white: Path) -> None:
    with pytest.raises(ValueError, match="the saved state is that of another discriminator"):
        made(**WORLD).restore(of_dino(tiny_dino, white).state())


def test_a_fixed_discriminator_learns_once(tiny_dino: Path) -> None:
    reward = made(**WORLD, **SMALL | {"update": False})
    assert reward.learn(world_inputs())["steps"] == 2
    kept = {name: weight.detach().clone() for name, weight in reward.discriminator.trained.items()}
    metrics = reward.learn(world_inputs(iteration=1))
    assert metrics["steps"] == metrics["saturated"] == 0
    assert all(torch.equal(weight, kept[name]) for name, weight in reward.discriminator.trained.items())


def test_saturation_warns_once_and_ends_an_iterations_learning(tiny_dino: Path, white: Path) -> None:
    reward = of_dino(tiny_dino, white, pretrain_steps=30, batch_size=4, max_accuracy=0.9)
    black = torch.zeros(4, 3, 28, 28)
    with pytest.warns(UserWarning, match=r"at iteration 0 the discriminator was right on 100% of a batch"):
        metrics = reward.learn(inputs_of(black))
    assert metrics["saturated"] == 1.0
    assert metrics["steps"] == 30, "pre-training goes on"
    assert reward.learn(inputs_of(black, iteration=1))["steps"] == 0  # a second warning would be an error here
    hard = reward.learn(inputs_of(1 - black, iteration=2))  # white images: told apart by nothing
    assert (hard["saturated"], hard["steps"], hard["accuracy"]) == (0.0, 4.0, 0.5)


def test_whose_turn_it_is() -> None:
    assert [made(**WORLD).trains_policy(i) for i in range(4)] == [False, True, True, True]
    published = made(**WORLD, policy_every=10)
    assert [i for i in range(30) if published.trains_policy(i)] == [9, 19, 29]
    warmed = made(**WORLD, policy_every=2, warmup_iterations=4)
    assert [i for i in range(10) if warmed.trains_policy(i)] == [5, 7, 9]


# ---- references ------------------------------------------------------------------------------------------------------


def test_world_references_are_scenes_in_which_the_record_holds() -> None:
    references, records = WorldReferences(seed=0), train_records()[:6]
    images = references.pick([], records, "learn", 3, 0)
    again = references.pick([], records, "learn", 3, 0)
    others = references.pick([], records, "learn", 3, 1)
    held_out = references.held_out(["a"] * 6, records)[1]
    for i in range(6):
        assert np.array_equal(images[i], again[i])
        assert images[i].shape == (64, 64, 3)
        assert not np.array_equal(images[i], others[i])
        assert not np.array_equal(images[i], held_out[i])
    scene = draw_scene(random_scene(records[0], np.random.default_rng(0)))
    assert images[0].dtype == scene.dtype == np.uint8
    assert np.array_equal(images[0][0, 0], scene[0, 0]), "the world's ground"


def test_held_out_files_are_never_learned_from(tmp_path: Path) -> None:
    for i in range(20):
        Image.new("RGB", (4, 4), (i, i, i)).save(tmp_path / f"{i}.png")
    references = open_references(str(tmp_path), held_out=0.25, seed=0)
    assert isinstance(references, FileReferences)
    assert not references.by_prompt
    seen = {int(references.pick(["any"], [{}], "learn", i)[0][0, 0, 0]) for i in range(400)}
    kept = {int(image[0, 0, 0]) for image in references.held_out(["any"] * 20, [{}] * 20)[1]}
    assert (len(seen), len(kept)) == (15, 5)
    assert seen | kept == set(range(20))
    assert len(references.held_out(["any"] * 3, [{}] * 3)[1]) == 3


def test_files_by_prompt(tmp_path: Path) -> None:
    for i in range(4):
        Image.new("L", (4, 4), i).save(tmp_path / f"{i}.png")
    (tmp_path / "r.json").write_text(json.dumps({"a": ["0.png", "1.png", "2.png"], "b": "3.png"}))
    references = open_references(str(tmp_path / "r.json"), held_out=0.3, seed=0)
    assert references.by_prompt
    assert [int(p[0, 0, 0]) for p in references.pick(["b", "b"], [{}, {}], 0)] == [3, 3]
    learned = {int(references.pick(["a"], [{}], i)[0][0, 0, 0]) for i in range(40)}
    prompts, images = references.held_out(["a", "b"], [{}, {}])
    assert prompts == ["a"]
    assert learned | {int(images[0][0, 0, 0])} == {0, 1, 2}


def test_reference_errors(tmp_path: Path, tiny_clip: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, text in (("bad", "{"), ("list", "[]"), ("form", '{"a": 3}'), ("gone", '{"a": "x.png"}')):
        (tmp_path / f"{name}.json").write_text(text)
    cases = [
        ("empty", r"the folder .* holds no images \(\.png"), ("none", "which is neither"),
        ("bad.json", "not valid JSON"), ("list.json", "lists no references"),
        ("form.json", "must give each prompt a file or a list of files, got 3"),
        ("gone.json", r"lists 1 files that are not there \(first: .*x\.png"),
    ]  # fmt: skip
    for name, message in cases:
        with pytest.raises(ValueError, match=message):
            reward_options("adversarial", {"references": str(tmp_path / name), "backbone": "attributes"})
    (tmp_path / "broken.png").write_bytes(b"no image")
    (tmp_path / "one.json").write_text('{"a": "broken.png"}')
    with pytest.raises(ValueError, match=r"held_out \(0.1\) of the files of a prompt in .* rounds to none"):
        reward_options("adversarial", {"references": str(tmp_path / "one.json"), "backbone": "attributes"})
    references = open_references(str(tmp_path / "one.json"), held_out=0.0, seed=0)
    with pytest.raises(ValueError, match=r"has no reference for the prompt 'b'"):
        references.pick(["b"], [{}])
    with pytest.raises(ValueError, match=r"broken\.png cannot be read as an image"):
        references.pick(["a"], [{}])
    with pytest.raises(ValueError, match=r"the prompt 'image 0' has no 'include' in its metadata"):
        made(**WORLD).learn(inputs_of(random_images(2, 64)))


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps_per_iteration": 0}, "steps_per_iteration must be at least 1, got 0"),
        ({"patches": 0}, "patches must be at least 1, got 0"),
        ({"patches": "some"}, "patches must be an integer or one of all, got 'some'"),
        ({"lr": 0}, "lr must be positive"),
        ({"lr": math.nan}, "lr must be a finite number or null, got nan"),
        ({"betas": [0.5]}, r"betas must be a list of 2 values \(a finite number each\), got \[0.5\]"),
        ({"betas": [0.5, 1]}, r"betas must be two numbers in \[0, 1\), got \(0.5, 1.0\)"),
        ({"held_out": 1.0}, r"held_out must lie in \[0, 1\), got 1"),
        ({"max_accuracy": 0.3}, r"max_accuracy must lie in \[0.5, 1\], got 0.3"),
        ({"model": "x"}, "backbone attributes has no option model, got 'x'"),
        ({"image_size": 64}, "backbone attributes has no option image_size, got 64"),
        ({"class_weight": 0, "patch_weight": 0}, "both 0"),
        ({"published": True}, "published is for backbone dinov2 only, got 'attributes'"),
        ({"update": False, "pretrain_steps": 0}, r"learns in pretrain_steps \(0\) only"),
        ({"update": False, "policy_every": 2}, r"policy_every to 1 \(got 2\)"),
        ({"warmup_iterations": 0}, "warmup_iterations 0 and policy_every 1 reward the first images"),
        ({"backbone": "clip", "patches": 4}, "backbone clip has no option patches, got 4"),
        ({"backbone": "clip", "loss": "hinge"}, "backbone clip is trained on pairs, got loss 'hinge'"),
        ({"backbone": "dinov2", "model": "./none"}, r"there is no folder '\./none'"),
    ],
)
def test_option_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reward_options("adversarial", WORLD | options)


def test_errors_of_models_and_pairs(tiny_dino: Path, tiny_clip: Path, white: Path) -> None:
    with pytest.raises(ValueError, match=r"does not say what its images show: give a \.json file"):
        reward_options("adversarial", {"backbone": "clip", "references": str(white), "held_out": 0.2})
    with pytest.raises(ValueError, match="image_size must be a multiple of the model's patches of 14 pixels, got 30"):
        made(model=str(tiny_dino), references=str(white), image_size=30, held_out=0.2)
