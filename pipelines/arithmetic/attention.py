"""Kernels of attention on a loaded network, and attention of two families in place of stock's.

A kernel (`attention_words.KERNELS`) is set on the attention processors of one network, never for the process:
`set_attention_backend` of a diffusers model becomes the default of every other model, and does nothing to networks that
call torch's attention directly. Processors that go through diffusers' dispatcher read their backend from themselves.
Where a processor calls torch's attention directly (UNets, CogVideoX, Sana) or leaves its backend out (Qwen-Image-2.1
without a cache of the prompt), and for kernels that know nothing of autocast, it runs as it is with torch's attention
replaced within (`torch.overrides.TorchFunctionMode`): under autocast norms give queries and keys in float32, which
torch's attention casts and other kernels refuse.

SD3's joint attention goes through diffusers' dispatcher, so that its backends can be chosen as for other families:
`SD3Transformer2DModel` calls torch's attention directly. The processor here is equal to it bit for bit.

Sana's linear attention sums over all tokens and divides by such a sum. Stock turns to float32 for that, which autocast
undoes at the matrix products; the processor here is out of autocast's reach there. In float32 it is equal bit for bit.
So is SANA-Video's, which rotates queries and keys in the sum above and not in the divisor; stock takes that divisor in
the network's dtype, here it is float32 too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from flowrl.pipelines.arithmetic.attention_words import KERNELS, Known, Mask, check_here, check_word, choose, usable
from flowrl.runtime.capabilities import this_machine
from flowrl.runtime.private_names import (
    HUB_KERNELS,
    Attention,
    AttentionBackendName,
    AttentionModuleMixin,
    QwenImage21AttnProcessor,
    ReadsBackend,
    SanaLinearAttnProcessor2_0,
    SanaLinearAttnProcessor3_0,
    check_backend,
    dispatch_attention_fn,
    fetch_backend,
    set_backend,
)

Attend = Callable[..., Tensor]


class JointAttention:
    """Processor of one joint attention: image tokens and prompt tokens attend to all of both. Query, key and value of
    both streams `[b, n, heads * d]` are split into heads, normalised where the model does, and joined, images first."""

    _attention_backend: Any = None
    _parallel_config: Any = None

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attended image tokens, and prompt tokens if there are any."""

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


def dispatch_joint_attention(transformer: nn.Module) -> None:
    """Gives every attention of an SD3 transformer its own processor."""
    for module in transformer.modules():
        if isinstance(module, Attention):
            module.set_processor(JointAttention())


def linear_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`sum_j v_j (k_j . q_i) / sum_j (k_j . q_i)` of each token i, in float32 whatever autocast says.

    Query `[b, heads, d, n]` and key `[b, heads, d, m]` are not negative; value `[b, heads, e, m]`. Returns
    `[b, heads, e, n]`.
    """
    with torch.autocast(query.device.type, enabled=False):
        counted = F.pad(value.float(), (0, 0, 0, 1), value=1.0)  # a row of ones, whose result is the divisor
        summed = counted @ key.float().transpose(2, 3) @ query.float()
        return summed[:, :, :-1] / (summed[:, :, -1:] + 1e-15)


def _output(attn: Any, attended: Tensor, dtype: torch.dtype) -> Tensor:
    """Tokens `[b, n, c]` of what was attended, `[b, heads, d, n]`."""
    tokens: Tensor = attn.to_out[1](attn.to_out[0](attended.flatten(1, 2).transpose(1, 2).to(dtype)))
    return tokens


def rotary_linear_attention(query: Tensor, key: Tensor, value: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """`sum_j v_j (R_j k_j . R_i q_i) / sum_j (k_j . q_i)` of each token i, in float32 whatever autocast says. Query and
    key `[b, n, heads, d]` are not negative; value `[b, n, heads, e]`; `rotary` are cosines and sines of the rotations
    R, `[1, n, 1, d]`, each twice. Returns `[b, heads, e, n]`."""
    cos, sin = rotary[0][..., 0::2], rotary[1][..., 1::2]

    def rotated(x: Tensor) -> Tensor:
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)

    with torch.autocast(query.device.type, enabled=False):
        turned = (rotated(x).permute(0, 2, 3, 1).float() for x in (query, key))
        q, k, v = (x.permute(0, 2, 3, 1).float() for x in (query, key, value))
        rotated_q, rotated_k = turned
        inverse = 1 / (k.sum(dim=-1, keepdim=True).transpose(-2, -1) @ q + 1e-15)
        return v @ rotated_k.transpose(-1, -2) @ rotated_q * inverse


class LinearAttention:
    """Processor of one linear attention; with rotations of tokens that of videos."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Attended tokens `[b, n, c]`; there is no mask, as in stock."""
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states

        def heads(projected: Tensor, norm: Any = None) -> Tensor:
            return (projected if norm is None else norm(projected)).unflatten(2, (attn.heads, -1))

        # Relu is the feature map of linear attention.
        query = F.relu(heads(attn.to_q(hidden_states), attn.norm_q))
        key = F.relu(heads(attn.to_k(source), attn.norm_k))
        given = query, key, heads(attn.to_v(source))
        if rotary_emb is not None:
            return _output(attn, rotary_linear_attention(*given, rotary_emb), hidden_states.dtype)
        tokens = _output(attn, linear_attention(*(x.permute(0, 2, 3, 1) for x in given)), hidden_states.dtype)
        return tokens.clip(-65504, 65504) if tokens.dtype == torch.float16 else tokens  # the largest that it holds


