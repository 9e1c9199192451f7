"""SD3's joint attention through diffusers' dispatcher, so that its backends can be chosen as for other families.

`SD3Transformer2DModel` still calls torch's attention directly: `set_attention_backend` has no effect on it (and becomes
the default of every other model in the process). The processor here computes the same, bit for bit with the native
backend, and reads its backend from itself.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor, nn


class JointAttention:
    """Processor of one joint attention: pictures' tokens and the prompt's attend to all of both.

    Query, key and value of both streams `[b, n, heads * d]` are split into heads, normalised where the model does, and
    joined along the tokens, pictures first.
    """

    _attention_backend: Any = None
    _parallel_config: Any = None

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attended pictures' tokens, and the prompt's where there are any."""

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
        pictures = attended[:, : hidden_states.shape[1]]
        pictures = attn.to_out[1](attn.to_out[0](pictures))
        if encoder_hidden_states is None:
            return pictures
        prompt = attended[:, hidden_states.shape[1] :]
        return pictures, prompt if attn.context_pre_only else attn.to_add_out(prompt)


def dispatched(transformer: nn.Module) -> None:
    """Gives every attention of an SD3 transformer its own processor, and names its blocks for regional compilation."""
    for module in transformer.modules():
        if hasattr(module, "set_processor") and hasattr(module, "to_q"):
            module.set_processor(JointAttention())  # type: ignore[operator]
    transformer._repeated_blocks = ["JointTransformerBlock"]  # type: ignore[assignment]
