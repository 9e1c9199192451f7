"""Rewards on images: rounding, batch invariance, exact JPEG arithmetic, and GenEval's credits on a fake judge."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from reward_inputs import assert_pointwise, inputs_of, jpeg_length, random_images, select
from torch import Tensor

from flowrl.benchmarks.geneval.rules import Detection
from flowrl.config.rewards import RewardConfig
from flowrl.rewards import (
    RewardInputs,
    build_reward,
    to_uint8,
)
from flowrl.rewards.base.outputs import check_output
from flowrl.rewards.base.specs import CheckedReward
from flowrl.rewards.compose import build_weighted_sum
from flowrl.rewards.geneval import Geneval, Judge
from flowrl.rewards.networks.detectors import DETECTORS, FunctionDetector


def test_to_uint8_rounds_clips_and_puts_channels_last() -> None:
    levels = torch.tensor([0.0, 0.49, 0.51, 1.49, 254.49, 254.51, 255.0, -9.0, 300.0]) / 255.0
    images = to_uint8(levels.view(1, 1, 1, 9).expand(1, 3, 1, 9))
    assert images.dtype == np.uint8
    assert images.shape == (1, 1, 9, 3)
    assert images[0, 0, :, 0].tolist() == [0, 0, 1, 1, 254, 255, 255, 0, 255]


def test_to_uint8_returns_every_8_bit_image_unchanged_and_needs_no_detached_tensor() -> None:
    original = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 5, 7, 3), dtype=np.uint8))
    images = (original.permute(0, 3, 1, 2).float() / 255.0).requires_grad_()
    assert np.array_equal(to_uint8(images), original.numpy())


def test_to_uint8_refuses_broken_pixels() -> None:
    images = random_images()
    images[2, 0, 0, 0] = math.nan
    with pytest.raises(ValueError, match=r"1 of 4 images hold NaN or infinity \(first: item 2\)"):
        to_uint8(images)


def test_inputs_check_their_fields() -> None:
    with pytest.raises(ValueError, match=r"one entry for each of the 4 images, got \{'prompts': 1"):
        inputs_of(random_images(), prompts=["one"])
    with pytest.raises(ValueError, match=r"float32 \[B, 3, H, W\], got torch.float64"):
        inputs_of(random_images().double())
    with pytest.raises(ValueError, match=r"got torch.float32 \[4, 16, 16, 3\]"):
        inputs_of(random_images().permute(0, 2, 3, 1))
    good = inputs_of(random_images())
    with pytest.raises(ValueError, match="sample_ids must be int64"):
        replace(good, sample_ids=good.sample_ids.float())


def test_jpeg_values_are_exact_multiples_of_the_file_length() -> None:
    flat = torch.full((1, 3, 128, 128), 128 / 255)
    gradient = torch.linspace(0, 1, 128).expand(1, 3, 128, 128)
    images = torch.cat([flat, gradient, random_images(1, 128)])
    lengths = [jpeg_length(image) for image in images]
    assert lengths[0] < lengths[1] < lengths[2]
    inputs = inputs_of(images)
    for name, options, factor in [
        ("jpeg_incompressibility", {}, 1 / 1000),
        ("jpeg_compressibility", {}, -1 / 500000),
        ("jpeg_compressibility", {"scale": "flow_grpo"}, -1 / 500000),
        ("jpeg_compressibility", {"scale": "ddpo"}, -1 / 1000),
    ]:
        output = build_reward(name, options=options)(inputs)
        assert output.values.tolist() == pytest.approx([factor * length for length in lengths], rel=1e-6)
        assert output.parts["kilobytes"].tolist() == pytest.approx([length / 1000 for length in lengths], rel=1e-6)


def test_jpeg_is_pointwise_and_its_version_tells_scalings_apart() -> None:
    reward = build_reward("jpeg_compressibility", options={"scale": "ddpo"})
    assert_pointwise(reward, inputs_of(random_images()))
    assert reward.version != build_reward("jpeg_compressibility").version
    assert (reward.kind, reward.differentiable) == ("pointwise", False)


PINK_CAR = {
    "tag": "colors",
    "prompt": "a photo of a pink car",
    "include": [{"class": "car", "count": 1, "color": "pink"}],
}
TWO_CLOCKS = {
    "tag": "counting",
    "prompt": "a photo of two clocks",
    "include": [{"class": "clock", "count": 2}],
    "exclude": [{"class": "clock", "count": 3}],
}
BEAR_DOG = {
    "tag": "position",
    "prompt": "a photo of a dog right of a bear",
    "include": [{"class": "bear", "count": 1}, {"class": "dog", "count": 1, "position": ["right of", 0]}],
}


def seen_in(image: np.ndarray) -> list[Detection]:
    """A scene is written into the first pixel: (cars, clocks, dogs left of the bear)."""
    cars, clocks, dogs = (int(level) for level in image[0, 0])
    box = (0, 0, 40, 40)
    found = [Detection("car", box=box, score=0.99 - 0.01 * i) for i in range(cars)]
    found += [Detection("clock", box=box, score=0.99) for _ in range(clocks)]
    bear = [Detection("bear", box=(100, 0, 140, 40), score=0.9)] if dogs else []
    return found + bear + [Detection("dog", box=box, score=0.8) for _ in range(dogs)]


def fake_judge(calls: list[Detection] | None = None) -> FunctionDetector:
    """Every car is pink where the second pixel is bright, else red; `calls` records what was asked."""

    def color(image: np.ndarray, detection: Detection) -> str:
        if calls is not None:
            calls.append(detection)
        return "pink" if image[0, 1, 0] > 128 else "red"

    return FunctionDetector(find=lambda images: [seen_in(image) for image in images], color=color, version="fake-1")


@dataclass
class Watched:
    """The fake judge, built and shown images by name; it counts both."""

    built: int = 0
    shown: int = 0

    def detector(self) -> FunctionDetector:
        self.built += 1
        judge = fake_judge()

        def find(images: np.ndarray) -> list[list[Detection]]:
            self.shown += len(images)
            return judge.find(images)

        return replace(judge, find=find)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """What becomes of the judge "fake"."""
    watch = Watched()

    @dataclass(frozen=True, kw_only=True)
    class FakeOptions:
        def build(self, device: torch.device) -> FunctionDetector:
            return watch.detector()

    module = ModuleType("judges_for_this_test")
    vars(module)["Fake"] = FakeOptions
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(DETECTORS, "fake", f"{module.__name__}:Fake")
    return watch


def scenes(*cells: tuple[int, int, int, bool]) -> Tensor:
    images = torch.zeros(len(cells), 3, 4, 4)
    for image, (cars, clocks, dogs, pink) in zip(images, cells, strict=True):
        image[:, 0, 0] = torch.tensor([cars, clocks, dogs]) / 255.0
        image[:, 0, 1] = float(pink)
    return images


def geneval_inputs() -> RewardInputs:
    """Expected (graded, strict, official): (1, 1, 1), (.5, 0, 0), (-1, 0, 1), (.5, 0, 0), (.75, 0, 0), (1, 1, 1)."""
    cells = [(1, 0, 0, True), (1, 0, 0, False), (3, 0, 0, True), (0, 1, 0, True), (0, 0, 1, True), (0, 2, 0, True)]
    metadata = [PINK_CAR, PINK_CAR, PINK_CAR, TWO_CLOCKS, BEAR_DOG, TWO_CLOCKS]
    return inputs_of(scenes(*cells), [str(m["prompt"]) for m in metadata], metadata)


GRADED = [1.0, 0.5, -0.5, 0.5, 0.75, 1.0]  # three cars for one: (1 - 2) and a 0 for the colour, so -1/2
STRICT = [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
OFFICIAL = [1.0, 0.0, 1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(("credit", "values"), [("graded", GRADED), ("strict", STRICT), ("official", OFFICIAL)])
def test_geneval_credits(credit: Any, values: list[float]) -> None:
    output = Geneval(credit=credit).on(Judge(fake_judge()))(geneval_inputs())
    assert output.values.tolist() == values
    assert {key: part.tolist() for key, part in output.parts.items()} == {
        "graded": GRADED,
        "strict": STRICT,
        "official": OFFICIAL,
    }
    assert bool(output.valid.all())


def test_geneval_clip_and_quirk() -> None:
    output = Geneval(clip_min=0.0, reference_position_quirk=False).on(Judge(fake_judge()))(geneval_inputs())
    assert output.values.tolist() == pytest.approx([1.0, 0.5, 0.0, 0.5, 2 / 3, 1.0])
    assert output.parts["graded"][2] == -0.5


def test_geneval_is_pointwise_and_asks_for_each_color_once() -> None:
    calls: list[Detection] = []
    reward = Geneval().on(Judge(fake_judge(calls)))
    assert_pointwise(reward, geneval_inputs())
    calls.clear()
    reward(select(geneval_inputs(), [0, 1]))
    assert len(calls) == 2


@pytest.mark.usefixtures("watched")
def test_geneval_builds_its_judge_by_name() -> None:
    reward = build_reward("geneval", options={"judge": "fake", "credit": "strict", "clip_min": None})
    assert reward(geneval_inputs()).values.tolist() == STRICT
    assert "fake-1" in reward.version
    assert "strict" in reward.version


def test_geneval_entries_of_a_run_show_each_image_to_one_judge_once(watched: Watched) -> None:
    """Graded and official credit are two entries; so are the two readings of a wrong relation, on the same detector."""
    entries = [
        {"name": "geneval", "options": {"judge": "fake", "credit": "graded"}},
        {"name": "geneval", "options": {"judge": "fake", "credit": "official"}},
    ]
    clean = {"name": "geneval", "options": {"judge": "fake", "reference_position_quirk": False}}
    total, inputs = build_weighted_sum(entries), geneval_inputs()
    assert watched.built == 1
    for seen in (6, 12):  # other inputs are looked at, also with the same images in them
        parts = total(replace(inputs)).parts
        assert parts["reward/geneval"].tolist() == GRADED
        assert parts["reward/geneval_2"].tolist() == OFFICIAL
        assert watched.shown == seen
    inputs.images.copy_(inputs.images.flip(0))  # a buffer that is written to again
    assert total(replace(inputs)).parts["reward/geneval"].tolist() != GRADED
    both = build_weighted_sum([*entries, clean])
    assert watched.built == 2
    parts = both(geneval_inputs()).parts
    assert parts["reward/geneval"].tolist() == GRADED
    assert parts["reward/geneval_3"].tolist() == pytest.approx([1.0, 0.5, -0.5, 0.5, 2 / 3, 1.0])


def test_a_judge_holds_no_images() -> None:
    inputs = geneval_inputs()
    images, reward = ref(inputs.images), Geneval().on(Judge(fake_judge()))
    reward(inputs)
    del inputs
    assert images() is None


def test_geneval_items_without_a_readable_record_are_invalid_and_leave_the_others_alone() -> None:
    """No record, a tag that does not exist, a count that is none: the judge is not asked about them."""
    inputs = geneval_inputs()
    records = list(inputs.metadata)
    records[0] = {}
    records[2] = {"tag": "cats", "include": PINK_CAR["include"]}
    records[4] = {"tag": "counting", "include": [{"class": "dog", "count": "two"}]}
    inputs = inputs_of(inputs.images, inputs.prompts, records)
    output = check_output(Geneval(clip_min=0.0).on(Judge(fake_judge()))(inputs), 6, "geneval")
    assert output.valid.tolist() == [False, True, False, True, False, True]
    assert output.values[output.valid].tolist() == [0.5, 0.5, 1.0]
    assert output.errors == {"missing_field": 3}
    assert output.parts["official"].isnan().tolist() == (~output.valid).tolist()
    nothing = Geneval().on(Judge(fake_judge()))(inputs_of(random_images(2)))
    assert bool(nothing.values.isnan().all())
    assert nothing.errors == {"missing_field": 2}


def test_entries_of_one_class_share_a_part_and_those_of_others_do_not() -> None:
    """Whatever they answer: what one class calls "weights" is nothing that another one could stand on."""

    class One:
        shared = "weights"

        def build(self, device: torch.device) -> Any:
            raise AssertionError("it stands on a part")

        def load(self, device: torch.device) -> list[type]:
            return [type(self)]

        def on(self, part: Any) -> Any:
            return part

    class Other(One):
        pass

    parts: dict[Any, Any] = {}
    entry, device = RewardConfig(name="unused"), torch.device("cpu")
    made: list[Any] = [
        CheckedReward(entry=entry, options=options).build(device, parts) for options in (One(), Other(), One())
    ]
    assert made == [[One], [Other], [One]]
    assert made[0] is made[2]
