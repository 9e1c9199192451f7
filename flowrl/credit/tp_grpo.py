"""Turning-point credit: a step that turns a trajectory for good gets credit for all that follows (TP-GRPO).

The definitions follow the released code of TurningPoint-GRPO (arXiv 2602.06422). Letters: N trajectories of T
stochastic steps, V_0 .. V_T their values; `d_j = V_{j+1} - V_j` is the gain of step j, `V_T - V_j` that from j on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.credit.values import ALONE, Context, norm_by_step, one_channel, values_of
from flowrl.runtime.shapes import Bool, Float
from flowrl.trajectory import Credit, Sampled


def turning_points(
    values_NT: Float[Tensor, " N T1"],
    constrained: bool = True,
    *,
    local_flip: bool = False,
    positive_only: bool = False,
) -> Bool[Tensor, " N T"]:
    """Steps that turn a trajectory towards where it ends.

    With `u_j = sign(d_j)` and the trend `g = sign(V_T - V_0)`, step j >= 1 is a turning point where the gain turns from
    against the trend to along it, `u_{j-1} g = -1` and `u_j g = 1`; step 0 where it goes along, `u_0 g = 1`. The
    constraint adds that the rest goes the same way as the step, `u_j sign(V_T - V_{j+1}) = 1`. Then `V_T - V_j` has the
    sign of d_j and is larger, and the last step never is one; without it neither holds. All comparisons are strict:
    nothing is flagged at a gain of 0, nor right after one, nor in a trajectory that ends where it began.

    Args:
        values_NT: [N, T+1] values, NaN where a reward failed.
        constrained: Add the constraint (the released launch scripts do); alone it decides on step 0.
        local_flip: For steps j >= 1 ask only that neighbouring gains have opposite signs, whatever the trend.
        positive_only: Flag steps j >= 1 only where the trajectory ends higher than it began; step 0 is as it was.

    Returns [N, T]. No step is flagged for which a value that its definition names, V_0 and V_T included, is NaN. Raises
    ValueError: values_NT is not a float table of at least two columns.
    """
    values = _check(values_NT)
    first, last = values[:, :1], values[:, -1:]
    gain = (values[:, 1:] - values[:, :-1]).sign()  # sign(NaN) is 0, so a NaN flags nothing
    trend = (last - first).sign()
    along = gain * trend
    if local_flip:
        turned = gain[:, :-1] * gain[:, 1:] < 0
    else:
        turned = (along[:, :-1] < 0) & (along[:, 1:] > 0)
    if positive_only:
        turned &= trend > 0
    flags = torch.cat([along[:, :1] > 0, turned], 1)
    if constrained:
        # On step 0 this implies u_0 g = 1: V_T - V_0 is then a sum of two terms of one sign.
        flags &= gain * (last - values[:, 1:]).sign() > 0
    return flags & ~(first + last).isnan()


def balance(flags_NT: Bool[Tensor, " N T"], values_NT: Float[Tensor, " N T1"]) -> Bool[Tensor, " N T"]:
    """As many turning points of rising trajectories as of falling ones, over all cells of the table.

    Of each sign of `V_T - V_0` the min(#rising, #falling) cells with the largest `|V_T - V_0|` stay flagged, earlier
    cells first among equals. Nothing changes where one sign is missing. The released code ranks by this trend and not
    by the cell's own `V_T - V_j`. A cell of trend 0, which only a local flip can have, belongs to neither and stays.

    Args:
        flags_NT: [N, T] from `turning_points`.
        values_NT: [N, T+1].
    """
    values = _check(values_NT)
    if flags_NT.shape != (len(values), values.shape[1] - 1):
        raise ValueError(f"flags of values {tuple(values.shape)} have one column less, got {tuple(flags_NT.shape)}")
    trend = (values[:, -1:] - values[:, :1]).expand(flags_NT.shape).flatten()
    flags = flags_NT.flatten().clone()
    sides = [(flags & (trend > 0)).nonzero().flatten(), (flags & (trend < 0)).nonzero().flatten()]
    count = min(len(side) for side in sides)
    for side in sides if count else ():
        order = trend[side].abs().argsort(descending=True, stable=True)
        flags[side[order[count:]]] = False
    return flags.reshape(flags_NT.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class TpGrpo:
    """TP-GRPO: gain of a step; at a turning point, all that came from there on.

    `V_T - V_j` at turning points (where it is 0 the gain stays) and `d_j` elsewhere, normalised over the same step
    under the same prompt. Balancing is over the trajectories of all processes; the release balances those of each
    process by itself, so that its result depends on how a batch is cut.
    """

    constrained: bool = True
    """See `turning_points`."""
    balance: bool = True
    """See `balance`."""
    local_flip: bool = False
    """See `turning_points`."""
    positive_only: bool = False
    """See `turning_points`."""

    def __call__(self, sampled: Sampled, reward_KF: Float[Tensor, " 1 F"], context: Context = ALONE) -> Credit:
        """Credit of trajectories with values on the way; several rewards are merged before signs are taken. Raises
        ValueError: there are several channels, or as `values_of`."""
        one_channel(reward_KF, "tp_grpo")
        values = values_of(sampled, reward_KF)[0].double()
        flags = turning_points(values, self.constrained, local_flip=self.local_flip, positive_only=self.positive_only)
        if self.balance:
            whole = balance(context.gather(flags), context.gather(values))
            flags = whole[context.rank * len(flags) : (context.rank + 1) * len(flags)]
        rest = values[:, -1:] - values[:, :-1]
        raw = torch.where(flags & (rest != 0), rest, values[:, 1:] - values[:, :-1])
        return Credit(raw=raw.to(reward_KF.dtype).reshape(1, -1), norm=norm_by_step(sampled))


def _check(values_NT: Tensor) -> Tensor:
    """Values in float64."""
    if values_NT.ndim != 2 or values_NT.shape[1] < 2 or not values_NT.is_floating_point():
        raise ValueError(
            "values are a float table [N, T+1] with T >= 1, V_0 to V_T of every trajectory, got "
            f"{values_NT.dtype} {tuple(values_NT.shape)}"
        )
    return values_NT.double()
