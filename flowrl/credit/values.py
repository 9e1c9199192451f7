"""What every credit method on trajectories starts from: the run around, the rewards on the way, normalisation sets.

Letters: K reward channels, b samples, n stochastic steps of each. Value k is the reward of the image that the ODE makes
after k stochastic steps; value n is that of the rollout's own image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.runtime.shapes import Float, Int
from flowrl.trajectory import Sampled


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


def norm_within(sampled: Sampled, part_M: Int[Tensor, " M"]) -> Int[Tensor, " M"]:
    """Normalisation sets: transitions of one prompt group and, within it, of one part; parts lie in 0 .. 2^32 - 1."""
    return sampled.group.long() * 2**32 + part_M.long()


def norm_by_step(sampled: Sampled) -> Int[Tensor, " M"]:
    """Normalisation sets: transitions of one prompt at one denoising step."""
    return norm_within(sampled, sampled.step)


def check_rewards(sampled: Sampled, reward_KF: Tensor) -> None:
    """Refuse rewards that are not float [K, F], one per channel and finished latent."""
    if reward_KF.ndim != 2 or reward_KF.shape[1] != len(sampled.finished) or not reward_KF.is_floating_point():
        raise ValueError(
            f"rewards must be float [K, {len(sampled.finished)}], one per channel and finished latent, got "
            f"{reward_KF.dtype} {tuple(reward_KF.shape)}"
        )


def steps_of(sampled: Sampled) -> Int[Tensor, " b n"]:
    """Denoising step of every transition, sample by sample. Raises ValueError: the transitions are not b trajectories
    of n steps each, one after another."""
    count = int((sampled.sample == 0).sum())
    row = torch.arange(len(sampled), device=sampled.sample.device)
    if count == 0 or len(sampled) % count or bool((sampled.sample != row // count).any()):
        raise ValueError(
            "this credit method needs trajectories: the same number of transitions for every sample, sample after "
            f"sample; got samples {sampled.sample[:16].tolist()} ... Branches and trees have methods of their own"
        )
    if bool((sampled.parent != torch.where(row % count == 0, -1, row - 1)).any()):
        raise ValueError(
            "this credit method needs trajectories, in which every step follows the one before: "
            f"got parents {sampled.parent[:16].tolist()} ..."
        )
    return sampled.step.reshape(-1, count)


def _by_sample(sampled: Sampled, reward_KF: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards [K, b, F / b] and the transition count of each finished latent [b, F / b], checked."""
    b, count = steps_of(sampled).shape
    check_rewards(sampled, reward_KF)
    if len(sampled.finished) not in (b, b * (count + 1)):
        raise ValueError(
            f"{b} trajectories of {count} stochastic steps leave {b} finished latents, or {b * (count + 1)} with the "
            f"values on the way, got {len(sampled.finished)}"
        )
    after = sampled.finished_after.reshape(b, -1)
    last = torch.arange(b, device=after.device)[:, None] * count + count - 1
    wanted = last - torch.arange(after.shape[1] - 1, -1, -1, device=after.device)
    if after.shape[1] > 1:
        wanted[:, 0] = -1
    if bool((after != wanted).any()):
        raise ValueError(
            "finished latents must stand sample by sample, each after one transition more than the one before it, as "
            f"sample_trajectories leaves them: finished_after begins {after.flatten()[:16].tolist()}"
        )
    return reward_KF.reshape(len(reward_KF), b, -1), after


def final_rewards(sampled: Sampled, reward_KF: Float[Tensor, " K F"]) -> Float[Tensor, " K b"]:
    """Rewards of the rollouts' own images, with or without values on the way; raises as `values_of`."""
    return _by_sample(sampled, reward_KF)[0][..., -1]


def values_of(sampled: Sampled, reward_KF: Float[Tensor, " K F"]) -> Float[Tensor, " K b n1"]:
    """Values 0 .. n of every sample (n1 = n + 1), as the rewards come. Raises ValueError: these are not trajectories,
    or values on the way were not sampled, or the rewards do not fit."""
    values, after = _by_sample(sampled, reward_KF)
    if after.shape[1] == 1:
        raise ValueError(
            "this credit method compares values on the way, but only the finished images were scored: complete the "
            "trajectories (flowrl.samplers.completion.complete) and pass the result to sample_trajectories"
        )
    return values


def gains_of(sampled: Sampled, reward_KF: Float[Tensor, " K F"]) -> Float[Tensor, " K b n"]:
    """Gain of every step, `V_{k+1} - V_k`; NaN if one of the two is. Raises as `values_of`."""
    values = values_of(sampled, reward_KF).double()
    return (values[..., 1:] - values[..., :-1]).to(reward_KF.dtype)


def one_channel(reward_KF: Float[Tensor, " K F"], method: str) -> None:
    """Refuses several reward channels for a method that is not defined for them."""
    if len(reward_KF) != 1:
        raise ValueError(
            f"{method} needs one reward channel, got {len(reward_KF)}: what it does with values is not linear in them, "
            "so merge the rewards into their weighted sum first"
        )
