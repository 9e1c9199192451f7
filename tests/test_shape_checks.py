"""The shape checks of conftest.py really check."""

from __future__ import annotations

from collections import UserList
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import jaxtyping
import pytest
import shape_checks
import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.samplers import KERNELS


def test_wrong_shapes_in_the_pure_layer_are_caught() -> None:
    x = torch.zeros(2, 3)
    assert KERNELS["ode"](x, x, 0.5, 0).mean.shape == x.shape  # an int passes for a float
    with pytest.raises(jaxtyping.TypeCheckError, match="velocity"):
        KERNELS["ode"](x, x[:1], 0.5, 0.4)


Checked = TypeVar("Checked", bound=Callable[..., Any])


def checked(about: Checked) -> Checked:
    made: Checked = shape_checks.jaxtyped(typechecker=shape_checks.check)(about)
    return made


@checked
def joined(
    x: Float[Tensor, " b n"], parts: Sequence[Float[Tensor, " b"]], *, kind: Literal["sum", "short"] = "sum"
) -> Float[Tensor, " b n"]:
    return sum((part[:, None] for part in parts), start=x)[: 1 if kind == "short" else None]


@checked
@dataclass(frozen=True)
class Pair:
    x: Float[Tensor, " b"]
    y: Float[Tensor, " b"]


def inner(size: int) -> Callable[[Any], Any]:
    @checked
    def made(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        return x[:size]

    return made


@checked
def first(parts: Sequence[Float[Tensor, " b"]]) -> None:
    """Of which the checker looks at one, by chance."""


x, part = torch.zeros(2, 3), torch.zeros(2)
WRONG: dict[str, Callable[[], Any]] = {
    "shape": lambda: joined(x, [torch.zeros(3)]),
    "dtype": lambda: joined(x.long(), [part]),
    "parts of a list": lambda: joined(x, [torch.zeros(4), torch.zeros(4)]),
    "part of what is looked through by the checker alone": lambda: joined(x, UserList([torch.zeros(3)])),
    "word": lambda: joined(x, [part], kind="product"),  # type: ignore[arg-type]
    "result": lambda: joined(x, [part], kind="short"),
    "result of another one of the same code": lambda: inner(1)(part),
    "field": lambda: Pair(part, torch.zeros(3)),
    "type": lambda: joined([[0.0]], [part]),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("wrong", WRONG)
def test_after_calls_that_passed_one_that_differs_is_checked(wrong: str) -> None:
    for _ in range(2):
        assert joined(x, [part]).shape == joined(x, UserList([part])).shape == x.shape
        assert inner(2)(part).shape == part.shape
        Pair(part, part)
        with pytest.raises(jaxtyping.TypeCheckError):
            WRONG[wrong]()


def test_a_call_like_one_that_passed_costs_no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    joined(x, [part])
    monkeypatch.setattr(shape_checks, "_checker", None)
    joined(x + 1, [part])


def test_parts_that_differ_are_looked_at_again() -> None:
    with pytest.raises(jaxtyping.TypeCheckError):
        _ = [first([part, part.long()]) for _ in range(64)]  # type: ignore[func-returns-value]


def test_functions_of_equal_code_are_checked_apart() -> None:
    made = dict[str, Any]()
    for kind in ("int", "str"):
        names: dict[str, Any] = {"__name__": f"module_of_{kind}"}
        exec(f"def same(x: {kind}) -> None: pass", names)
        made[kind] = checked(names["same"])
    made["int"](1)
    with pytest.raises(jaxtyping.TypeCheckError):
        made["str"](1)
