"""The rollout's own evaluations with their graphs, for an update that need not evaluate the network again.

Before the first update of an iteration the policy is the one that sampled, so that replaying a stored state gives the
number that the rollout had, and a graph. Where memory holds the graphs of all of them, the rollout keeps its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowrl.samplers import Velocity
from flowrl.trajectory import Rows, Schedule


class KeptGraphs:
    """Velocities of trained steps, by step and by the first sample of the batch that they were given for."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], Tensor] = {}

    def recording(self, velocity: Velocity, first: int, schedule: Schedule, steps: Sequence[int]) -> Velocity:
        """A velocity that gives the same numbers without a graph, and keeps those of some steps with theirs.

        Args:
            velocity: of a batch.
            first: sample of it, counted over this process's images of the iteration.
            schedule: of the rollout.
            steps: to keep.
        """
        step_at = {float(schedule.timestep[step]): step for step in steps}

        def recorded(x: Tensor, sigma: Tensor, timestep: Tensor) -> Tensor:
            step = step_at.get(float(timestep))
            if step is None:
                return velocity(x, sigma, timestep)
            with torch.enable_grad():
                kept = self._kept[step, first] = velocity(x, sigma, timestep)
            return kept.detach()

        return recorded

    def take(self, rows: Rows) -> Tensor:
        """The velocities `[b, *latent]` of a micro-batch, rows of one step and of a whole batch of the rollout; its
        graph is given away with them."""
        kept = self._kept.pop((int(rows.step[0]), int(rows.sample[0])))
        assert len(kept) == len(rows)
        return kept

    def clear(self) -> None:
        """Frees what nobody has taken: of micro-batches without a row that is trained."""
        self._kept.clear()
