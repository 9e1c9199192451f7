"""What a LoRA and a network's own weights have in common as policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from flowrl.pipelines.weights.loading_choices import Split
from flowrl.runtime.placement import widest


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Held:
    """What a process holds of a weight that the network computes with."""

    values: Tensor
    """All of it, or where weights are split its rows."""
    dtype: torch.dtype
    """That the network computes in."""
    shape: tuple[int, ...]
    """Of the whole."""
    first: int = 0
    """Number of the first of these elements in the whole."""


class TrainedWeights:
    """What recipes and the loop need of a policy: `flowrl.pipelines.weights.lora.Policy`, or `FullWeights`."""

    network: nn.Module
    """The network that runs under it."""
    split: Split | None = None
    """The processes that each hold a part of every parameter; None if this one holds the whole."""
    parameters: dict[str, nn.Parameter]
    """What the optimizer moves, float32, by name and in a fixed order."""
    slots: dict[str, dict[str, Tensor]]
    """Copies of `parameters` by slot name."""
    scale: float = 1.0
    """The scale to compare a weight's magnitude with, to see whether training has diverged."""
    saved: ClassVar[str]
    """The name of its tensors in messages."""
    running = "policy"
    """The slot that the network holds now."""
    rest: torch.device | None = None
    """The device of copies; None for that of the parameters."""

    @property
    def trained(self) -> list[Tensor]:
        """What gradients are taken of, in the order of `parameters`: these themselves, unless a policy has others."""
        return list(self.parameters.values())

    def sum_dtype(self, device: torch.device) -> torch.dtype:
        """The dtype of gradient sums over micro-batches: the widest, if weights are few."""
        return widest(device)

    def settle(self) -> None:
        """Copies changed `parameters` into the network, if it computes with others; call it after every change."""

    def tensors(self) -> dict[str, Tensor]:
        """Detached copies of `parameters` by name."""
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def held(self) -> dict[str, Held]:
        """What the network computes with now, under the slot that it runs under, by name; in its own memory."""
        return {
            name: Held(values=own.detach(), dtype=own.dtype, shape=tuple(own.shape))
            for name, own in self.parameters.items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies tensors into `parameters`, and so into the network. The ValueError names or shapes differ."""
        check_same(self.parameters, tensors, what=self.saved)
        for name, parameter in self.parameters.items():
            parameter.data.copy_(tensors[name])
        self.settle()

    def keep_reference(self) -> None:
        """Sees to it that the slot "reference" is the network as it is now, before anything is trained: nothing to do
        for a LoRA, without which the network is that."""

    def add_slot(self, slot: str) -> None:
        """Keeps a copy of the policy under a name."""
        self.slots[slot] = {
            name: own.detach().to(self.rest or own.device, copy=True) for name, own in self.parameters.items()
        }

    def blend(self, slot: str, decay: float) -> None:
        """Moves a slot towards the policy: `slot <- decay * slot + (1 - decay) * policy`."""
        for name, tensor in self.slots[slot].items():
            tensor.lerp_(self.parameters[name].detach().to(tensor.device), 1.0 - decay)

    @contextmanager
    def under(self, slot: str) -> Iterator[None]:
        """Runs the network under a slot: "policy", "reference" (what it was before training) or one that was added; may
        be nested. Do not enter or leave it between a forward pass and its backward pass. Raises ValueError: there is no
        such slot, or no reference was kept."""
        if slot not in ("policy", "reference", *self.slots):
            raise ValueError(f"no weight slot {slot!r}: there are policy, reference, {', '.join(self.slots)}")
        outer = self.running
        self.change(outer, slot)
        try:
            yield
        finally:
            self.change(slot, outer)

    def change(self, old: str, new: str) -> None:
        """Leaves one slot and enters another; between the two the network holds the policy."""
        raise NotImplementedError


def check_same(wanted: Mapping[str, Tensor], given: Mapping[str, Tensor], what: str) -> None:
    """Refuses tensors of other names or shapes than those wanted."""
    missing, extra = sorted(wanted.keys() - given.keys()), sorted(given.keys() - wanted.keys())
    if missing or extra:
        raise ValueError(
            f"{what} does not fit this policy: {len(missing)} tensors missing (first: {missing[:1]}), {len(extra)} "
            f"unknown (first: {extra[:1]}). Set policy.target_modules to the layers that it was trained on"
        )
    for name, tensor in wanted.items():
        if tensor.shape != given[name].shape:
            narrow = min(tensor.shape) != min(given[name].shape)
            raise ValueError(
                f"{what} has shape {tuple(given[name].shape)} at {name}, this policy {tuple(tensor.shape)}: "
                f"{'set policy.lora_rank to its rank' if narrow else 'it was trained on another model'}"
            )
