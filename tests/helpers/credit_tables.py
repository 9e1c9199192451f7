"""Tables of values as trajectories, and the advantages that a credit method makes of them, normalised by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowrl.samplers.completion import sample_trajectories
from flowrl.trajectory import Credit, Sampled, Trajectory

Numbers = NDArray[np.float64]

# One prompt, shared start noise, four samples of three steps: V_0 .. V_3.
TABLE = [[0.5, 0.3, 0.6, 0.9], [0.5, 0.7, 0.1, 0.2], [0.5, 0.6, 0.8, 0.7], [0.5, 0.4, 0.4, 0.5]]
ORACLE = 1e-6  # numbers printed with six decimals


def sampled_of(b: int, n: int, groups: Sequence[int] | None = None, *, values: bool = True) -> Sampled:
    """Trajectories of n stochastic steps whose latents do not matter."""
    trajectory = Trajectory(
        states=torch.zeros(b, n + 1, 1),
        kept=tuple(range(n + 1)),
        steps=tuple(range(n)),
        log_prob=torch.zeros(b, n),
        final=torch.zeros(b, 1),
    )
    group = torch.zeros(b, dtype=torch.long) if groups is None else torch.tensor(groups)
    return sample_trajectories(trajectory, group, torch.zeros(b, n + 1, 1) if values else None)


def table_of(values: Sequence[Sequence[float]], groups: Sequence[int] | None = None) -> tuple[Sampled, Tensor]:
    """Trajectories and rewards [1, F] that have these values."""
    reward = torch.tensor(values, dtype=torch.float64)
    return sampled_of(len(reward), reward.shape[1] - 1, groups), reward.reshape(1, -1)


def advantages(credit: Credit, steps: int, eps: float = 0.0) -> Numbers:
    """`scale (z + offset)` of the first channel as [b, n], population std; a set of equal numbers has z = 0."""
    raw, norm = credit.raw[0].numpy(), credit.norm.numpy()
    result = np.zeros_like(raw)
    for name in np.unique(norm):
        members = norm == name
        deviation = raw[members] - raw[members].mean()
        std = raw[members].std()
        result[members] = deviation / (std + eps) if std > 1e-12 else 0.0
    scale = 1.0 if credit.scale is None else credit.scale.numpy()
    offset = 0.0 if credit.offset is None else credit.offset.numpy()
    return (scale * (result + offset)).reshape(-1, steps)


def close(got: Numbers, wanted: Sequence[Sequence[float]]) -> None:
    np.testing.assert_allclose(got, np.array(wanted), rtol=0, atol=ORACLE)


def columns(*wanted: Sequence[float]) -> list[list[float]]:
    return np.array(wanted).T.tolist()
