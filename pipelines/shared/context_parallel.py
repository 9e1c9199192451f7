"""Processes that share the tokens of one image or video (`parallel.context`): context parallelism.

Each process holds the whole denoiser and computes a part of the tokens. Where tokens are split and joined is diffusers'
own plan of a network class (`_cp_plan`), set up by its hooks. Attention, which looks at all tokens, is exchanged as in
DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv 2309.14509): before it a process trades its tokens of all heads for all
tokens of its heads, after it back.

    [b, n / c, h, d]  -> all-to-all ->  [b, n, h / c, d]  -> attention -> all-to-all ->  [b, n / c, h, d]

The exchange here stands in place of diffusers', which keeps queries and keys in float32 beside values of 16 bits where
autocast has norms in float32, so that its backward pass, out of autocast's reach, refuses them; it also computes
torch's attention a second time there, and knows only kernels of its own list. Here every kernel of
`pipeline.attention` runs as on one process, with its own backward pass. An exchange moves numbers and computes nothing
either way, so that forward passes are those of one process up to the rounding of products with fewer rows.

Gradients: what is joined behind the last layer is split again on the way back, and not added up. The gradients of a
group's processes add up to those of one process, see `flowrl.training.run.Run.total_gradient`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

from flowrl.pipelines.arithmetic.attention import give_within
from flowrl.pipelines.arithmetic.compiling import first_expert
from flowrl.pipelines.shared.cards import Size, tokens
from flowrl.runtime import private_names

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from flowrl.pipelines.shared.contract import ModelFamily

SPLIT_FAMILIES = ("flux", "kontext", "flux2", "ltx_video", "qwen_image", "qwen_image_edit", "wan")
"""Families whose networks diffusers knows how to split."""


def refuse_unsplit(
    family: ModelFamily, model: str, options: Mapping[str, Any], context: int, sizes: Sequence[Size | None]
) -> None:
    """Refuses models whose tokens or heads do not divide by a number of processes, before weights load."""
    if family.name not in SPLIT_FAMILIES:
        raise ValueError(
            f"parallel.context is {context}, but diffusers has no plan how to split the tokens of family "
            f"{family.name}: set parallel.context=1, or take one of {', '.join(SPLIT_FAMILIES)}"
        )
    network = family.meta_denoiser(model, {})
    if network is None:
        return
    network = first_expert(network)
    _refuse_heads(network, context)
    text = family.text_tokens(model, options)
    plan = private_names.split_plan(network).values()
    splits_text = any(isinstance(entry, Mapping) and "encoder_hidden_states" in entry for entry in plan)
    if splits_text and text % context:
        raise ValueError(
            f"{text} tokens of a prompt cannot be split evenly over parallel.context={context} processes: set "
            f"pipeline.max_sequence_length to a multiple of {context}"
        )
    for size in filter(None, sizes):
        for sources, count in image_tokens(family, model, options, size).items():
            if count % context:
                frames = f" x {size.num_frames} frames" if size.num_frames else ""
                beside = "" if not sources else " with a source image"
                beside = f" with {sources} source images" if sources > 1 else beside
                raise ValueError(
                    f"{size.width} x {size.height}{frames}{beside} is {count} tokens of {model}, which cannot be split "
                    f"evenly over parallel.context={context} processes: choose another size"
                    f"{' of either' if sources else ''}, or another number"
                )


def image_tokens(family: Any, model: str, options: Mapping[str, Any], size: Size) -> dict[int, int]:
    """Tokens of what is drawn and of its source images, by the number of source images that a prompt may have. Raises
    ValueError: the model cannot draw this size."""
    card, chosen, source = family.card(model), family.chosen(options), 0
    grid = family.grid(card.network)
    drawn = tokens(grid, card, size, videos=family.videos)
    if family.source_size is not None:
        height, width = family.source_size(card, chosen, size)
        source = tokens(grid, card, Size(height=height, width=width), videos=False)
    least, most = family.count_sources(card, chosen) if family.count_sources else family.num_sources or (0, 0)
    return {count: drawn + count * source for count in range(least, most + 1)}


def share_tokens(pipeline: Any, mesh: DeviceMesh) -> None:
    """Has the processes of a mesh with one dimension share the tokens of every image; LoRA is added before. Raises
    ValueError: the network's heads do not divide."""
    for one in pipeline.sizes:
        one.context = mesh.size()
    settings = private_names.ContextParallelConfig(ulysses_degree=mesh.size())
    private_names.share_mesh(settings, mesh)
    whole = private_names.ParallelConfig(context_parallel_config=settings)
    private_names.share_attention(_attend)  # reached with a `ParallelConfig` alone
    warnings.filterwarnings("ignore", message=".*all_gather_tensor.*", category=FutureWarning)  # diffusers' hooks
    for network in pipeline.experts.values():
        _refuse_heads(network, mesh.size())
        give_within(network, pipeline.attention)
        for module in network.modules():
            processor = getattr(module, "processor", None)
            if isinstance(processor, private_names.ReadsParallel):
                private_names.set_parallel(processor, whole)
        private_names.apply_context_parallel(network, settings, private_names.split_plan(network))


def _refuse_heads(network: Any, context: int) -> None:
    heads = int(network.config.num_attention_heads)
    if heads % context:
        raise ValueError(
            f"parallel.context={context} processes share the heads of attention, and {heads} heads do not divide by "
            f"{context}: choose one of {', '.join(str(n) for n in range(1, heads + 1) if heads % n == 0)}"
        )


def _attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, *_: Any, _parallel_config: Any, **__: Any,
) -> Tensor:  # fmt: skip
    """Attention of this process's tokens `[b, n / c, h, d]` to those of all; `attn_mask` is of its own keys."""
    group = private_names.mesh_of(_parallel_config).get_group()
    mask = None if attn_mask is None else _whole_mask(attn_mask, key.shape[1], query.shape[2], group)
    query, key, value = (_trade(x, group) for x in (query, key, value))
    attended = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale
    )
    return _trade(attended, group)


def _trade(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Own tokens `[b, n, h, d]` of all heads -> own heads of all tokens `[b, h / c, c * n, d]`; and the other way."""
    by_process = x.unflatten(2, (group.size(), -1)).permute(2, 1, 0, 3, 4)
    found: Tensor = _Exchange.apply(by_process, group)
    return found.flatten(0, 1).permute(1, 2, 0, 3)


class _Exchange(torch.autograd.Function):
    """Row i of a tensor goes to process i, from which row i comes; so do gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradients[0], ctx.group), None


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    flat: Tensor = private_names.wait_tensor(
        private_names.all_to_all_single(x.contiguous().flatten(), None, None, group)
    )
    return flat.view(x.shape)


def _whole_mask(mask: Tensor, keys: int, heads: int, group: dist.ProcessGroup) -> Tensor:
    """A mask of own keys `[b, 1 or h, 1, n]` as one of all keys `[b, 1 or h / c, 1, c * n]`, in the order of tokens.
    Raises ValueError: the mask differs from query to query, which families with a plan have none of."""
    if mask.ndim != 4 or mask.shape[2] != 1 or mask.shape[-1] != keys:
        raise ValueError(f"a mask of shape {tuple(mask.shape)} cannot be shared by processes: set parallel.context=1")
    own = mask.contiguous().to(torch.uint8) if mask.dtype == torch.bool else mask.contiguous()
    found = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(found, own, group=group)
    whole = torch.cat(found, dim=-1).to(mask.dtype)
    return whole if whole.shape[1] == 1 else whole.unflatten(1, (group.size(), -1))[:, group.rank()]
