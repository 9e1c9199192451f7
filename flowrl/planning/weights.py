"""Counts a denoiser's parameters by place, for quantising and sharding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from flowrl.pipelines.arithmetic.compiling import first_expert, repeated_blocks
from flowrl.pipelines.weights.quantize import large_layers


@dataclass(frozen=True, kw_only=True, slots=True)
class DenoiserWeights:
    """Parameters of a denoiser, of all experts."""

    parameters: int
    """All."""
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
        return DenoiserWeights(
            parameters=times * (self.parameters - less.parameters),
            blocks=times * (self.blocks - less.blocks),
            matrices=more,
            largest_block=self.largest_block,
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
