"""Rewards whose networks rest on the host and are on the device only while they score."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from flowrl.rewards.base import Reward, RewardInputs, RewardOutput, changed
from flowrl.runtime.placement import Resting


def at_rest(reward: Reward, device: torch.device, known: dict[int, Resting], *, holds: bool) -> Reward:
    """A reward that does not learn, with its networks on the host; each call copies them to the device. `known` has by
    identity what already rests: rewards that share a network share its rest. `holds` says that it must hold one. Raises
    ValueError: a network that it should hold is not found, or cannot be moved."""
    found = {id(network): network for network in networks_of(reward)}
    way_out = "leave rewards out of pipeline.offload"
    if holds and not found:
        raise ValueError(f"pipeline.offload: the networks of reward {reward.name!r} were not found: {way_out}")
    for name, network in found.items():
        if name not in known:
            try:
                known[name] = Resting([network], device)
            except ValueError as error:
                raise ValueError(f"pipeline.offload: reward {reward.name!r} cannot rest, {error}: {way_out}") from error
    resting = [rest for name, rest in known.items() if name in found]  # in one order, so no two threads deadlock
    if not resting:
        return reward

    def awake(inputs: RewardInputs) -> RewardOutput:
        with ExitStack() as stack:
            for rest in resting:
                stack.enter_context(rest.awake())
            return reward(inputs)

    return changed(reward, awake)


def networks_of(value: Any) -> Iterator[nn.Module]:
    """The networks that a reward holds: among bound arguments, fields and closures of this package's own objects."""
    seen, left = set[int](), [value]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, nn.Module):
            yield one
        elif isinstance(one, partial):
            left += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, MethodType):
            left += [one.__self__, one.__func__]
        elif isinstance(one, FunctionType):
            left += [cell.cell_contents for cell in one.__closure__ or ()]
        elif isinstance(one, Mapping):
            left += one.values()
        elif isinstance(one, Sequence) and not isinstance(one, str | bytes):
            left += one
        elif type(one).__module__.startswith("flowrl."):
            slots = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
            left += [getattr(one, name) for name in (*slots, *getattr(one, "__dict__", {})) if hasattr(one, name)]
