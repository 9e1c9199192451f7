"""How far two right computations may lie apart: in units of a dtype's rounding, by the depth of their sums."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

DEVIATIONS = 6.0
"""Standard deviations that are allowed: 2 n exp(-18) is 0.003 for the deepest sums here, n = 100,000."""


def rounding(dtype: torch.dtype, depth: int, scale: float = 1.0) -> float:
    """The largest difference that another order of adding may make: `6 * eps * sqrt(depth) * scale`.

    `depth` counts the roundings on the longest way from what is given to the result: the terms of its sums, added up
    over the layers that follow each other. `scale` is the size of the terms: of the result where its terms do not
    cancel, larger where they do. Rounding errors behave as independent ones, so that n of them grow like the root of n
    (Higham and Mary 2019, theorem 3.1, with `u = eps / 2` for each of two computations); the worst case, `depth * eps`,
    is never met in deep sums.

    Another processor, another number of threads, another batch: each adds in another order.
    """
    return DEVIATIONS * torch.finfo(dtype).eps * depth**0.5 * scale


def assert_same_sum(actual: Tensor, expected: Tensor, *, depth: int, scale: float | None = None) -> None:
    """Fails where two tensors differ by more than `rounding` allows; `scale` is the largest entry where none is given.

    The dtype is the one of `actual`: what rounded, not what it is compared with.
    """
    size = float(expected.abs().max()) if scale is None else scale
    allowed = rounding(actual.dtype, depth, size)
    torch.testing.assert_close(actual, expected, rtol=0, atol=allowed, check_dtype=False)


def depth_of(widths: Iterable[int]) -> int:
    """The depth of layers that follow each other, by the terms that each adds up."""
    return sum(widths)
