"""The gradients of a run, as its updates see them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl.training.learner import GradientSum


def recorded_gradients(patch: pytest.MonkeyPatch) -> list[Tensor]:
    """The gradient of every optimizer update, as one vector; filled while runs train."""
    seen: list[Tensor] = []
    apply = GradientSum.apply

    def record(self: GradientSum, *arguments: Any) -> Tensor | None:
        seen.append(torch.cat([total.flatten() for total in self.total]))
        return apply(self, *arguments)

    patch.setattr(GradientSum, "apply", record)
    return seen