def exact_linear(transformer: nn.Module) -> None:
    """Gives every linear attention of a Sana transformer, of images or videos, its own processor."""
    for module in transformer.modules():
        if isinstance(getattr(module, "processor", None), SanaLinearAttnProcessor2_0 | SanaLinearAttnProcessor3_0):
            module.set_processor(LinearAttention())  # type: ignore[operator]


def give_kernel(
    networks: Iterable[nn.Module], word: str, known: Known, dtype: torch.dtype, device: torch.device | str
) -> str:
    """Sets the kernel of a word on every attention of loaded networks, after a check of its gradient. Returns the
    kernel's word, what "auto" became. Raises ValueError: the word is refused, the kernel cannot be loaded or gives a
    wrong gradient, or nothing attends."""
    machine = this_machine(torch.device(device).type)
    check_word(word, dtype, known)
    check_here(word, machine)
    found = choose(word, machine, dtype, known)
    backend = AttentionBackendName(KERNELS[found].backend)
    try:
        check_backend(backend)
        fetch_backend(backend)
    except (RuntimeError, ValueError, OSError, ImportError, AttributeError) as error:
        raise ValueError(f"pipeline.attention={found} could not be loaded ({error}): choose auto") from error
    for size in sorted(set(known.head_sizes)) if found != "native" else ():
        check_backward(found, dtype=dtype, device=device, head_size=size, mask=known.mask)
    count = sum(_give(network, found) for network in networks)
    if not count and found != "native":
        raise ValueError(f"pipeline.attention={word}: this model has no attention whose kernel can be chosen")
    return found


def give_within(network: nn.Module, word: str) -> None:
    """Has the processors of a network call torch's attention and replaces that, also if a backend would do. Then code
    that calls torch's attention for them gets the kernel too."""
    _give(network, word, within=True)


@contextmanager
def kernels_put_back(network: nn.Module) -> Iterator[None]:
    """Afterwards every attention has its former processor again, whatever happened inside."""
    found = [module for module in network.modules() if isinstance(module, Attention | AttentionModuleMixin)]
    kept: list[tuple[Any, Any]] = [(module, module.processor) for module in found]
    try:
        yield
    finally:
        for module, processor in kept:
            module.set_processor(processor)


def _give(network: nn.Module, word: str, *, within: bool = False) -> int:
    """How many attentions of a network got the kernel."""
    kernel, count = KERNELS[word], 0
    for module in network.modules():
        if not isinstance(module, Attention | AttentionModuleMixin):
            continue
        processor: Any = copy(module.processor)  # one that other networks share stays as it is
        if isinstance(processor, LinearAttention):
            continue
        reads = isinstance(processor, ReadsBackend) and not isinstance(processor, QwenImage21AttnProcessor)
        direct = kernel.torchs and not kernel.casts and (word == "native" or not within)
        if reads:
            set_backend(processor, AttentionBackendName(kernel.backend if direct else "native"))
        stock = type(processor).__bases__[0] if isinstance(processor, _Given) else type(processor)
        replaced = not direct or (not reads and word != "native")
        processor.__class__ = _replacing_class(stock, word) if replaced else stock
        module.set_processor(processor)
        count += 1
    return count


