"""Rewards that speak of parts of a state: each part has an advantage and a loss of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.runtime.shapes import Bool, Float

Region = tuple[Any, ...]
"""Index of a part's elements in a state `[*latent]`, and in a batch of states; it begins with an ellipsis."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Routes:
    """Reward routing (OmniNFT, arXiv 2605.12480): a part of a state learns from the rewards that speak of it.

    `A_p = sum_k w_k A_k` over the rewards k of part p, and `loss = mean_p loss_p(A_p)`: parts count alike, however many
    elements they have. `rewards[].routes` names the parts, recipe forward (nft, awm, rwr) or grpo takes the losses.
    One advantage for the whole would push a good sound away along with a bad clip, and where the two are opposed, a sum
    of 0, it would teach neither. Gradient surgery and region weights, the paper's two other proposals, are not here.
    """

    parts: Mapping[str, Region]
    """Name -> region; each element of a state lies in one."""
    speaks_PK: Bool[Tensor, " P K"]
    """[P, K] whether a reward speaks of a part."""

    @staticmethod
    def of(routes: Sequence[Sequence[str]], parts: Mapping[str, Region]) -> Routes | None:
        """Routes of the parts that each reward names, none for all; None where every reward speaks of all parts."""
        speaks = torch.tensor([[not named or part in named for named in routes] for part in parts], dtype=torch.bool)
        return None if bool(speaks.all()) else Routes(parts=parts, speaks_PK=speaks)


def regions_of(routes: Routes | None) -> tuple[Region, ...]:
    """The parts of a state that have losses of their own: the whole where there are no routes."""
    return ((...,),) if routes is None else tuple(routes.parts.values())


def by_part(
    routes: Routes | None,
    value_KM: Float[Tensor, " C M"],
    weights_K: Float[Tensor, " K"],
    combined: Callable[[Tensor], Tensor],
) -> Float[Tensor, " P M"]:
    """What several rewards make together of each part; P = 1, the whole, where there are no routes. `value_KM` holds
    one or several channels of each of the K rewards, reward by reward, NaN where one failed; `combined` makes [M] of
    weights of the channels. A part whose rewards all have weight 0 now gets 0 instead."""
    each = len(value_KM) // len(weights_K)
    if routes is None:
        return combined(weights_K.repeat_interleave(each))[None]
    nothing = torch.where(value_KM.isnan().any(0), torch.nan, 0.0).to(value_KM.dtype)
    own_PK = torch.where(routes.speaks_PK, weights_K, 0.0)
    return torch.stack([combined(own.repeat_interleave(each)) if bool(own.any()) else nothing for own in own_PK])


def with_parts(routes: Routes | None, names: Sequence[str]) -> list[str]:
    """Numbers that the log has of the whole, and of each part by a name of its own."""
    return [*names, *(f"part/{part}/{name}" for part in (routes.parts if routes else ()) for name in names)]


def means_of_parts(routes: Routes | None, found: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Means over parts, each of which counts alike, of numbers [b] that were `found` of each in turn; and these."""
    means = {name: mean_of_parts([one[name] for one in found]) for name in found[0]}
    parts = zip(routes.parts if routes else (), found, strict=routes is not None)
    return means | {f"part/{part}/{name}": value for part, own in parts for name, value in own.items()}


def mean_of_parts(values: Sequence[Float[Tensor, " b"]]) -> Float[Tensor, " b"]:
    """The mean over parts; of one it is that one."""
    return values[0] if len(values) == 1 else torch.stack(list(values)).mean(0)
