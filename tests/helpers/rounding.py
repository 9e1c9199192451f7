"""How far two right computations may lie apart: in units of a dtype's rounding, by the depth of their sums."""

from __future__ import annotations

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


DRAWN = 4_000
"""Roundings on the way through a tiny network of a test, drawn with a few steps, with its encoders: some four steps of
two blocks, each eight products of 16 to 128 terms."""


def assert_same_sum(
    actual: Tensor, expected: Tensor, *, depth: int = DRAWN, dtype: torch.dtype = torch.float32
) -> None:
    """Fails where two tensors differ by more than `rounding` allows at the size of the largest entry.

    `dtype` is what the computation rounded to, which tensors that are summed or stored in more bits do not tell.
    """
    allowed = rounding(dtype, depth, float(expected.detach().abs().max()))
    torch.testing.assert_close(actual, expected, rtol=0, atol=allowed)
