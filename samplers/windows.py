"""Which steps are stochastic and trained: moving windows, and the schedules around them.

Everything is a function of the iteration, and draws are functions of counters: a resumed run and every process
see the same steps. Steps are 0 .. T-1; the last one leads to clean data and is never part of a window.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch

from flowrl.runtime.randomness import counter_integers
from flowrl.samplers.schedules import linspace_sigmas, shift_sigma
from flowrl.trajectory import Schedule

Strategy = Literal["progressive", "random", "decay", "exp_decay", "frozen"]


def mixgrpo_window(
    iteration: int,
    num_steps: int,
    size: int,
    strategy: Strategy = "progressive",
    *,
    interval: int = 25,
    stride: int = 1,
    seed: int = 0,
    published_off_by_one: bool = False,
) -> tuple[int, ...]:
    """MixGRPO's window of stochastic steps in an iteration (Li et al., arXiv 2507.21802).

    | strategy | start of the window |
    |---|---|
    | progressive | moves by the stride every `interval` iterations |
    | random | drawn every `interval` iterations, uniform over all starts |
    | decay | as progressive, but stays `linear_decay(start)` iterations: 10 at first, 1 at the end |
    | exp_decay | as progressive, but stays `exponential_decay(start)` iterations |
    | frozen | always 0 |

    Windows are always full and together hold every step but the last, T-1: the moving ones start at 0, stride,
    2 stride, ..., T-1-size, the last of these whether or not the stride lands there, and then at 0 again. A stride of
    size - n makes successive windows overlap by n steps; stride 0 never moves.

    Args:
        iteration: Counted from 0.
        published_off_by_one: Follow the released code: windows end before T-2, so that step is never trained, the start
            moves on to T-2, so windows shrink at the end of a round, and the last of the round is empty. The released
            random starts come from an unseeded generator and only their range is reproduced.

    Returns ascending consecutive steps; empty only with published_off_by_one; then the caller skips the update. Raises
    ValueError: unknown strategy, a window that does not fit, a negative iteration or stride, or interval < 1.
    """
    if strategy not in get_args(Strategy):
        raise ValueError(f"unknown window strategy {strategy!r}: choose one of {', '.join(get_args(Strategy))}")
    if iteration < 0 or interval < 1 or stride < 0:
        raise ValueError(f"need iteration >= 0, interval >= 1 and stride >= 0, got {iteration}, {interval}, {stride}")
    end = num_steps - 2 if published_off_by_one else num_steps - 1  # one past the last step a window may hold
    if not 1 <= size <= end:
        raise ValueError(
            f"a window of {size} steps does not fit the steps 0 .. {end - 1} of {num_steps}: the size must lie in "
            f"1 .. {end}"
        )
    if strategy == "frozen" or stride == 0:
        start = 0
    elif strategy == "random":
        start = counter_integers(0, end - size + 1, seed, "window", iteration // interval)
    else:
        last = end if published_off_by_one else end - size
        starts = list(range(0, last + 1, stride))
        if starts[-1] < last and not published_off_by_one:
            starts.append(last)
        stay = {"decay": lambda s: linear_decay(s, num_steps), "exp_decay": lambda s: exponential_decay(s, interval)}
        walk = [s for s in starts for _ in range(stay.get(strategy, lambda s: interval)(s))]  # one round, by iteration
        start = walk[iteration % len(walk)]
    return tuple(range(start, min(start + size, end)))


def linear_decay(start: int, num_steps: int, longest: int = 10, shortest: int = 1) -> int:
    """Iterations at a window's start, `max(shortest, floor(longest (1 - u) + shortest u))`, `u = start / (T - 2)`
    (MixGRPO's "decay"): early windows, which settle an image's layout, are trained longer."""
    span = max(num_steps - 2, 1)
    return max(shortest, (longest * (span - start) + shortest * start) // span)  # in integers nothing is rounded


def exponential_decay(start: int, interval: int = 25, hold: int = 13, rate: float = 0.1) -> int:
    """Iterations at a window's start, `ceil(interval exp(-rate max(start - hold, 0)))`, MixGRPO's "exp_decay"."""
    return math.ceil(interval * math.exp(-rate * max(start - hold, 0)))


def flash_points(num_steps: int, last: int, ratio: float) -> int:
    """MixGRPO-Flash's number of grid points after the window, `max(floor((T - last) ratio), 1)`, both ends included.

    Args:
        last: Last step of the window, 0 .. T-2.
        ratio: Share that is kept, in (0, 1].
    """
    if not 0 <= last <= num_steps - 2:
        raise ValueError(f"the window's last step must lie in 0 .. {num_steps - 2} of {num_steps} steps, got {last}")
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio must lie in (0, 1], got {ratio}")
    return max(math.floor(ratio * (num_steps - last) + 1e-9), 1)  # safe from products such as .29 * 100 = 28.999...


def flash_tail(
    num_steps: int, last: int, ratio: float, *, shift: float = 1.0, num_train_timesteps: int = 1000
) -> Schedule:
    """MixGRPO-Flash's schedule: the evenly spaced grid up to the end of the window, and fewer steps from there to 0.

    The unshifted grid keeps `u_0 .. u_{last+1}`, `u_i = 1 - i / T`, and goes on with `flash_points` points evenly
    spaced from `u_{last+1}` to 0, then all are shifted; `last + points` steps in all. A tail of one point, which the
    released code builds for late windows, would stop at `u_{last+1}` and leave a noisy latent: here a tail always ends
    at 0, and has two points at least. Take its steps with `solver="dpm2"` of `rollout`.

    Args:
        shift: Static shift; exp(mu) for a dynamic one.
        num_train_timesteps: Timesteps are this times sigma.
    """
    points = max(flash_points(num_steps, last, ratio), 2)
    kept = linspace_sigmas(num_steps, shift)[: last + 2]  # as in the full grid, to the bit
    tail = torch.linspace(1 - (last + 1) / num_steps, 0, points, dtype=torch.float64)[1:]
    sigma = torch.cat([kept, shift_sigma(tail, shift).float()])
    return Schedule(sigma=sigma, timestep=sigma[:-1] * num_train_timesteps)


def thinned_steps(num_steps: int, k: int, stride: int) -> tuple[int, ...]:
    """G2RPO's coarse completion of a branch at step k (arXiv 2510.01982): the steps whose network is evaluated.

    Of the states k+1, k+2, k+2+stride, k+2+2 stride, ... up to T the network is evaluated at all but the last one; from
    the last evaluated state an Euler jump leads to sigma 0, even if the stride misses T. Stride 1 completes fully.

    Args:
        k: Step of the branch, 0 .. T-1; its product is state k+1.
        stride: Granularity, at least 1.

    Returns ascending steps; empty for k = T-1, whose product is finished.
    """
    if not 0 <= k < num_steps or stride < 1:
        raise ValueError(f"need a branch step k in 0 .. {num_steps - 1} and stride >= 1, got {k} and {stride}")
    return (k + 1, *range(k + 2, num_steps + 1, stride))[:-1]
