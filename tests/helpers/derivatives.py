"""Derivatives of losses, exact and by finite differences."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def gradient(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Of the sum of losses, by the graph."""
    at = at.detach().clone().requires_grad_()
    (result,) = torch.autograd.grad(loss(at).sum(), at)
    return result


def finite_difference(loss: Callable[[Tensor], Tensor], at: Tensor, step: float = 1e-6) -> Tensor:
    """Of the sum of losses, by central differences."""
    result = torch.zeros_like(at)
    for i in range(at.numel()):
        shift = torch.zeros_like(at)
        shift.view(-1)[i] = step
        result.view(-1)[i] = (loss(at + shift).sum() - loss(at - shift).sum()) / (2 * step)
    return result
