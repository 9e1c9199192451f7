"""What a credit method may need of a run besides its transitions and rewards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.runtime.shapes import Float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Context:
    """The run around a table of transitions; the defaults are those of one process with small latents."""

    step_std: Float[Tensor, " T"] | None = None
    """[T] standard deviation of the kernel at each step."""
    per_dim: int = 1
    """Divisor of log-densities before a softmax, the number of latent elements: summed over a real latent, they differ
    by hundreds and the softmax would pick one child."""
    gather: Callable[[Tensor], Tensor] = torch.clone
    """Joins the rows of all processes, in rank order, as many of each."""
    rank: int = 0
    """Rank of this process."""
    iteration: int = 0
    """Iteration, counted from 0."""

    def __post_init__(self) -> None:
        if self.per_dim < 1:
            raise ValueError(f"per_dim divides log-densities, 1 or the number of latent elements, got {self.per_dim}")


ALONE = Context()
"""One process, with an unknown kernel."""
