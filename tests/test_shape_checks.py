"""The shape checks of conftest.py really check."""

from __future__ import annotations

import jaxtyping
import pytest
import torch

from flowrl.samplers import KERNELS


def test_wrong_shapes_in_the_pure_layer_are_caught() -> None:
    x = torch.zeros(2, 3)
    assert KERNELS["ode"](x, x, 0.5, 0).mean.shape == x.shape  # an int passes for a float
    with pytest.raises(jaxtyping.TypeCheckError, match="velocity"):
        KERNELS["ode"](x, x[:1], 0.5, 0.4)
