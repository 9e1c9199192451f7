"""Measures one evaluation of a family's denoiser on the meta device: parameters, FLOPs, and saved activations.

The family (`flowrl.pipelines.ModelFamily`) gives the network and its arguments. A large network runs with only a few of
its blocks: see `flowrl.pipelines.shared.like_blocks`. Counts are whole numbers, so this is exact.

FLOPs: 1 multiply-add is 2. Forward and backward passes really run, with the LoRA in place and everything else frozen,
so frozen weights cost no gradient. Attention counts by its formula, `4 b h q k d` forward and twice that backward, as
in fused kernels without recomputation.

Activations: the distinct storages that autograd saves, under the casts of autocast, with attention that keeps its
inputs, its output and one number per row. The peak of everything else (gradients in flight, results used once) is
counted too. The allocator's waste is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from flowrl.pipelines import ModelFamily
from flowrl.pipelines.arithmetic.compiling import first_expert, repeated_blocks
from flowrl.pipelines.shared.like_blocks import fewest, names_a_block
from flowrl.pipelines.weights.full_weights import trained_names
from flowrl.pipelines.weights.lora import check_targets
from flowrl.pipelines.weights.quantize import large_layers
from flowrl.planning.traces import Fused, Saved, Trace, cast


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """The trained weights of a denoiser."""

    targets: Sequence[str] | None
    """Layers of the LoRA, or layers whose own weights are trained; None trains all weights."""
    rank: int
    """Rank of the LoRA; 0 trains the weights themselves."""
    magnitudes: bool = False
    """Whether the LoRA has a trained magnitude for each output of a layer (DoRA)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """A denoiser with its trained weights, and its evaluation of one sample."""

    trained: int
    """Trained parameters over all experts: those of the LoRA, or the weights themselves."""
    weights: DenoiserWeights
    """The checkpoint's parameters by their place, over all experts."""
    attended: int
    """Largest number of tokens in one attention; 0 without attention."""
    forward: float
    """FLOPs of a forward pass with the LoRA."""
    backward: float
    """FLOPs of the backward pass after it."""
    in_attention: int
    """FLOPs of attention in `forward`."""
    saved: int
    """Bytes that autograd saves for the backward pass."""
    outside: int
    """Bytes of them that gradient checkpointing keeps outside blocks."""
    largest: int
    """Bytes that are saved within a block, the most of one."""
    beside: int
    """Peak bytes of both passes besides the saved ones."""
    working: int
    """Peak bytes of an evaluation without gradient."""
    blocks: int
    """Number of blocks that are checkpointed one by one; 0 if the network cannot be checkpointed."""

    @property
    def parameters(self) -> int:
        """Parameters of the checkpoint, over all experts."""
        return self.weights.parameters

    @property
    def attention(self) -> float:
        """Share of attention in `forward`."""
        return self.in_attention / self.forward

    @property
    def saved_checkpointed(self) -> int:
        """`saved` with gradient checkpointing, the block that is recomputed included."""
        return self.outside + self.largest if self.blocks else self.saved

    def __add__(self, other: Network) -> Network:
        sums = {name: getattr(self, name) + getattr(other, name) for name in _LINEAR}
        most = {name: max(getattr(self, name), getattr(other, name)) for name in _MOST}
        return replace(self, **sums, **most)

    def block(self, more: Network, times: int) -> Network:
        """So many times the counts of one block, which is the difference of `more` to this."""
        linear = {name: times * (getattr(more, name) - getattr(self, name)) for name in _LINEAR if name != "weights"}
        return replace(more, **linear, weights=more.weights.beyond(self.weights, times))


_MOST = ("attended", "largest", "beside", "working")
_LINEAR = tuple(f.name for f in fields(Network) if f.name not in _MOST)


