"""Our LoRA layer: the formula in float64, PEFT's own for what it leaves to it, one arithmetic in all modes."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear
from rounding import assert_same_sum
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from flowrl.pipelines.arithmetic.lora_linear import Added, LoraLinear, Merged, add_lora

IN, OUT, RANK, SCALE = 12, 20, 3, 1.7
ARITHMETICS = [torch.float32, torch.bfloat16]


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer_of(dtype: torch.dtype = torch.float32, *, adapters: tuple[str, ...] = ("one",), **options: Any) -> LoraLinear:
    """A layer with seeded weights and LoRAs that act, those in float32."""
    base = nn.Linear(IN, OUT).requires_grad_(False).to(dtype)
    base.weight.copy_(normal(1, OUT, IN))
    network = nn.Sequential(base)
    for place, name in enumerate(adapters):
        config = LoraConfig(r=RANK, lora_alpha=RANK * SCALE, target_modules=["0"], **options)  # type: ignore[arg-type]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config`", UserWarning)  # several are meant
            add_lora(network, config, name)
        layer: Any = network[0]
        layer.lora_A[name].float().weight.data.copy_(normal(2 + place, RANK, IN) / 4)
        layer.lora_B[name].float().weight.data.copy_(normal(12 + place, OUT, RANK) / 4)
    assert isinstance(layer, LoraLinear)
    return layer


def in_dtype(dtype: torch.dtype) -> AbstractContextManager[Any]:
    return nullcontext() if dtype == torch.float32 else torch.autocast("cpu", dtype, cache_enabled=False)


def with_gradients(forward: Callable[[Tensor], Tensor], layer: LoraLinear, x: Tensor, weight: Tensor) -> list[Tensor]:
    """The answer and the gradients of `sum(weight * answer)` for x and both LoRA weights."""
    x = x.clone().requires_grad_()
    leaves = [x, layer.lora_A["one"].weight, layer.lora_B["one"].weight]
    y = forward(x)
    return [y.detach(), *torch.autograd.grad((y * weight).sum(), leaves)]


# ---- the formula -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [Merged, Added])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (2, 7), (2, 3, 4)], ids=str)
def test_forward_and_gradients_are_those_of_the_formula(
    rule: type[torch.autograd.Function], bias: bool, shape: tuple[int, ...]
) -> None:
    w, b = normal(1, OUT, IN), normal(2, OUT) if bias else None
    given = [normal(3, *shape, IN), normal(4, RANK, IN), normal(5, OUT, RANK)]
    weight = normal(6, *shape, OUT)
    x, lora_a, lora_b = (tensor.clone().requires_grad_() for tensor in given)
    wanted = x @ (w + SCALE * lora_b @ lora_a).T + (0 if b is None else b)
    wanted_gradients = torch.autograd.grad((wanted * weight).sum(), [x, lora_a, lora_b])
    x, lora_a, lora_b = (tensor.clone().requires_grad_() for tensor in given)
    y = rule.apply(x, w, b, lora_a, lora_b, SCALE)
    torch.testing.assert_close(y, wanted, rtol=1e-10, atol=1e-10)
    gradients = torch.autograd.grad((y * weight).sum(), [x, lora_a, lora_b])
    for found, want in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rule", [Merged, Added])
@pytest.mark.parametrize("wanted", [0, 1, 2], ids=["x", "lora_A", "lora_B"])
def test_only_gradients_that_are_asked_for_are_made(rule: type[torch.autograd.Function], wanted: int) -> None:
    leaves = [normal(3, 4, IN), normal(4, RANK, IN), normal(5, OUT, RANK)]
    leaves[wanted].requires_grad_()
    rule.apply(leaves[0], normal(1, OUT, IN), None, leaves[1], leaves[2], SCALE).sum().backward()
    assert [leaf.grad is not None for leaf in leaves] == [place == wanted for place in range(3)]


@pytest.mark.parametrize("products", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_a_layer_gives_what_pefts_gives(
    dtype: torch.dtype, tolerance: float, products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPUs with instructions for bfloat16 and without."""
    missing = frozenset[torch.dtype]() if products else frozenset({torch.bfloat16})
    monkeypatch.setattr("flowrl.pipelines.arithmetic.wide_products._MISSING", missing)
    layer, x, weight = layer_of(dtype), normal(7, 2, 9, IN).to(dtype), normal(8, 2, 9, OUT).to(dtype)
    with in_dtype(dtype):
        ours = with_gradients(layer, layer, x, weight)
        pefts = with_gradients(lambda x: Linear.forward(layer, x), layer, x, weight)
    for found, want in zip(ours, pefts, strict=True):
        assert found.dtype == want.dtype
        assert float((found - want).float().norm()) < tolerance * float(want.float().norm())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_a_transposed_input_is_read_as_it_is(dtype: torch.dtype, tolerance: float) -> None:
    layer, x = layer_of(dtype), normal(7, 2, IN, 9).to(dtype).transpose(1, 2)
    with torch.no_grad(), in_dtype(dtype):
        torch.testing.assert_close(layer(x), layer(x.contiguous()), rtol=tolerance, atol=tolerance)


