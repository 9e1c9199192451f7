"""Products of low dtypes taken in float32: rounded where autocast rounds, and left alone elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from flowrl.pipelines.arithmetic.wide_products import WideProducts, checkpoint_blocks, has_products
from flowrl.pipelines.shared.common import autocast
from flowrl.runtime.randomness import counter_normal

PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "linear": (F.linear, (5, 7), (3, 7)),
    "operator": (lambda a, b: a @ b, (2, 5, 7), (2, 7, 3)),
    "matmul": (lambda a, b: a.matmul(b), (2, 5, 7), (2, 7, 3)),
    "bmm": (torch.bmm, (2, 5, 7), (2, 7, 3)),
    "conv2d": (F.conv2d, (2, 3, 6, 6), (4, 3, 3, 3)),
    "conv3d": (F.conv3d, (2, 3, 4, 6, 6), (4, 3, 2, 3, 3)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_the_rounded_one_of_rounded_operands(name: str, dtype: torch.dtype) -> None:
    product, *shapes = PRODUCTS[name]
    a, b = (counter_normal(shape, 0, name, number) for number, shape in enumerate(shapes))
    with torch.autocast("cpu", dtype), WideProducts():
        found = product(a, b.to(dtype))
    exact = product(a.to(dtype).double(), b.to(dtype).double())
    assert found.dtype == dtype
    # half a unit in the last place of the result, and float32 sums of some dozen terms around it
    torch.testing.assert_close(found.double(), exact, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_what_autocast_leaves_alone_stays_as_it_is(dtype: torch.dtype) -> None:
    a, b = (torch.full(shape, 2**25 + 1, dtype=dtype) for shape in ((1, 1), (1, 1)))  # no float32, and no bfloat16
    with torch.autocast("cpu", torch.bfloat16), WideProducts():
        assert torch.equal(a @ b, torch.full((1, 1), (2**25 + 1) ** 2, dtype=dtype))


def test_products_of_other_devices_stay_with_them() -> None:
    a = torch.empty(2, 3, dtype=torch.bfloat16, device="meta")
    with torch.autocast("cpu", torch.float16), WideProducts():
        assert (a @ a.T).dtype == torch.bfloat16


def test_attention_is_left_to_its_kernel() -> None:
    q, k, v = (counter_normal((2, 4, 6, 8), 5, name).bfloat16() for name in "qkv")
    with torch.autocast("cpu", torch.bfloat16):
        plain = F.scaled_dot_product_attention(q, k, v)
        with WideProducts():
            assert torch.equal(F.scaled_dot_product_attention(q, k, v), plain)


def test_gradients_are_those_of_the_rounded_product() -> None:
    x, weight = (counter_normal(shape, 1).requires_grad_() for shape in ((5, 7), (3, 7)))
    with torch.autocast("cpu", torch.bfloat16), WideProducts():
        F.linear(x, weight).sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert x.grad.dtype == weight.grad.dtype == torch.float32
    rows, columns = weight.detach().bfloat16().double().sum(0), x.detach().bfloat16().double().sum(0)
    torch.testing.assert_close(x.grad.double(), rows.expand(5, 7), rtol=4e-3, atol=1e-5)  # bfloat16's last place
    torch.testing.assert_close(weight.grad.double(), columns.expand(3, 7), rtol=4e-3, atol=1e-5)


def test_out_of_autocast_nothing_changes() -> None:
    a, b = counter_normal((5, 7), 2), counter_normal((3, 7), 3)
    plain = F.linear(a, b)
    with WideProducts():
        assert torch.equal(F.linear(a, b), plain)
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
            assert torch.equal(F.linear(a, b), plain)


class Multiplied(TorchDispatchMode):
    """Dtypes of all matrices that are multiplied within."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default, torch.ops.aten.convolution.default):
            self.dtypes.append(args[-1].dtype if func is torch.ops.aten.mm.default else args[1].dtype)
        return func(*args, **(kwargs or {}))


def test_networks_are_run_with_wide_products_where_the_machine_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward; beside torch's own region a network gives the same within bfloat16 rounding."""
    network = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    x, answers = counter_normal((16, 8), 4), {}
    for known, wanted in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr("flowrl.pipelines.shared.common.has_products", lambda dtype, known=known: known)
        with Multiplied() as multiplied:
            with autocast(torch.device("cpu"), torch.bfloat16):
                answers[known] = network(x)
            answers[known].sum().backward()
        assert multiplied.dtypes == [wanted] * 5  # two forward, three backward: x needs no gradient
        assert answers[known].dtype == torch.bfloat16
    torch.testing.assert_close(answers[False], answers[True], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("known", [True, False])
def test_recomputed_blocks_multiply_as_in_the_forward_pass(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    for place in ("shared.common", "arithmetic.wide_products"):
        monkeypatch.setattr(f"flowrl.pipelines.{place}.has_products", lambda dtype: known)
    network, x, gradients = Blocks(), counter_normal((16, 8), 4), []
    for again in (False, True):
        if again:
            checkpoint_blocks(network, "cpu", torch.bfloat16)
        with autocast(torch.device("cpu"), torch.bfloat16):
            y = network(x)
        with Multiplied() as multiplied:
            gradients.append(torch.autograd.grad(y.square().sum(), list(network.parameters())))
        assert set(multiplied.dtypes) == {torch.bfloat16 if known else torch.float32}
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


class Blocks(ModelMixin):  # type: ignore[misc]
    """Two blocks that can be recomputed."""

    _supports_gradient_checkpointing = True

    def __init__(self) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self._gradient_checkpointing_func(block, x) if self.gradient_checkpointing else block(x)
        return x


def test_float32_has_no_region_of_its_own() -> None:
    assert has_products(torch.float32)
    assert isinstance(autocast(torch.device("cpu"), torch.float32), nullcontext)
