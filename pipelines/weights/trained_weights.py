"""What a LoRA and a network's own weights have in common as policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from flowrl.pipelines.weights.loading_choices import Split


class TrainedWeights(Protocol):
    """What recipes and the loop need of a policy: `flowrl.pipelines.weights.lora.Policy`, or `FullWeights`."""

    network: nn.Module
    """The network that runs under it."""
    split: Split | None
    """The processes of which each holds a part of every parameter; None where this one holds the whole."""
    parameters: dict[str, nn.Parameter]
    """What the optimizer moves, float32, by name and in a fixed order."""
    slots: dict[str, dict[str, Tensor]]
    """Copies of `parameters` by slot name."""
    scale: float
    """What the magnitude of a weight is compared with where it may show that training has diverged."""

    @property
    def trained(self) -> list[Tensor]:
        """What gradients are taken of, in the order of `parameters`."""

    def sum_dtype(self, device: torch.device) -> torch.dtype:
        """The dtype that gradients of micro-batches are added up in."""

    def settle(self) -> None:
        """Gives the network what `parameters` have become; called after every change of them."""

    def tensors(self) -> dict[str, Tensor]:
        """Detached copies of `parameters` by name."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies tensors into `parameters`, and so into the network. The ValueError names or shapes differ."""

    def keep_reference(self) -> None:
        """Sees to it that the slot "reference" is the network as it is now, before anything is trained."""

    def add_slot(self, slot: str) -> None:
        """Keeps a copy of the policy under a name."""

    def blend(self, slot: str, decay: float) -> None:
        """Moves a slot towards the policy: `slot <- decay * slot + (1 - decay) * policy`."""

    def under(self, slot: str) -> AbstractContextManager[None]:
        """Runs the network under a slot: "policy", "reference" or one that was added; may be nested. Raises ValueError:
        there is no such slot."""


class Switching(Protocol):
    """A policy that can be changed for one of its slots."""

    slots: dict[str, dict[str, Tensor]]
    running: str
    """The slot that the network holds now."""

    def change(self, old: str, new: str) -> None:
        """Leaves one slot and enters another."""


@contextmanager
def holding(policy: Switching, slot: str) -> Iterator[None]:
    """Inside, the network holds a slot; see `TrainedWeights.under`. Raises ValueError: there is no such slot."""
    if slot not in ("policy", "reference", *policy.slots):
        raise ValueError(f"no weight slot {slot!r}: there are policy, reference, {', '.join(policy.slots)}")
    outer = policy.running
    policy.change(outer, slot)
    try:
        yield
    finally:
        policy.change(slot, outer)


def move_towards(kept: Mapping[str, Tensor], parameters: Mapping[str, Tensor], decay: float) -> None:
    """`kept <- decay * kept + (1 - decay) * parameters`, in place."""
    for name, tensor in kept.items():
        tensor.lerp_(parameters[name].detach().to(tensor.device), 1.0 - decay)