@dataclass(frozen=True, kw_only=True, slots=True)
class FewBlocks:
    """Small networks from which a network with many blocks is measured."""

    least: nn.Module
    """Network with as few blocks as possible, or with all of them."""
    more: Sequence[tuple[int, nn.Module]] = ()
    """For each kind of block: how many `least` lacks, and a network with one more than `least`."""


def few_blocks(family: ModelFamily, model: str, targets: Sequence[str]) -> FewBlocks | None:
    """The networks from which a model's denoiser is measured; None if the model is unknown. If `targets`, the LoRA's
    layers, name a block, the network has all blocks."""
    kinds = {} if names_a_block(targets) else family.block_kinds(model)
    few = fewest(kinds)
    least = family.meta_denoiser(model, few)
    if least is None:
        return None
    more = [
        (kinds[kind] - count, family.meta_denoiser(model, {**few, kind: count + 1}))
        for kind, count in few.items()
        if kinds[kind] > count
    ]
    return FewBlocks(least=least, more=[(lacking, network) for lacking, network in more if network is not None])


def measure(denoisers: FewBlocks, call: dict[str, Any], *, trained: Trained, dtype: torch.dtype) -> Network:
    """Forward and backward of one sample. Denoisers are on the meta device and get a LoRA in float32 here; `call` are
    the network's arguments, `dtype` is of the checkpoint's weights and the arithmetic. Raises ValueError: a target
    matches no layer."""
    least = total = _count(denoisers.least, call, trained, dtype)
    for lacking, network in denoisers.more:
        total += least.block(_count(network, call, trained, dtype), lacking)
    return total


def without_gradient(denoisers: FewBlocks, call: dict[str, Any]) -> tuple[int, int]:
    """FLOPs and peak bytes of an evaluation without gradient, for networks with their trained weights."""
    least, working = _evaluate(denoisers.least, call)
    flops = least
    for lacking, network in denoisers.more:
        more, own = _evaluate(network, call)
        flops += lacking * (more - least)
        working = max(working, own)
    return flops, working


def _evaluate(denoiser: nn.Module, call: Mapping[str, Any]) -> tuple[int, int]:
    network = first_expert(denoiser)
    dtype = next(network.parameters()).dtype
    given = cast(dict(call), dtype)
    with torch.no_grad(), Fused(dtype) as fused, Trace() as trace:
        network(**given)
    return trace.total + fused.attention, trace.peak


def _count(denoiser: nn.Module, call: Mapping[str, Any], trained: Trained, dtype: torch.dtype) -> Network:
    check_targets(denoiser, (trained.targets or ()) if trained.rank else ())
    weights = weights_of(denoiser)
    added = _prepare(denoiser, trained)
    network: Any = first_expert(denoiser)
    nn.Module.to(network, dtype)  # diffusers' own `to` warns of parts it would keep in float32
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float() if trained.rank else parameter.data
            parameter.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))  # counted apart
    _, working = _evaluate(network, call)
    given = cast(dict(call), dtype)
    saved = Saved(network)
    with suppress(AttributeError, TypeError, ValueError):  # it has no blocks that could be recomputed
        network.enable_gradient_checkpointing(saved.block)
    with saved_tensors_hooks(saved.pack, lambda tensor: tensor), Trace() as trace:
        with Fused(dtype) as fused:  # not around the backward pass, where it would only be asked
            answer = network(**given)
        while not isinstance(answer, Tensor):  # one of a tuple, and of Z-Image's list of samples
            answer = answer[0]
        forward = trace.total
        answer.float().sum().backward()
    return Network(
        weights=weights, trained=added, attended=fused.attended,
        forward=forward + fused.attention, backward=trace.total - forward + 2 * fused.attention,
        in_attention=fused.attention, saved=saved.total, outside=saved.outside, largest=saved.largest,
        beside=max(0, trace.peak - saved.total), working=working, blocks=saved.blocks,
    )  # fmt: skip


