"""Attention of two families in place of stock's: it computes the same.

SD3's joint attention goes through diffusers' dispatcher, so that its backends can be chosen as for other families.
`SD3Transformer2DModel` still calls torch's attention directly: `set_attention_backend` has no effect on it (and becomes
the default of every other model in the process). The processor here is equal bit for bit with the native backend, and
reads its backend from itself.

Sana's linear attention sums over all tokens and divides by such a sum. Stock turns to float32 for that, which autocast
undoes at the matrix products; the processor here is out of autocast's reach there. In float32 it is equal bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.attention_processor import SanaLinearAttnProcessor2_0
from torch import Tensor, nn
from torch.nn import functional as F


class JointAttention:
    """Processor of one joint attention: images' tokens and the prompt's attend to all of both.

    Query, key and value of both streams `[b, n, heads * d]` are split into heads, normalised where the model does, and
    joined along the tokens, images first.
    """

    _attention_backend: Any = None
    _parallel_config: Any = None

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attended images' tokens, and the prompt's where there are any."""

        def heads(projected: Tensor, norm: Any) -> Tensor:
            split = projected.unflatten(-1, (attn.heads, -1))
            return split if norm is None else norm(split)

        query = heads(attn.to_q(hidden_states), attn.norm_q)
        key = heads(attn.to_k(hidden_states), attn.norm_k)
        value = heads(attn.to_v(hidden_states), None)
        if encoder_hidden_states is not None:
            text = encoder_hidden_states
            query = torch.cat([query, heads(attn.add_q_proj(text), attn.norm_added_q)], dim=1)
            key = torch.cat([key, heads(attn.add_k_proj(text), attn.norm_added_k)], dim=1)
            value = torch.cat([value, heads(attn.add_v_proj(text), None)], dim=1)
        attended = dispatch_attention_fn(
            query, key, value, backend=self._attention_backend, parallel_config=self._parallel_config
        )
        attended = attended.flatten(2).to(query.dtype)
        images = attended[:, : hidden_states.shape[1]]
        images = attn.to_out[1](attn.to_out[0](images))
        if encoder_hidden_states is None:
            return images
        prompt = attended[:, hidden_states.shape[1] :]
        return images, prompt if attn.context_pre_only else attn.to_add_out(prompt)


def dispatched(transformer: nn.Module) -> None:
    """Gives every attention of an SD3 transformer its own processor, and names its blocks for regional compilation."""
    for module in transformer.modules():
        if hasattr(module, "set_processor") and hasattr(module, "to_q"):
            module.set_processor(JointAttention())  # type: ignore[operator]
    transformer._repeated_blocks = ["JointTransformerBlock"]  # type: ignore[assignment]


def linear_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`sum_j v_j (k_j . q_i) / sum_j (k_j . q_i)` of each token i, in float32 whatever autocast says.

    Args:
        query: not negative, `[b, heads, d, n]`.
        key: not negative, `[b, heads, d, m]`.
        value: `[b, heads, e, m]`.

    Returns:
        float32 `[b, heads, e, n]`.
    """
    with torch.autocast(query.device.type, enabled=False):
        counted = F.pad(value.float(), (0, 0, 0, 1), value=1.0)  # a row of ones, whose result is the divisor
        summed = counted @ key.float().transpose(2, 3) @ query.float()
        return summed[:, :, :-1] / (summed[:, :, -1:] + 1e-15)


class LinearAttention:
    """Processor of one linear attention, with relu as its feature map."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Attended tokens `[b, n, c]`; there is no mask, as in stock."""
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states

        def heads(projected: Tensor, norm: Any = None) -> Tensor:
            normed = projected if norm is None else norm(projected)
            return normed.transpose(1, 2).unflatten(1, (attn.heads, -1))

        attended = linear_attention(
            F.relu(heads(attn.to_q(hidden_states), attn.norm_q)),
            F.relu(heads(attn.to_k(source), attn.norm_k)),
            heads(attn.to_v(source)),
        )
        tokens = attended.flatten(1, 2).transpose(1, 2).to(hidden_states.dtype)
        tokens = attn.to_out[1](attn.to_out[0](tokens))
        return tokens.clip(-65504, 65504) if tokens.dtype == torch.float16 else tokens  # the largest that it holds


def exact_linear(transformer: nn.Module) -> None:
    """Gives every linear attention of a Sana transformer its own processor."""
    for module in transformer.modules():
        if isinstance(getattr(module, "processor", None), SanaLinearAttnProcessor2_0):
            module.set_processor(LinearAttention())  # type: ignore[operator]
