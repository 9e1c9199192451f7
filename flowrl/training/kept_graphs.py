"""The rollout's own evaluations with their graphs, for an update that need not evaluate the network again.

Before the first update of an iteration the policy is the one that sampled, so that replaying a stored state gives the
number that the rollout had, and a graph. Where memory holds the graphs of all of them, the rollout keeps its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowrl.samplers import Velocity
from flowrl.training.learner import NetworkCounter
from flowrl.trajectory import Rows, Schedule


class KeptGraphs:
    """Velocities of trained steps, by step and by the first sample of the batch that they were given for."""

    def __init__(self, network: NetworkCounter) -> None:
        """`network` counts a graph as walked back when it is taken: not all are."""
        self._network = network
        self._kept: dict[tuple[int, int], tuple[Tensor, int]] = {}

    def recording(self, velocity: Velocity, first: int, schedule: Schedule, steps: Sequence[int]) -> Velocity:
        """A velocity that gives the same numbers without a graph, and keeps those of some steps with theirs.

        Args:
            velocity: of a batch.
            first: sample of it, counted over this process's images of the iteration.
            schedule: of the rollout.
            steps: to keep.
        """
        step_at = {float(schedule.sigma[step]): step for step in steps}

        def recorded(x: Tensor, sigma: Tensor, timestep: Tensor) -> Tensor:
            step = step_at.get(float(sigma))
            if step is None:
                return velocity(x, sigma, timestep)
            with torch.enable_grad(), self._network.keeping() as graphs:
                kept = velocity(x, sigma, timestep)
            self._kept[step, first] = kept, sum(graphs)
            return kept.detach()

        return recorded

    def take(self, rows: Rows) -> Tensor:
        """The velocities `[b, *latent]` of a micro-batch, rows of one step and of a whole batch of the rollout; its
        graph is given away with them."""
        kept, graphs = self._kept.pop((int(rows.step[0]), int(rows.sample[0])))
        assert len(kept) == len(rows)
        self._network.count_backward(graphs)
        return kept

    def clear(self) -> None:
        """Frees what nobody has taken: of micro-batches without a row that is trained."""
        self._kept.clear()