def _prepare(denoiser: nn.Module, trained: Trained) -> int:
    """Gives a denoiser its LoRA, or marks its trained weights; returns the number of trained parameters."""
    magnitudes = 0
    if trained.rank:
        denoiser.requires_grad_(False)
        endings = tuple(f".{target}" for target in trained.targets or ())
        bound = [
            name
            for name, part in denoiser.named_modules()
            if isinstance(part, nn.Linear) and f".{name}".endswith(endings)
        ]
        for name in bound:
            layer: Any = denoiser.get_submodule(name)
            magnitudes += layer.out_features * trained.magnitudes
            parent, _, own = name.rpartition(".")
            setattr(denoiser.get_submodule(parent), own, _WithLora(layer, trained.rank))
    else:
        chosen = set(trained_names(denoiser, trained.targets))
        for name, parameter in denoiser.named_parameters():
            parameter.requires_grad_(name in chosen)
    return magnitudes + sum(parameter.numel() for parameter in denoiser.parameters() if parameter.requires_grad)


class _WithLora(nn.Module):
    """A linear layer with a LoRA: the operations and casts of PEFT, whose import takes longer than a plan."""

    def __init__(self, base: Any, rank: int) -> None:
        super().__init__()
        with torch.device("meta"):
            self.base = base
            self.down = nn.Linear(base.in_features, rank, bias=False)
            self.up = nn.Linear(rank, base.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        """The frozen weight, of which networks ask the dtype."""
        weight: Tensor = self.base.weight
        return weight

    @property
    def bias(self) -> Tensor | None:
        """Likewise."""
        bias: Tensor | None = self.base.bias
        return bias

    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x)
        change = self.up(self.down(x.to(self.down.weight.dtype))) * 1.0
        return (result + change).to(result.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class DenoiserWeights:
    """Parameters of a denoiser, of all experts."""

    parameters: int
    blocks: int = 0
    """Those of the blocks that repeat."""
    matrices: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """Shape of a layer that can be quantised, (outputs, inputs) -> how many there are."""
    largest_block: int = 0
    """Parameters of the largest block."""
    experts: int = 1
    """Networks of which an evaluation calls one."""

    def __add__(self, other: DenoiserWeights) -> DenoiserWeights:
        shapes = {**self.matrices, **other.matrices}
        return replace(
            self,
            parameters=self.parameters + other.parameters,
            blocks=self.blocks + other.blocks,
            matrices={shape: self.matrices.get(shape, 0) + other.matrices.get(shape, 0) for shape in shapes},
            largest_block=max(self.largest_block, other.largest_block),
        )

    def beyond(self, less: DenoiserWeights, times: int) -> DenoiserWeights:
        """So many times the difference of this to `less`."""
        more = {shape: times * (count - less.matrices.get(shape, 0)) for shape, count in self.matrices.items()}
        return replace(
            self,
            parameters=times * (self.parameters - less.parameters),
            blocks=times * (self.blocks - less.blocks),
            matrices=more,
        )


def weights_of(denoiser: nn.Module) -> DenoiserWeights:
    """Counts a denoiser's parameters, those of all experts."""
    experts = list(denoiser.values()) if isinstance(denoiser, nn.ModuleDict) else [denoiser]
    matrices: dict[tuple[int, int], int] = {}
    sizes = []
    try:
        found = repeated_blocks(first_expert(denoiser))
    except (AttributeError, TypeError):  # a network that names none
        found = []
    for block in found:
        sizes.append(sum(parameter.numel() for parameter in block.parameters()))
        for _, _, layer in large_layers(block):
            shape = (layer.out_features, layer.in_features)
            matrices[shape] = matrices.get(shape, 0) + len(experts)
    return DenoiserWeights(
        parameters=sum(parameter.numel() for parameter in denoiser.parameters()),
        blocks=sum(sizes) * len(experts),
        matrices=matrices,
        largest_block=max(sizes, default=0),
        experts=len(experts),
    )