# ---- what is at work -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ARITHMETICS, ids=str)
def test_weights_that_change_in_any_way_are_followed_at_once(dtype: torch.dtype) -> None:
    """The optimizer adds in place, a slot swaps `data`, a checkpoint is copied into it: nothing old is remembered."""
    layer, x = layer_of(dtype), normal(7, 4, IN).to(dtype)
    second = layer.lora_B["one"].weight

    def added() -> Tensor:
        with torch.no_grad(), in_dtype(dtype):
            return (layer(x) - layer.base_layer(x)).double()

    def swap() -> None:
        second.data = 4 * second.data

    def multiply() -> None:
        with torch.no_grad():
            second.mul_(2)

    before = added()
    for factor, change in ((4, swap), (8, multiply), (16, lambda: second.data.copy_(2 * second.data))):
        change()
        # the difference of two rounded sums: a unit in the last place of sums below 64
        torch.testing.assert_close(added(), factor * before, rtol=0, atol=2.0 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("dtype", ARITHMETICS, ids=str)
def test_without_an_adapter_the_layer_is_its_base(dtype: torch.dtype) -> None:
    layer, x = layer_of(dtype), normal(7, 4, IN).to(dtype)
    with torch.no_grad(), in_dtype(dtype):
        base = layer.base_layer(x)
        assert not torch.equal(layer(x), base)
        layer._disable_adapters = True
        assert torch.equal(layer(x), base)
        layer._disable_adapters = False
        layer.lora_B["one"].weight.zero_()
        assert torch.equal(layer(x), base)  # so that a fresh policy's KL is exactly 0


def test_several_active_adapters_add_up() -> None:
    layer, x = layer_of(adapters=("one", "two")), normal(7, 4, IN).float()
    with torch.no_grad():
        base, apart = layer.base_layer(x), list[Tensor]()
        for name in ("one", "two"):
            layer._active_adapter = [name]
            apart.append(layer(x) - base)
        layer._active_adapter = ["one", "two"]
        assert_same_sum(layer(x), base + apart[0] + apart[1])
        layer._active_adapter = ["one", "elsewhere"]
        assert_same_sum(layer(x), base + apart[0])


@pytest.mark.parametrize("options", [{"lora_dropout": 0.5}, {"lora_bias": True}, {"use_dora": True}], ids=str)
def test_uncommon_kinds_are_computed_by_peft(options: dict[str, Any]) -> None:
    layer, x = layer_of(**options), normal(7, 4, IN).float()
    if options.get("lora_bias"):
        nn.init.ones_(layer.lora_B["one"].bias)
    torch.manual_seed(0)
    ours = layer(x)
    torch.manual_seed(0)
    assert torch.equal(ours, Linear.forward(layer, x))
    plain = layer_of()
    assert not torch.allclose(ours, plain(x), atol=1e-3)


def test_a_base_of_another_dtype_is_computed_by_peft() -> None:
    layer, x = layer_of(torch.bfloat16), normal(7, 4, IN).bfloat16()  # no autocast: PEFT adds in float32 and rounds
    assert torch.equal(layer(x), Linear.forward(layer, x))


# ---- one arithmetic, fewer operations --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ARITHMETICS, ids=str)
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_all_modes_and_a_traced_graph_are_equal_bit_for_bit(dtype: torch.dtype) -> None:
    layer, x, weight = layer_of(dtype), normal(7, 2, 9, IN).to(dtype), normal(8, 2, 9, OUT).to(dtype)
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with in_dtype(dtype):
        eager = with_gradients(layer, layer, x, weight)
        with torch.no_grad():
            assert torch.equal(layer(x), eager[0])
            assert torch.equal(compiled(x), eager[0])
        for forward in (lambda x: checkpoint(layer, x, use_reentrant=False), compiled):
            for found, want in zip(with_gradients(forward, layer, x, weight), eager, strict=True):
                assert torch.equal(found, want)


class Counting(TorchDispatchMode):
    """Counts operations that compute something: views and empty tensors launch no kernel."""

    FREE = ("view", "t", "_unsafe_view", "detach", "empty", "new_empty", "expand", "transpose", "alias", "as_strided")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.seen.update([] if name in self.FREE else [name])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("dtype", "wanted"), [(torch.float32, (2, 6)), (torch.bfloat16, (5, 7))], ids=str)
def test_a_layer_takes_fewer_operations_than_pefts(
    dtype: torch.dtype, wanted: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "flowrl.pipelines.arithmetic.lora_linear.has_products", lambda dtype: True
    )  # with or without instructions
    layer, x = layer_of(dtype), normal(7, 2, 9, IN).to(dtype).requires_grad_()
    found = []
    for forward in (layer, lambda x: Linear.forward(layer, x)):
        with Counting() as ahead, in_dtype(dtype):
            y = forward(x)
        with Counting() as back:
            torch.autograd.grad(y, [x, layer.lora_A["one"].weight, layer.lora_B["one"].weight], torch.ones_like(y))
        found.append((ahead.seen.total(), back.seen.total() - 1))
    (ours, ours_back), (pefts, pefts_back) = found
    assert ours < pefts
    assert ours_back < pefts_back
    assert (ours, ours_back) == wanted
