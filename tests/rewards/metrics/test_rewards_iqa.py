"""pyiqa as rewards: its own numbers where it is installed; signs, references and failures on a stand-in."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_clip import assert_pointwise, inputs_of, random_images
from torch import Tensor

from flowrl.rewards import build_reward, reward_options, to_uint8

real = pytest.mark.skipif("pyiqa" not in sys.modules and importlib.util.find_spec("pyiqa") is None, reason="no pyiqa")


class Metric(torch.nn.Module):
    """A metric of the stand-in; a rule of one image, or of two."""

    def __init__(self, rule: Callable[..., Tensor], lower_better: bool) -> None:
        super().__init__()
        self.rule, self.lower_better = rule, lower_better

    def forward(self, *images: Tensor) -> Tensor:
        return self.rule(*images)


METRICS: dict[str, tuple[str, bool, Callable[..., Tensor]]] = {
    "light": ("NR", False, lambda x: x.mean((1, 2, 3))[:, None]),
    "dark": ("NR", True, lambda x: x.mean((1, 2, 3))),
    "crop": ("NR", False, lambda x: x.mean((1, 2, 3)) + torch.rand(()) + np.random.rand()),
    "l1": ("FR", True, lambda x, y: (x - y).abs().mean((1, 2, 3))),
    "fid": ("NR", True, lambda x: x),
}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A package of five metrics under pyiqa's name; returns what `create_metric` was given."""
    made: list[dict[str, Any]] = []

    def create(name: str, **given: Any) -> Metric:
        made.append(given)
        if "broken" in given:
            raise OSError("no such weights")
        return Metric(METRICS[name][2], METRICS[name][1])

    package = ModuleType("pyiqa")
    package.__spec__ = SimpleNamespace(name="pyiqa")  # type: ignore[assignment]
    package.create_metric = create  # type: ignore[attr-defined]
    package.list_models = lambda mode=None: [k for k, v in METRICS.items() if mode in (None, v[0])]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyiqa", package)
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0" if name == "pyiqa" else version(name))
    return made


@pytest.mark.usefixtures("stand_in")
def test_lower_is_better_is_negated_and_logged_as_printed() -> None:
    images = random_images(3, 8)
    pixels = torch.from_numpy(to_uint8(images)).float() / 255
    light = build_reward("pyiqa", options={"metric": "light"})(inputs_of(images))
    dark = build_reward("pyiqa", options={"metric": "dark"})(inputs_of(images))
    torch.testing.assert_close(light.values, pixels.mean((1, 2, 3)))
    torch.testing.assert_close(dark.values, -light.values)
    torch.testing.assert_close(dark.parts["metric"], light.values)
    assert ":negated:" in build_reward("pyiqa", options={"metric": "dark"}).version
    for size in (1, 2):
        assert_pointwise(build_reward("pyiqa", options={"metric": "dark", "batch_size": size}), inputs_of(images))


@pytest.mark.usefixtures("stand_in")
def test_the_version_knows_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def version() -> str:
        return build_reward("pyiqa", options={"metric": "light"}).version

    bare = version()
    create, seen = sys.modules["pyiqa"].create_metric, []
    for weight in (1.0, 2.0):

        def weighted(name: str, weight: float = weight, **given: Any) -> Metric:
            made: Metric = create(name, **given)
            made.register_parameter("weight", torch.nn.Parameter(torch.tensor([weight])))
            return made

        monkeypatch.setattr(sys.modules["pyiqa"], "create_metric", weighted)
        seen.append(version())
    assert len({bare, *seen}) == 3


def test_gradient_only_with_float_pixels(stand_in: list[dict[str, Any]]) -> None:
    images = random_images(2, 8).requires_grad_()
    for pixels, carries in (("8bit", False), ("float", True)):
        reward = build_reward("pyiqa", options={"metric": "dark", "pixels": pixels, "options": {"a": 1}})
        assert reward.differentiable is carries
        assert reward(inputs_of(images)).values.requires_grad is carries
    assert stand_in[-1] == {"as_loss": True, "loss_reduction": "none", "device": torch.device("cpu"), "a": 1}
    reward(inputs_of(images)).values.sum().backward()
    torch.testing.assert_close(images.grad, torch.full_like(images, -1 / 192))


