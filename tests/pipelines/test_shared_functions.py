"""Functions that families share, against closed forms."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl.pipelines.families import wan
from flowrl.pipelines.shared import common
from flowrl.pipelines.weights import lora_names
from flowrl.trajectory import Conditioning


def test_an_image_is_cut_evenly_on_all_sides() -> None:
    """What is cut off is the same for an image, for its mirror image and for the image on its side."""
    image = torch.rand(3, 64, 24, generator=torch.Generator().manual_seed(3))
    cut = common.covering(image, 32, 24)
    torch.testing.assert_close(cut, image[:, 16:48], atol=1e-6, rtol=0)
    torch.testing.assert_close(common.covering(image.flip(1), 32, 24), cut.flip(1), atol=1e-6, rtol=0)
    torch.testing.assert_close(common.covering(image.mT, 24, 32), cut.mT, atol=1e-6, rtol=0)


def test_rows_of_several_kinds_stay_where_they_are() -> None:
    def call(x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        asked.append(len(x))
        return x + timestep[:, None] + cond.tensors["row"][:, None]

    asked: list[int] = []
    cond, x = Conditioning({"row": torch.arange(4.0)}), torch.arange(8.0).view(4, 2)
    found = common.predict_by_kind(SimpleNamespace(call=call), x, torch.tensor(10.0), cond, ["a", "b", "c", "a"])
    assert torch.equal(found, x + 10 + torch.arange(4.0)[:, None])
    assert asked == [2, 1, 1]


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0, 3.0])
def test_two_passes_mix_at_every_scale(scale: float) -> None:
    """`v = negative + scale (positive - negative)`, below 1 too; the positive alone at 1."""

    def network(x: Tensor, timestep: Tensor, cond: Conditioning) -> Tensor:
        asked.append(len(x))
        return x * cond.tensors["by"][:, None]

    asked: list[int] = []
    positive, negative = (Conditioning({"by": torch.full((2,), value)}) for value in (3.0, -1.0))
    velocity = common.two_pass_guidance(common.Guidance(network, positive, negative, scale))
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    found = velocity(x, torch.full((2,), 500.0), torch.full((2,), 0.5))
    torch.testing.assert_close(found, x * (-1 + scale * 4))
    assert sum(asked) == (2 if scale == 1 else 4)


@pytest.mark.parametrize(
    ("index", "time"), [({}, 0.0), ({"boundary_ratio": None}, 0.0), ({"boundary_ratio": 0.9}, 900)]
)
def test_the_first_expert_of_wan_reaches_down_to_the_boundary(index: dict[str, Any], time: float) -> None:
    config = SimpleNamespace(num_train_timesteps=1000)
    p: Any = SimpleNamespace(
        card=SimpleNamespace(index=index), pipe=SimpleNamespace(scheduler=SimpleNamespace(config=config))
    )
    assert wan.boundary(p) == time


def test_layers_of_a_lora_with_another_scale_hold_the_difference() -> None:
    """The product of scale, B and A of each layer is that of the file, whichever scale most layers share."""
    drawn, tensors = torch.Generator().manual_seed(5), dict[str, Tensor]()
    alphas = {"blocks.0.to_q": 4.0, "blocks.1.to_q": 4.0, "blocks.2.to_q": 6.0}
    for stem, alpha in alphas.items():
        tensors |= {
            f"{stem}.lora_down.weight": torch.randn(2, 3, generator=drawn),
            f"{stem}.lora_up.weight": torch.randn(5, 2, generator=drawn),
            f"{stem}.alpha": torch.tensor(alpha),
        }
    scale, even = lora_names._even(tensors)
    assert scale == 2
    for stem, alpha in alphas.items():
        up, down = f"{stem}.lora_up.weight", f"{stem}.lora_down.weight"
        torch.testing.assert_close(scale * even[up] @ even[down], alpha / 2 * tensors[up] @ tensors[down])
        assert even[f"{stem}.alpha"] == 2
