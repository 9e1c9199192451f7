"""What the rollout keeps of its own evaluations, so that an update need not evaluate the network again.

Before the first update of an iteration the policy is still the one that sampled, so replaying a stored state gives the
rollout's number, with a graph. If memory holds all graphs, the rollout keeps its own (`KeptGraphs`). Otherwise it walks
each back at once and keeps the gradients of each image (`KeptGradients`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flowrl.config.train import TrainConfig
from flowrl.credit import CREDIT
from flowrl.objectives.policy_gradient import Scored, kernel_sensitivity
from flowrl.objectives.terms import velocity_kl
from flowrl.runtime.placement import host_rows, put, sent
from flowrl.samplers import Kernel, Transition, Velocity, gaussian_kl, published_kl
from flowrl.samplers.step import advance
from flowrl.training.learner import GradientSum, NetworkCounter
from flowrl.trajectory import Rows, Schedule

if TYPE_CHECKING:
    from flowrl.pipelines.arithmetic.sample_gradients import SampleGradients  # imports PEFT

Noise = Callable[[int], Tensor]
Reference = Callable[[Velocity, Tensor, Tensor, Tensor], Tensor]
"""The reference's answer to a velocity's arguments."""


class KeptGraphs:
    """Velocities of trained steps, by step and by the first sample of the batch that they were given for."""

    def __init__(self, network: NetworkCounter) -> None:
        """`network` counts a graph as walked back when it is taken: not all are."""
        self._network = network
        self._kept: dict[tuple[int, int], tuple[Tensor, int]] = {}

    def recording(
        self, velocity: Velocity, noise: Noise, first: int, schedule: Schedule, kernel: Kernel, steps: Sequence[int]
    ) -> tuple[Velocity, Noise]:
        """A velocity that gives the same numbers without a graph, and keeps those of some steps with their graphs; and
        the noise, which a step asks for afterwards. `first` is the first sample of this process's in the iteration."""
        step_at = {float(schedule.sigma[step]): step for step in steps}

        def recorded(x: Tensor, sigma: Tensor, timestep: Tensor) -> Tensor:
            step = step_at.get(float(sigma))
            if step is None:
                return velocity(x, sigma, timestep)
            with torch.enable_grad(), self._network.keeping() as graphs:
                kept = velocity(x, sigma, timestep)
            self._kept[step, first] = kept, sum(graphs)
            return kept.detach()

        return recorded, noise

    def take(self, rows: Rows) -> Tensor:
        """The velocities `[b, *latent]` of a micro-batch, a step's rows of a whole batch; its graph is given away."""
        kept, graphs = self._kept.pop((int(rows.step[0]), int(rows.sample[0])))
        assert len(kept) == len(rows)
        if bool(rows.keep.any()):  # else it is an idle turn while other processes walk one back
            self._network.count_backward(graphs)
        return kept

    def clear(self) -> None:
        """Frees what was not taken: graphs of micro-batches without a trained row."""
        self._kept.clear()


