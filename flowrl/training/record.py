"""A recorded rollout: its transitions, and what it takes to score them again under other weights.

Letters: M transitions, b rows of a micro-batch that share a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flowrl.advantages.routing import regions_of
from flowrl.objectives.policy_gradient import Scored, kernel_sensitivity, sequence_coefficients, sequence_cut
from flowrl.objectives.terms import truncated_weight
from flowrl.runtime.placement import sent, taken
from flowrl.samplers import Kernel, Transition
from flowrl.samplers.guidance import uncounted
from flowrl.samplers.path_memory import PathMemory
from flowrl.training.draws import AskedPrompts
from flowrl.training.kept_graphs import KeptGradients, KeptGraphs, dims_of
from flowrl.training.loop import Loop
from flowrl.training.processes.mesh import in_step
from flowrl.trajectory import Rows, Sampled, Schedule


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """An iteration's samples, on the host; rows go to the device when they are scored."""

    loop: Loop
    asked: AskedPrompts
    """Prompts of the groups."""
    sampled: Sampled
    """The transitions, with the rollout's means if an objective needs them."""
    kernel: Kernel
    """They were drawn with."""
    schedule: Schedule
    graphs: KeptGraphs | KeptGradients | None = None
    """Of the rollout's own evaluations, or their gradients, where it kept them."""

    @property
    def dims(self) -> int:
        """What log-ratios and the KL are divided by."""
        return dims_of(self.loop.config, self.sampled.states[0])

    def levels(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Noise levels before and after the step that rows share."""
        step = int(rows.step[0])
        return self.schedule.sigma[step], self.schedule.sigma[step + 1]

    def latents(self, index: Tensor) -> Tensor:
        """Latents of the pool by their numbers, on the device."""
        return taken(self.sampled.states, index, self.loop.device)

    def replay(self, rows: Rows) -> Transition:
        """The transition that the network's weights give at the stored states of rows that share a step. Siblings share
        their source, so one network call serves all of them."""
        sources, place = rows.source.unique(sorted=True, return_inverse=True)
        first = torch.stack([torch.nonzero(place == number)[0, 0] for number in range(len(sources))])
        (sigma, sigma_next), x = self.levels(rows), self.latents(sources)
        velocity = self.loop.velocity(self.asked.cond_of(rows.group[first]))
        if (kept := self.sampled.memory) is not None:
            velocity = PathMemory(self.schedule, taken(kept, sources, self.loop.device)).along(velocity)
        predicted = velocity(x, sigma, self.schedule.timestep[int(rows.step[0])])
        return self.kernel(taken(x, place), taken(predicted, place), sigma, sigma_next)

    def transition(self, rows: Rows) -> Transition:
        """The transition under the policy, kept by the rollout or replayed: with its graph, but of `KeptGradients`."""
        return self.replay(rows) if self.graphs is None else self._kept(rows, self.graphs.take(rows))

    def _kept(self, rows: Rows, velocity: Tensor) -> Transition:
        return self.kernel(self.latents(rows.source), sent(velocity, self.loop.device), *self.levels(rows))

    def in_step(self, rows: Rows, blocks: Sequence[Tensor]) -> Iterator[tuple[Tensor, bool]]:
        """Blocks of row indexes, each of one step, with True; between them idle ones with False, see `in_step`."""

        def idle(step: int) -> Tensor:
            return torch.nonzero(rows.step == step)[0]

        return in_step(self.loop.shards, blocks, idle, key=lambda index: int(rows.step[index[0]]))

    def rescore(self, rows: Rows, blocks: list[Tensor], *, mean: Tensor | None = None) -> Tensor:
        """Log-densities `[M]` of the stored transitions under the current weights, and into `mean` [M, *latent] theirs;
        outside the blocks both stay as they were."""
        log_prob, order, found = rows.old_log_prob.clone(), list[Tensor](), list[Tensor]()
        network = self.loop.network
        for index, live in self.in_step(rows, blocks):
            # With a graph, as in the update: without one other kernels may answer.
            with network.counting("update"), uncounted(not live), torch.enable_grad(), network.keeping():
                transition = self.replay(rows[index])
            if live:
                order.append(index)
                found.append(self.kernel.log_prob(self.latents(rows.produced[index]), transition).detach())
                if mean is not None:
                    mean[index] = transition.mean.detach().cpu()
            del transition  # with its graph, beside which there may be no room for the next one's
        if order:
            log_prob[torch.cat(order)] = torch.cat(found).to(log_prob)
        return log_prob

    def with_old_of_updates(self, rows: Rows, blocks: list[list[Tensor]]) -> Rows:
        """The table with old log-densities and means as the micro-batches of the coming updates compute them. Networks
        answer a little differently at another batch size; the ratio must not see that."""
        old = self.rescore(rows, [block for part in blocks for block in part], mean=self.sampled.mean)
        return Rows(**{**rows.columns(), "old_log_prob": old})

    def scored_rows(self, rows: Rows, index: Tensor, new: Transition) -> Scored:
        """A micro-batch, rows `index` of the table, as objectives take it."""
        now, after = self.levels(rows)
        produced, mean = self.latents(rows.produced), self.sampled.mean
        columns = (rows.old_log_prob, rows.advantage, rows.clip_low, rows.clip_high)
        old_log_prob, advantage, low, high = (sent(column, produced.device) for column in columns)
        return Scored(
            log_ratio=(self.kernel.log_prob(produced, new) - old_log_prob) / self.dims,
            advantage=advantage,
            clip_low=low,
            clip_high=high,
            new=new,
            old_mean=None if mean is None else taken(mean, index, produced.device),
            produced=produced,
            step_size=float(now - after),
            sensitivity=kernel_sensitivity(self.kernel, now, after),
        )

    def stale_weight(self, rows: Rows, index: Tensor, scored: Scored, *, anchored: bool) -> Tensor | None:
        """[b] weight of a micro-batch's losses if older weights mu drew it; None if the run weighs none.

        `min(cap, pi / mu)`, with pi the policy before the iteration's update, which the ratio of the objective stays
        anchored at: the decoupled objective of Hilton, Cobbe and Schulman (arXiv 2110.00641) with a truncated weight.
        `anchored` says that `scored` compares pi with mu; later its old policy is pi.
        """
        if not (cap := self.loop.config.workers.weight_cap):
            return None
        moved = (rows.old_log_prob - self.sampled.log_prob[index]) / self.dims
        return truncated_weight(scored.log_ratio.detach() if anchored else sent(moved, self.loop.device), cap)

    def by_part(self, rows: Rows, scored: Scored) -> list[Scored]:
        """Scored rows for each part of a state, with its own ratio, range and advantage; unchanged without parts."""
        if rows.of_parts is None:
            return [scored]
        advantages, dims = sent(rows.of_parts, scored.produced.device).unbind(1), partial(dims_of, self.loop.config)
        parts = zip(regions_of(self.loop.routes), advantages, strict=True)
        return [scored.part(*part, self.kernel.log_prob, dims) for part in parts]

    def reference(self, rows: Rows) -> Transition:
        """The transition that the policy of `kl_reference` gives."""
        if isinstance(self.graphs, KeptGradients):
            return self._kept(rows, self.graphs.reference(rows))
        policy, network = self.loop.policy, self.loop.network
        with torch.no_grad(), policy.under(self.loop.reference_slot), network.counting("reference"):
            return self.replay(rows)

    def whole_paths(self, rows: Rows, blocks: list[Tensor], *, known_one: bool) -> tuple[Tensor, ...] | None:
        """For a ratio of whole trajectories, of each row `[M]`: the factor of its log-ratio that gives the gradient,
        its loss, and how much of it the range cuts; None for `ratio: step`. `known_one`: all ratios are 1 as yet."""
        kind = self.loop.config.ratio
        if kind == "step":
            return None
        log_ratio = torch.zeros_like(rows.old_log_prob)
        if not known_one:
            log_ratio = (self.rescore(rows, blocks) - rows.old_log_prob) / self.dims
        mine = torch.cat(blocks) if blocks else rows.source[:0]
        mine = mine[rows.keep[mine]]
        part, (factor, loss, cut) = rows[mine], (torch.zeros_like(log_ratio) for _ in range(3))
        columns = (log_ratio[mine], part.sample, part.advantage, part.clip_low, part.clip_high)
        factor[mine], loss[mine] = sequence_coefficients(*columns, kind=kind)
        cut[mine] = sequence_cut(*columns, kind=kind).to(cut.dtype)
        return factor, loss, cut
