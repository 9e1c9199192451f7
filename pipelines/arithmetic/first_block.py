"""First-Block Cache of diffusers, for the length of a rollout (`sampler.first_block_cache`).

The first block runs at every step. Where what it adds to the image, r, has changed by `mean|r - r'| / mean|r'|` below a
threshold since the last step that ran whole, the other blocks are left out, and what they added then is added again.
diffusers decides for all rows of a call at once, so an image depends on those that are drawn beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from typing import Any

from diffusers import CacheMixin, FirstBlockCacheConfig
from torch import Tensor, nn

from flowrl.pipelines.arithmetic.compiling import experts_of
from flowrl.samplers.guidance import Velocity

_UNLIKE = ("Flux2Transformer2DModel", "MotifVideoTransformer3DModel")
"""Networks whose last blocks give other streams than the first ones: a tensor of image and text, or the image twice."""
Cached = Callable[[Velocity], Velocity]
"""What a velocity goes through to be cached."""


class _Blocks(CacheMixin, nn.Module):  # type: ignore[misc]
    """The blocks of a network by the names that diffusers looks for. They are the network's own: hooks work there."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        for name, blocks in network.named_children():
            if isinstance(blocks, nn.ModuleList):
                # SD3's last block returns no text, and diffusers' cache wants some: it runs at every step.
                cached = [block for block in blocks if not vars(block).get("context_pre_only")]
                self.add_module(name, nn.ModuleList(cached))


def refuse_uncached(denoiser: nn.Module | None, model: str) -> None:
    """Refuses a model, by its denoiser without weights, whose blocks diffusers cannot cache."""
    for network in experts_of(denoiser):
        blocks: Any = _Blocks(network)
        try:  # there may be too few, some of which diffusers does not know what they give, or what they take
            blocks.enable_cache(FirstBlockCacheConfig())
            hooked = [type(block) for block in blocks.modules() if "forward" in vars(block)]
            fit = type(network).__name__ not in _UNLIKE
            fit &= all("hidden_states" in signature(block.forward).parameters for block in hooked)
        except (IndexError, ValueError):
            fit = False
        if not fit:
            raise ValueError(
                f"diffusers cannot cache the blocks of {type(network).__name__}, the network of {model}: leave "
                "first_block_cache out"
            )


@contextmanager
def first_block_cache(denoiser: nn.Module, threshold: float) -> Iterator[Cached]:
    """Inside, the velocities that went through what this yields are cached, with empty caches at first. A denoiser that
    is called several times a step, with the prompt and without, has a cache for each."""
    calls = Counter[nn.Module]()  # of this step

    def cached(velocity: Velocity) -> Velocity:
        def counted(x: Tensor, sigma: Tensor, timestep: Tensor) -> Tensor:
            calls.clear()
            return velocity(x, sigma, timestep)

        return counted

    with ExitStack() as inside:

        def enter(blocks: Any, network: nn.Module, _: Any) -> None:
            inside.enter_context(blocks.cache_context(str(calls[network])))
            calls[network] += 1

        for network in experts_of(denoiser):
            blocks: Any = _Blocks(network)
            blocks.enable_cache(FirstBlockCacheConfig(threshold=threshold))
            inside.callback(blocks.disable_cache)
            inside.callback(network.register_forward_pre_hook(partial(enter, blocks)).remove)
        yield cached
