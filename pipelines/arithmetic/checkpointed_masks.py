"""The mask of attention for Chroma's single-stream blocks where blocks are recomputed in the backward pass.

Stock leaves it out there and nowhere else (diffusers 0.42), so that an update with recomputed blocks would see another
network than the rollout did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diffusers import ChromaTransformer2DModel
from torch import nn

from flowrl.runtime.private_names import ChromaSingleTransformerBlock

Recompute = Callable[..., Any]
"""What calls a block (first) with its arguments, so that it is recomputed."""


def with_masks(network: nn.Module, again: Recompute) -> Recompute:
    """The function by which a network calls blocks that are recomputed, so that all of them get their mask. It is that
    of the double-stream blocks, which are called before the single-stream ones and with the same one."""
    if not isinstance(network, ChromaTransformer2DModel):
        return again
    masks: tuple[Any, ...] = ()

    def masked(block: nn.Module, *args: Any) -> Any:
        nonlocal masks
        if isinstance(block, ChromaSingleTransformerBlock):
            return again(block, *args, *(masks if len(args) == 3 else ()))
        masks = args[-1:]
        return again(block, *args)

    return masked
