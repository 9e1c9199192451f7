"""The policy that trains the network's own weights, all of them or those of some layers.

What the optimizer moves are masters in float32. Where the network computes in float32 on the masters' device, a master
is the network's weight itself; elsewhere the network holds working copies, the masters rounded to its dtype after every
change, so that rollout and update run on the same numbers. Gradients are those of the working copies.

`optim.offload` moves masters, moments and copies to the host. Where the network is split over processes
(`parallel.shard`), its parts are the masters, and all of this is of a part. docs/cards.md has the bytes of each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flowrl.pipelines.weights.loading_choices import Split
from flowrl.pipelines.weights.lora import endings_of
from flowrl.pipelines.weights.parallelize import computing_dtypes, first_held, own_part
from flowrl.pipelines.weights.trained_weights import Held, TrainedWeights


def trained_names(network: nn.Module, targets: Sequence[str] | None) -> list[str]:
    """Names of the weights that are trained, biases and norms among them, in the network's order; of any copy of it,
    also one on the meta device. `targets` are endings of the names of modules, of which all weights are trained:
    "attn.to_q" fits every module whose name ends in ".attn.to_q". None trains all weights. Raises ValueError: a target
    matches no module with weights; names some that exist."""
    names = [name for name, _ in network.named_parameters()]
    if targets is None:
        return names
    chosen = set[str]()
    for target in targets:
        places = [f"{name}." for name, _ in network.named_modules() if f".{name}".endswith(f".{target}")]
        if not (bound := {name for name in names if name.startswith(tuple(places))}):
            endings = endings_of(name.rpartition(".")[0] for name in names)
            raise ValueError(
                f"policy.target_modules: {target!r} matches no module of {type(network).__name__} that has weights, so "
                f"nothing would be trained there. Modules end in: {endings}"
            )
        chosen |= bound
    return [name for name in names if name in chosen]


def working_weights(network: nn.Module, targets: Sequence[str] | None) -> dict[str, nn.Parameter]:
    """A network's weights of `trained_names`, by name; all of its weights are frozen."""
    own = dict(network.requires_grad_(False).named_parameters())
    return {name: own[name] for name in trained_names(network, targets)}


class FullWeights(TrainedWeights):
    """A network's own weights as a policy; see the file's docstring. `parameters` are masters, `slots` copies where the
    masters lie, or on the host, and `scale` is the largest weight in magnitude before training, at least 1."""

    saved = "the saved model"

    def __init__(
        self,
        network: nn.Module,
        *,
        targets: Sequence[str] | None = None,
        offload: bool = False,
        split: Split | None = None,
    ) -> None:
        """Takes the weights of a loaded network as they are, those of `trained_names`; what is not trained is frozen.
        With `offload` copies lie in the host's memory, and masters that the network does not compute with. `split` are
        the processes that it is split over, with masters."""
        self.network, self.split = network, split
        self._working = working_weights(network, targets)
        self.rest = torch.device("cpu") if offload else None
        self._rounded = dict[str, nn.Parameter]()  # those that are not masters
        self.parameters = dict[str, nn.Parameter]()
        for name, weight in self._working.items():
            weight.requires_grad_(True)
            device = self.rest or weight.device
            if split is not None:
                self.parameters[name] = nn.Parameter(own_part(weight))
            elif weight.dtype == torch.float32 and weight.device == device:
                self.parameters[name] = weight
            else:
                self.parameters[name] = nn.Parameter(weight.detach().to(device, torch.float32))
                self._rounded[name] = weight
        largest = [1.0, *(float(one.values.abs().max()) for one in self.held().values() if one.values.numel())]
        self.scale = max(largest if split is None else split.gather(max(largest)))
        self.slots: dict[str, dict[str, Tensor]] = {}
        self._reference: dict[str, Tensor] | None = None

    def held(self) -> dict[str, Held]:
        """What the network has of the policy, rounded or the masters, which a gathering rounds where it is split."""
        dtypes, found = computing_dtypes(self.network), dict[str, Held]()
        for name, master in self.parameters.items():
            values, weight = self._rounded.get(name, master).detach(), self._working[name]
            found[name] = Held(values=values, dtype=dtypes[name], shape=tuple(weight.shape), first=first_held(weight))
        return found

    @property
    def trained(self) -> list[Tensor]:
        """What the network computes with."""
        return list(self._working.values())

    def sum_dtype(self, device: torch.device) -> torch.dtype:
        """Float32: float64 would take 4 bytes more of every weight of the network, where a LoRA has few. Sums then
        depend in their last digits on how a batch is split into micro-batches."""
        return torch.float32

    def settle(self) -> None:
        """Copies the changed masters into the network."""
        with torch.no_grad():
            for name, weight in self._rounded.items():
                weight.copy_(self.parameters[name])

    def keep_reference(self) -> None:
        """Keeps the current weights for the slot "reference", in the network's dtype; parts as masters."""
        self._reference = {
            name: one.values.to(self.rest or one.values.device, copy=True) for name, one in self.held().items()
        }

    def change(self, old: str, new: str) -> None:
        """Slots are copied over the network's weights, or change places with masters that it computes with."""
        if new == "reference" and self._reference is None:
            raise ValueError("the weights before training were not kept: call keep_reference before they change")
        self.running = new
        for slot, entered in ((old, False), (new, True)) if old != new else ():
            if slot == "policy":
                continue
            kept = (self._reference or {}) if slot == "reference" else self.slots[slot]
            for name, master in self.parameters.items():
                if name in self._rounded:
                    self._rounded[name].data.copy_(kept[name] if entered else master.data)
                else:  # the only copy of the policy: the two change places, in their memory, which may be a part
                    policy = master.detach().clone()
                    master.data.copy_(kept[name])
                    kept[name].copy_(policy)