@pytest.mark.usefixtures("stand_in")
def test_crops_are_the_same_at_every_call_and_leave_the_generators_alone() -> None:
    reward = build_reward("pyiqa", options={"metric": "crop"})
    torch.manual_seed(3)
    wanted = torch.rand(())
    torch.manual_seed(3)
    first = reward(inputs_of(random_images(3, 8))).values
    assert torch.equal(torch.rand(()), wanted)
    assert torch.equal(reward(inputs_of(random_images(3, 8))).values, first)
    assert_pointwise(reward, inputs_of(random_images(3, 8)))


@pytest.mark.usefixtures("stand_in")
def test_best_of_references_and_items_that_fail() -> None:
    images = torch.stack([torch.full((3, 8, 8), level) for level in (0.0, 0.2, 0.4, 0.6)])
    near, far, small = torch.full((3, 8, 8), 0.6), torch.zeros(3, 8, 8), torch.zeros(3, 4, 8)
    references = [[near, far], [near], [], [near, small]]
    reward = build_reward("pyiqa", options={"metric": "l1"})
    assert reward.needs == {"images", "reference_images"}
    output = reward(inputs_of(images, reference_images=references))
    torch.testing.assert_close(output.values[:2], torch.tensor([0.0, -0.4]))
    assert output.valid.tolist() == [True, True, False, False]
    assert output.values[2:].isnan().all()
    assert output.errors == {"missing_reference": 1, "other_size": 1}
    with pytest.raises(ValueError, match="needs reference_images"):
        reward(inputs_of(images))
    edits = build_reward("pyiqa", options={"metric": "l1", "against": "sources"})
    assert edits.needs == {"images", "source_images"}
    assert edits(inputs_of(images[1:3], source_images=[[far], [near]])).values.tolist() == pytest.approx([-0.2, -0.2])


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metric": "ligth"}, "did you mean 'light'"),
        ({"metric": "fid"}, "judges a set of images"),
        ({"metric": "light", "against": "sources"}, "one image alone"),
        ({"metric": "light", "batch_size": 0}, "batch_size"),
        ({}, "metric"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        reward_options("pyiqa", options)


@pytest.mark.usefixtures("stand_in")
def test_a_metric_that_cannot_be_made_is_told_in_words() -> None:
    with pytest.raises(ValueError, match="no such weights If its weights cannot be fetched"):
        build_reward("pyiqa", options={"metric": "light", "options": {"broken": 1}})


def test_without_the_package_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install pyiqa"):
        reward_options("pyiqa", {"metric": "musiq"})


@real
@pytest.mark.parametrize("metric", ["psnr", "ssim", "gmsd", "piqe", "cnniqa", "musiq"])
@pytest.mark.filterwarnings("ignore")
def test_values_are_those_of_the_package(metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against its own call on the 8-bit images one by one; networks with random weights, as nothing is downloaded."""
    pyiqa: Any = importlib.import_module("pyiqa")
    settings: dict[str, dict[str, Any]] = {"cnniqa": {"pretrained": None}, "musiq": {"pretrained": False}}
    given = settings.get(metric, {})
    images, others = random_images(3, 96), random_images(3, 96, seed=1)
    torch.manual_seed(0)
    reward = build_reward("pyiqa", options={"metric": metric, "options": given})
    torch.manual_seed(0)
    own = pyiqa.create_metric(metric, device="cpu", **given)
    files = [torch.from_numpy(to_uint8(batch)).permute(0, 3, 1, 2).float() / 255 for batch in (images, others)]
    pair = own.metric_mode == "FR"
    wanted = [float(own(x[None], y[None]) if pair else own(x[None])) for x, y in zip(*files, strict=True)]
    output = reward(inputs_of(images, reference_images=[[other] for other in others]))
    np.testing.assert_allclose(output.parts["metric"], wanted, rtol=1e-6)
    np.testing.assert_allclose(output.values, np.array(wanted) * (-1 if own.lower_better else 1), rtol=1e-6)