@cache
def _replacing_class(stock: Any, word: str) -> Any:
    """A processor's class whose calls of torch's attention go to a kernel."""
    attend = attention_of(word)

    @wraps(stock.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _Instead(attend):
            return stock.__call__(self, *args, **kwargs)

    return type(f"{stock.__name__}_{word}", (stock, _Given), {"__call__": call})


class _Given:
    """Marks a processor's class with replaced attention; its first base is stock's."""


class _Instead(TorchFunctionMode):
    """Within, torch's attention is another function."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self.attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def attention_of(word: str) -> Attend:
    """A kernel as a function with the arguments of torch's attention, `[b, heads, n, d]` each."""
    kernel = KERNELS[word]

    def in_float32(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **more: Any) -> Tensor:
        """Torch's attention on float32 copies, in the dtype of the values, as autocast would give it."""
        mask = attn_mask.float() if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
        with torch.autocast(query.device.type, enabled=False):
            attended = F.scaled_dot_product_attention(query.float(), key.float(), value.float(), attn_mask=mask, **more)
        return attended.to(value.dtype)

    def by_backend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **more: Any) -> Tensor:
        """A kernel of diffusers' dispatcher, with queries and keys in the dtype of the values."""
        given = (x.to(value.dtype).transpose(1, 2) for x in (query, key, value))
        backend = AttentionBackendName(kernel.backend)
        attended: Tensor = dispatch_attention_fn(*given, attn_mask=attn_mask, backend=backend, **more)
        return attended.transpose(1, 2)

    return in_float32 if kernel.casts else by_backend


_INPUTS = ((64, 1.0, 56), (515, 1.0, 3), (64, 20.0, 56))
"""Tokens, what queries are multiplied by, and keys that the first row may read: a small attention, a long one that is
no multiple of any block and nearly all masked, and one whose softmax is as good as one-hot."""


def check_backward(
    word: str, *, dtype: torch.dtype, device: torch.device | str, head_size: int, mask: Mask = "none"
) -> None:
    """Runs a kernel forward and backward on three attentions, and compares with softmax written out in float32.

    Outputs and the gradients of queries, keys and values may differ by 5 % of the largest, bfloat16's rounding many
    times over; it looks for a gradient that is missing, not finite or wrong. Takes milliseconds. Raises ValueError: the
    kernel cannot run so, or its output or a gradient is not that of attention.
    """

    def written_out(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return torch.softmax(query @ key.transpose(2, 3) / query.shape[-1] ** 0.5 + bias, -1) @ value

    for tokens, scale, keys in _INPUTS:
        rows, heads = 2, 2
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(rows, heads, tokens, head_size, generator=generator) for _ in range(4)]
        given = [x.to(device, dtype) for x in (scale * drawn[0], *drawn[1:])]
        read = torch.ones(rows, 1, 1, tokens, dtype=torch.bool, device=device)
        if mask != "none":
            read[0, ..., keys:] = False
        bias = torch.zeros(read.shape, device=device).masked_fill(~read, -10000.0)
        masks = {"none": None, "keys": read, "bias": bias.to(dtype)}
        try:
            found = _with_gradients(partial(attention_of(word), attn_mask=masks[mask]), given)
        except (RuntimeError, ValueError, TypeError) as error:
            raise ValueError(
                f"pipeline.attention={word} cannot run forward and backward here, on {device} in {dtype} with heads of "
                f"{head_size} ({error}): choose auto"
            ) from error
        wanted = _with_gradients(partial(written_out, bias=bias), [x.float() for x in given])
        for name, own, true in zip(("output", "d query", "d key", "d value"), found, wanted, strict=True):
            if own is None or not bool(own.any()):
                raise ValueError(
                    f"pipeline.attention={word} gives no {name}, so that nothing could be learnt: choose auto"
                )
            off = float((own.float() - true).abs().max() / true.abs().max())
            if not off < 0.05:
                raise ValueError(f"pipeline.attention={word} gives a {name} that is {off:.0%} off here: choose auto")


def _with_gradients(attend: Attend, given: list[Tensor]) -> list[Any]:
    """Output, and gradients of query, key and value along a fixed direction."""
    leaves = [x.detach().clone().requires_grad_() for x in given[:3]]
    with torch.enable_grad():
        out = attend(*leaves)
        if not out.requires_grad:
            return [out, None, None, None]
        return [out.detach(), *torch.autograd.grad(out, leaves, given[3].to(out.dtype), allow_unused=True)]


def backends_here(device: torch.device | str, dtype: torch.dtype, head_size: int, mask: Mask = "none") -> list[str]:
    """Words that this machine has for a head size and dtype, each run forward and backward. Leaves out kernels of the
    hub that are not on this machine yet."""
    machine = this_machine(torch.device(device).type)
    found = []
    for word in usable(machine, dtype, Known(head_sizes=(head_size,), mask=mask)):
        if word.endswith("_hub") and HUB_KERNELS[AttentionBackendName(KERNELS[word].backend)].kernel_fn is None:
            continue
        try:
            check_backward(word, dtype=dtype, device=device, head_size=head_size, mask=mask)
        except ValueError:
            continue
        found.append(word)
    return found