class KeptGradients:
    """Gradients of each image's transitions, walked back as they are drawn; they wait on the host for the rewards.

    At a ratio of 1 the loss of a row is its advantage times what it is at advantage 1, l. So is its gradient:

        grad L = sum_it w_it A_it grad l_it + k_it grad KL_it        (i images, t steps; clip: l = -log p / dims)

    The sums over t are kept where w A and k are the same at all steps of an image, else each step's.
    """

    def __init__(
        self,
        config: TrainConfig,
        network: NetworkCounter,
        apart: SampleGradients,
        loss_of: Callable[[Scored], Tensor],
        reference: Reference,
    ) -> None:
        """`reference` answers where the loss has a KL."""
        self._config, self._network, self._apart, self._loss_of = config, network, apart, loss_of
        self._reference = reference if config.kl_coef > 0 else None
        self._by_step = by_step(config)
        self._answers: dict[tuple[int, int], tuple[Tensor, Tensor | None]] = {}
        self._sums: dict[tuple[int, int], list[Tensor]] = {}
        self._factors: dict[tuple[int, int], list[Tensor]] = {}

    def recording(
        self, velocity: Velocity, noise: Noise, first: int, schedule: Schedule, kernel: Kernel, steps: Sequence[int]
    ) -> tuple[Velocity, Noise]:
        """As `KeptGraphs.recording`. The noise makes the transition known, so that its graph is walked back then."""
        step_at = {float(schedule.sigma[step]): step for step in steps}
        pending: list[tuple[Tensor, Tensor, int]] = []

        def recorded(x: Tensor, sigma: Tensor, timestep: Tensor) -> Tensor:
            step = step_at.get(float(sigma))
            if step is None:
                return velocity(x, sigma, timestep)
            other = None if self._reference is None else self._reference(velocity, x, sigma, timestep)
            with torch.enable_grad(), self._network.keeping() as calls, self._apart.recording(calls, len(x)):
                answer = velocity(x, sigma, timestep)
            pending.append((x, answer, sum(calls)))
            self._answers[step, first] = _on_host(answer.detach()), None if other is None else _on_host(other)
            return answer.detach()

        def walked(step: int) -> Tensor:
            drawn, (x, answer, rows) = noise(step), pending.pop()
            levels = schedule.sigma[step], schedule.sigma[step + 1]
            produced = advance(kernel, x, answer.detach(), *levels, drawn).x_next
            with torch.enable_grad():
                new, other = kernel(x, answer, *levels), self._answers[step, first][1]
                log_prob = kernel.log_prob(produced, new)  # rows at advantage 1, at the ratio 1 of a first update
                log_ratio = (log_prob - log_prob.detach()) / dims_of(self._config, produced[0])
                row = dict.fromkeys(("advantage", "clip_low", "clip_high"), torch.ones_like(log_prob))
                row |= {"log_ratio": log_ratio, "produced": produced, "old_mean": new.mean.detach()}
                sensitivity = kernel_sensitivity(kernel, *levels)
                one = Scored(**row, new=new, step_size=float(levels[0] - levels[1]), sensitivity=sensitivity)
                terms = [self._loss_of(one)]
                if other is not None:
                    terms.append(kl_of(self._config, kernel, new, kernel(x, sent(other, x.device), *levels), *levels))
            key = (step if self._by_step else -1, first)
            if key not in self._sums:
                size = len(x), self._apart.count
                self._sums[key] = [torch.zeros(size, dtype=x.dtype, device=x.device) for _ in terms]
            for number, (term, total) in enumerate(zip(terms, self._sums[key], strict=True)):
                times = self._apart.walk(term, total, again=number + 1 < len(terms))
                self._network.count_backward(times * rows)
            if self._by_step or step == max(steps):
                self._sums[key] = [_on_host(total) for total in self._sums[key]]
            return drawn

        return recorded, walked

    def take(self, rows: Rows) -> Tensor:
        """The velocities `[b, *latent]` of a micro-batch, as `KeptGraphs.take`, without their graph."""
        return self._answers[int(rows.step[0]), int(rows.sample[0])][0]

    def reference(self, rows: Rows) -> Tensor:
        """The reference's velocities of such rows."""
        other = self._answers[int(rows.step[0]), int(rows.sample[0])][1]
        assert other is not None
        return other

    def weigh(self, rows: Rows, keep: Tensor, weight_b: Tensor, kl_b: Tensor) -> None:
        """Notes the factors of a micro-batch's kept gradients: the loss at advantage 1 times `weight_b` and the
        advantage, the KL times `weight_b` and `kl_b`."""
        factors = [torch.where(keep, weight_b * other, 0.0) for other in (rows.advantage, kl_b)]
        key = (int(rows.step[0]) if self._by_step else -1, int(rows.sample[0]))
        known = self._factors.setdefault(key, factors)
        assert all(map(torch.equal, known, factors)), "steps of an image are weighted otherwise, and their sum was kept"

    def add_to(self, gradient: GradientSum) -> None:
        """Adds what was noted."""
        for key, factors in self._factors.items():
            for total, factor_b in zip(self._sums[key], factors, strict=False):  # of a KL only if there is one
                for own, factor in zip(total, factor_b.tolist(), strict=True):
                    if factor:
                        gradient.add_known(own, factor)

    def clear(self) -> None:
        """Frees everything."""
        for kept in (self._answers, self._sums, self._factors):
            kept.clear()


def by_step(config: TrainConfig) -> bool:
    """Whether each step of an image has its own weight, so that their gradients cannot be kept as one sum."""
    return not CREDIT[config.credit.method].of_outcomes


def walks(config: TrainConfig, samples: int) -> int:
    """How often a batch's graph is walked back: once more for a KL, and once per image without gradients by sample."""
    if config.keep_graphs != "gradients":
        return 1
    alone = config.policy.lora_variant == "dora" or config.pipeline.quantize == "int8_bnb"
    return (1 + (config.kl_coef > 0)) * (samples if alone else 1)


def dims_of(config: TrainConfig, latent: Tensor) -> int:
    """The divisor of log-ratios and the KL of a latent."""
    return latent.numel() if config.log_ratio == "mean" else 1


def kl_of(
    config: TrainConfig, kernel: Kernel, new: Transition, reference: Transition, now: Tensor, after: Tensor
) -> Tensor:
    """KL `[b]` of each row to the reference, per latent dimension with `log_ratio: mean`; or `mse(v, v_ref)`, a mean
    over dimensions always (UniGRPO, arXiv 2603.23500). Means of a kernel are `c v` plus what the two have in common, so
    this is the means' squared distance over c^2."""
    dims = dims_of(config, new.mean[0])
    if config.kl_type == "velocity":
        return (velocity_kl(new.mean, reference.mean) / kernel_sensitivity(kernel, now, after) ** 2).to(new.mean.dtype)
    if config.kl_type == "exact":
        return gaussian_kl(new, reference) / dims
    return published_kl(new, reference, step_size=None if kernel.full_std else float(now - after)) / dims


def _on_host(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor
    kept = host_rows(tensor, len(tensor), tensor.device)
    put(kept, 0, tensor)
    return kept
