"""Products of low dtypes taken in float32: rounded where autocast rounds, and left alone elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowrl.pipelines.arithmetic.wide_products import WideProducts, has_products
from flowrl.pipelines.common import autocast
from flowrl.randomness import counter_normal

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


def test_attention_is_that_of_float32() -> None:
    q, k, v = (counter_normal((2, 4, 6, 8), 5, name).bfloat16().requires_grad_() for name in "qkv")
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    wide = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=mask)
    with torch.autocast("cpu", torch.bfloat16), WideProducts():
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert torch.equal(found, wide.bfloat16())
    weight = counter_normal(wide.shape, 6)
    wanted = torch.autograd.grad((wide * weight.bfloat16()).sum(), [q, k, v])
    given = torch.autograd.grad((found * weight.bfloat16()).sum(), [q, k, v])
    for a, b in zip(given, wanted, strict=True):
        assert torch.equal(a, b)


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


def test_networks_are_run_with_wide_products_where_the_machine_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside torch's own region a network gives the same within bfloat16 rounding, and the same twice."""
    network = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)).requires_grad_(False)
    x, answers = counter_normal((16, 8), 4), {}
    for known in (True, False):
        monkeypatch.setattr("flowrl.pipelines.common.has_products", lambda dtype, known=known: known)
        with autocast(torch.device("cpu"), torch.bfloat16):
            answers[known], again = network(x), network(x)
        assert torch.equal(answers[known], again)
        assert answers[known].dtype == torch.bfloat16
    torch.testing.assert_close(answers[False], answers[True], rtol=2e-2, atol=2e-2)


def test_float32_has_no_region_of_its_own() -> None:
    assert has_products(torch.float32)
    assert isinstance(autocast(torch.device("cpu"), torch.float32), nullcontext)
