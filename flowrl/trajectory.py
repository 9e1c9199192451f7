"""The tables that flow through the toolkit: schedule, conditioning, trajectory and training rows.

Letters: b samples, T denoising steps, S kept states, K stochastic steps, M rows. State j is the latent at `sigma[j]`,
state 0 the start noise and state T the finished latent; step j leads from state j to state j + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from flowrl.runtime.placement import taken
from flowrl.runtime.shapes import Bool, Float, Int

Index = int | slice | Sequence[int] | Tensor


def _select(tensor: Tensor, index: Index) -> Tensor:
    """Index the batch dimension and keep it: an int selects a batch of one."""
    if isinstance(index, int):
        position = index + len(tensor) if index < 0 else index
        if not 0 <= position < len(tensor):
            raise IndexError(f"index {index} is outside a batch of {len(tensor)}")
        return tensor[position : position + 1]
    if isinstance(index, slice):
        return tensor[index]
    return taken(tensor, index if isinstance(index, Tensor) else torch.as_tensor(index, dtype=torch.long))


def check_columns(**columns: Tensor) -> None:
    """Refuse columns that are not [M] of one length: broadcasting one against the other would hide a mistake."""
    shapes = {name: tuple(column.shape) for name, column in columns.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise ValueError(f"columns have one shape [M], without broadcasting, got {shapes}")


def flow_timestep(sigma: Tensor) -> Tensor:
    """Network input of flow models at a noise level, `1000 sigma`."""
    return 1000 * sigma


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Schedule:
    """Noise levels of a denoising run and what the network is fed at each. Raises ValueError: shapes do not fit, or
    sigma does not decrease strictly within [0, 1] to 0."""

    sigma: Float[Tensor, " T1"]
    """[T+1] float32, strictly decreasing, from 1 (or just below, UniPC grids) to exactly 0."""
    timestep: Float[Tensor, " T"]
    """[T] float32, network input of each step; 1000 * sigma for the usual flow models."""
    start_scale: float = 1.0
    """Factor of standard normal start noise. It is 1 but for diffusion models in flow coordinates, whose first state is
    not scaled as noise at the first sigma is."""
    highest_sigma: float = 1.0
    """Highest noise level that the network knows; below 1 for diffusion models whose last timestep is not all noise."""
    timestep_of: Callable[[Tensor], Tensor] = flow_timestep
    """Network input at any noise level up to that, for methods that train between the steps."""

    def __post_init__(self) -> None:
        if self.sigma.ndim != 1 or len(self.sigma) < 2 or self.timestep.shape != (len(self.sigma) - 1,):
            raise ValueError(
                f"a schedule of T >= 1 steps has sigma [T+1] and timestep [T], got {tuple(self.sigma.shape)} and "
                f"{tuple(self.timestep.shape)}"
            )
        decreasing = bool((self.sigma[1:] < self.sigma[:-1]).all())
        if not decreasing or float(self.sigma[0]) > 1 or float(self.sigma[-1]) != 0:
            raise ValueError(f"sigma must decrease strictly from at most 1 to 0, got {self.sigma.tolist()}")

    @property
    def num_steps(self) -> int:
        """T, the number of network evaluations of one sample."""
        return len(self.timestep)

    @property
    def sigma_max(self) -> float:
        """The second sigma, which stands in for sigma = 1 where a kernel is singular there."""
        return float(self.sigma[1])


def start_state(noise: Tensor, schedule: Schedule) -> Tensor:
    """State 0 of standard normal noise `[b, *latent]`, in at least float32."""
    noise = noise.to(torch.promote_types(noise.dtype, torch.float32))
    return noise if schedule.start_scale == 1 else noise * schedule.start_scale


@dataclass(frozen=True, slots=True, eq=False)
class Conditioning:
    """What a network is told besides latent and time: named tensors that share their first dimension. Raises
    ValueError: there is no tensor, one has no batch dimension, or the batch sizes differ."""

    tensors: dict[str, Tensor]
    """Name to [b, ...]; at least one. Names that end in `_on_host` are of numbers that stay on the host."""

    def __post_init__(self) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        if not shapes or () in shapes.values() or len({shape[0] for shape in shapes.values()}) != 1:
            raise ValueError(f"conditioning needs tensors that share their first dimension, got shapes {shapes}")

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, index: Index) -> Conditioning:
        """Select samples; an int selects a batch of one."""
        return Conditioning({name: _select(tensor, index) for name, tensor in self.tensors.items()})

    def to(self, device: torch.device | str) -> Conditioning:
        """Move every tensor but those named `..._on_host`: by these the host decides how a network is called."""
        moved = {n: t if n.endswith("_on_host") else t.to(device) for n, t in self.tensors.items()}
        return Conditioning(moved)

    def expand(self, b: int) -> Conditioning:
        """Repeat a batch of one b times without copying. Raises ValueError: the batch is neither 1 nor b."""
        if len(self) not in (1, b):
            raise ValueError(f"only a batch of 1 can be expanded to {b}, this one holds {len(self)}")
        return Conditioning({name: t.expand(b, *t.shape[1:]) for name, t in self.tensors.items()})

    @staticmethod
    def cat(parts: Sequence[Conditioning]) -> Conditioning:
        """Join batches. Raises ValueError: no part was given, or names or trailing shapes differ."""
        kinds = [{name: tuple(t.shape[1:]) for name, t in part.tensors.items()} for part in parts]
        if not kinds or any(kind != kinds[0] for kind in kinds):
            raise ValueError(f"only conditioning with equal names and shapes [b, ...] can be joined, got {kinds}")
        names = parts[0].tensors
        return Conditioning({name: torch.cat([part.tensors[name] for part in parts]) for name in names})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trajectory:
    """Record of a rollout of b samples: the kept states and the densities of the stochastic steps."""

    states: Float[Tensor, " b S *latent"]
    """[b, S, *latent] the kept states; `states[:, i]` is the latent at `sigma[kept[i]]`."""
    kept: tuple[int, ...]
    """S state indexes in 0 .. T, ascending."""
    steps: tuple[int, ...]
    """K stochastic steps, ascending; state `step` and state `step + 1` of each are kept."""
    log_prob: Float[Tensor, " b K"]
    """[b, K] log-density of the stored produced state, summed over latent dimensions."""
    final: Float[Tensor, " b *latent"]
    """[b, *latent] the latent at sigma = 0."""
    mean: Float[Tensor, " b K *latent"] | None = None
    """[b, K, *latent] means of the stochastic transitions, or None."""
    velocity: Float[Tensor, " b K *latent"] | None = None
    """[b, K, *latent] network output at the source of each stochastic step, guidance included, or None."""
    memory: Float[Tensor, " b S *latent"] | None = None
    """[b, S, *latent] what guidance had kept of earlier steps at each kept state, or None (`path_memory`)."""

    def __post_init__(self) -> None:
        b, latent = len(self.final), tuple(self.final.shape[1:])
        wanted = {"states": (b, len(self.kept), *latent), "log_prob": (b, len(self.steps))}
        given = {"states": tuple(self.states.shape), "log_prob": tuple(self.log_prob.shape)}
        for name, recorded in (("mean", self.mean), ("velocity", self.velocity)):
            if recorded is not None:
                wanted[name], given[name] = (b, len(self.steps), *latent), tuple(recorded.shape)
        if wanted != given:
            raise ValueError(f"with final {(b, *latent)}, kept {self.kept}, steps {self.steps}: {wanted=}, {given=}")
        ascending = list(self.kept) == sorted(set(self.kept)) and list(self.steps) == sorted(set(self.steps))
        if not ascending or not {s + i for s in self.steps for i in (0, 1)} <= set(self.kept):
            raise ValueError(f"kept {self.kept} must ascend and hold step and step + 1 of all steps {self.steps}")

    def __len__(self) -> int:
        return len(self.final)

    def columns(self) -> dict[str, Tensor]:
        """Tensors of the samples by name, those that were recorded."""
        named = ("states", "log_prob", "final", "mean", "velocity", "memory")
        return {name: getattr(self, name) for name in named if getattr(self, name) is not None}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """Training table, one row per transition to be scored: every credit method ends here, every objective starts here.

    Attributes:
        source, produced: [M] index of the input state and of the produced state in `states.flatten(0, 1)`.
        step: [M] denoising step, 0 .. T-1.
        sample: [M] sample of the rollout, 0 .. b-1.
        group: [M] prompt group.
        old_log_prob: [M] log-density recorded by the rollout, summed over latent dimensions.
        advantage: [M].
        weight: [M] step weight, mean 1 over kept rows.
        clip_low, clip_high: [M] distances: the ratio is held within 1 - clip_low .. 1 + clip_high.
        keep: [M] rows that are trained.
        of_parts: [M, P] advantages of each part of a state where it has its own, whose mean is `advantage`; else None.
    """

    source: Int[Tensor, " M"]
    produced: Int[Tensor, " M"]
    step: Int[Tensor, " M"]
    sample: Int[Tensor, " M"]
    group: Int[Tensor, " M"]
    old_log_prob: Float[Tensor, " M"]
    advantage: Float[Tensor, " M"]
    weight: Float[Tensor, " M"]
    clip_low: Float[Tensor, " M"]
    clip_high: Float[Tensor, " M"]
    keep: Bool[Tensor, " M"]
    of_parts: Float[Tensor, " M P"] | None = None

    def __post_init__(self) -> None:
        check_columns(**{name: column if column.ndim < 2 else column[:, 0] for name, column in self.columns().items()})

    def columns(self) -> Mapping[str, Tensor]:
        """All columns by name, those that are there."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: column for name, column in found.items() if column is not None}

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: Index) -> Rows:
        """Select rows by slice, integers or a boolean mask; an int selects a table of one row."""
        return Rows(**{name: _select(column, index) for name, column in self.columns().items()})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sampled:
    """What a rollout of any shape leaves behind: trajectories, branches of an anchor, or trees.

    A transition leads from one latent of the pool to another. Siblings share their source. A finished latent ends a
    path or completes it by the ODE from some transition's product.

    Attributes:
        states: [S, *latent] pool of latents.
        source, produced: [M] pool index of the latent a transition starts at, and of the one it leads to.
        step: [M] denoising step, 0 .. T-1.
        sample: [M] path that the transition belongs to alone; -1 where several paths share it.
        group: [M] prompt group, numbered over all processes.
        parent: [M] transition that produced the source; -1 where none did.
        log_prob: [M] log-density of the stored product, summed over latent dimensions.
        mean: [M, *latent] means of the transitions, or None.
        memory: [S, *latent] what guidance had kept of earlier steps at each latent of the pool, or None.
        finished: [F, *latent] latents at sigma = 0 whose images are scored.
        finished_group: [F] prompt group of each.
        finished_after: [F] transition after which the ODE alone was followed; -1 where that is so from the start.
    """

    states: Float[Tensor, " S *latent"]
    source: Int[Tensor, " M"]
    produced: Int[Tensor, " M"]
    step: Int[Tensor, " M"]
    sample: Int[Tensor, " M"]
    group: Int[Tensor, " M"]
    parent: Int[Tensor, " M"]
    log_prob: Float[Tensor, " M"]
    finished: Float[Tensor, " F *latent"]
    finished_group: Int[Tensor, " F"]
    finished_after: Int[Tensor, " F"]
    mean: Float[Tensor, " M *latent"] | None = None
    memory: Float[Tensor, " S *latent"] | None = None

    def __post_init__(self) -> None:
        columns = {
            name: tuple(getattr(self, name).shape)
            for name in ("source", "produced", "step", "sample", "group", "parent", "log_prob")
        }
        ends = {name: tuple(getattr(self, name).shape) for name in ("finished_group", "finished_after")}
        if set(columns.values()) != {(len(self.step),)} or set(ends.values()) != {(len(self.finished),)}:
            raise ValueError(f"columns of transitions, and of finished latents, have equal lengths: {columns}, {ends}")

    def __len__(self) -> int:
        return len(self.step)

    def on_host(self) -> Sampled:
        """The same on the host: latents wait there for the update, and credit and advantages are many small steps, in
        float64, which not every device has."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: column.cpu() for name, column in columns.items() if column is not None})

    @property
    def ends(self) -> Bool[Tensor, " F"]:
        """[F] finished latents that stand at the end of a stochastic path, and not beside one on the way."""
        inner = torch.zeros(len(self) + 1, dtype=torch.bool, device=self.parent.device)
        inner[self.parent] = True  # -1 marks the last place, which stands for "no transition"
        inner[-1] = True
        return ~inner[self.finished_after]

    def by_step(self) -> Sampled:
        """The same branches or trees with transitions in the order of their steps, and what follows from them: as one
        rollout of all groups has them, where they were joined of rollouts of some groups each. The pool stays."""
        order = self.step.argsort(stable=True)
        place = torch.cat([order.argsort(), torch.tensor([-1])])  # of each transition, and of none
        named = ("source", "produced", "step", "group", "log_prob", "mean")
        columns: dict[str, Any] = {name: getattr(self, name) for name in named}
        columns = {name: column if column is None else column[order] for name, column in columns.items()}
        known, which = self.sample[order].unique(return_inverse=True)
        first = torch.full(known.shape, len(order)).scatter_reduce(0, which, torch.arange(len(order)), "amin")
        first = torch.where(known < 0, -1, first)  # of those that several paths share
        after = place[self.finished_after]
        ends = after.argsort(stable=True)
        return replace(
            self,
            **columns,
            sample=(first.argsort().argsort() - int((known < 0).sum()))[which],
            parent=place[self.parent[order]],
            finished=self.finished[ends],
            finished_group=self.finished_group[ends],
            finished_after=after[ends],
        )

    @staticmethod
    def cat(parts: Sequence[Sampled]) -> Sampled:
        """Join rollouts, renumbering pool, transitions and samples. Raises ValueError: no part was given, or only some
        recorded means."""
        if not parts or len({part.mean is None for part in parts}) != 1:
            raise ValueError("rollouts can be joined when there is one and all or none recorded means")
        if len(parts) == 1:
            return parts[0]
        columns: dict[str, list[Tensor]] = {field.name: [] for field in fields(Sampled)}
        pool = transitions = samples = 0
        for part in parts:
            offsets = {"source": pool, "produced": pool, "parent": transitions, "finished_after": transitions,
                       "sample": samples}  # fmt: skip
            for name, kept in columns.items():
                column = getattr(part, name)
                if column is not None:
                    kept.append(column + offsets[name] * (column >= 0) if name in offsets else column)
            pool, transitions = pool + len(part.states), transitions + len(part)
            samples += int(part.sample.max()) + 1 if len(part) else 0
        joined: dict[str, Any] = {name: torch.cat(kept) if kept else None for name, kept in columns.items()}
        return Sampled(**joined)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Credit:
    """What a credit method makes of scored images, before normalisation: one number per transition and channel.

    The advantage is `scale * (normalised + offset)`, clipped; the objective is weighted by `weight`.
    """

    raw: Float[Tensor, " K M"]
    """[K, M] credit by channel; NaN where an image it needs has no valid reward. Where a method splits every reward
    into several channels, they stand reward by reward."""
    norm: Int[Tensor, " M"]
    """[M] transitions with equal numbers are normalised together; equal on all processes for one set."""
    scale: Float[Tensor, " M"] | None = None
    """[M] factor after normalisation, or None for 1."""
    offset: Float[Tensor, " M"] | None = None
    """[M] added after normalisation, or None for 0."""
    weight: Float[Tensor, " M"] | None = None
    """[M] step weight, mean 1 over what is trained, or None for 1."""
    keep: Bool[Tensor, " M"] | None = None
    """[M] transitions that are trained, or None for all."""
