"""A pipeline of a published checkpoint's real dimensions on random weights: for measuring, where nothing is downloaded.

Matrices have std 1 / sqrt(fan_in), norms are 1 and biases small, so activations are of order 1 and no modulation is
zero: zeros make matrix products 13 % faster than real numbers on some GPUs. Prompts become random embeddings of the
shapes that the family's `conditioning` says; there are no text encoders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from flowrl.config.strict_yaml import read_mapping
from flowrl.pipelines.arithmetic.attention import give_kernel
from flowrl.pipelines.arithmetic.compiling import check_compile, compile_blocks, repeated_blocks
from flowrl.pipelines.arithmetic.wide_products import checkpoint_blocks
from flowrl.pipelines.places import known_checkpoints
from flowrl.pipelines.shared import cards
from flowrl.pipelines.shared.cards import Card
from flowrl.pipelines.shared.family_pipeline import Family, FamilyPipeline
from flowrl.pipelines.shared.like_blocks import block_kinds, with_blocks
from flowrl.pipelines.weights import stock_loading
from flowrl.pipelines.weights.quantize import check_quantize, quantize_blocks
from flowrl.runtime.private_names import TorchDispatchMode, kept_in_float32, part_types
from flowrl.runtime.randomness import counter_normal, counter_seed
from flowrl.trajectory import Conditioning

_BIAS_STD = 0.02
_PERIOD = 1_000_003
"""Normal numbers that are drawn; they repeat, from a place that depends on the weight. A prime: no rows agree."""
_VAES = read_mapping(Path(__file__).with_suffix(".yaml"))


def random_pipeline(
    family: Family, model: str, *, dtype: torch.dtype, device: torch.device, layers: int | None = None,
    attention: str = "auto", compile: str = "none", quantize: str = "none", options: Mapping[str, Any],
) -> FamilyPipeline:  # fmt: skip
    """A pipeline of a published checkpoint, or of a folder, on random weights. `layers` blocks of each kind stay, None
    leaves all. Raises ValueError: the model is unknown, or it has no blocks to leave out."""
    check_compile(compile, device)
    check_quantize(quantize, device, compile=compile)
    stock_loading.quiet_libraries()
    chosen, card = family.chosen(options), family.card(model)
    if card is None or card.network is None:
        raise ValueError(
            f"nothing is known of {model} without its download, so it cannot be built on random weights: download it, "
            f"or take one of {', '.join(known_checkpoints.checkpoints())}"
        )
    card = card if layers is None else shorten(card, layers)
    cards.shapes(family.grid(card.network), card, family.size_of(card, chosen), videos=family.videos)  # refuses some
    stock = getattr(diffusers, family.stock_class(card, chosen) or family.stock[0])
    types, network = part_types(stock), vars(card.network)
    there = [name for place, name in enumerate(family.denoisers) if place == 0 or card.index.get(name)]
    denoisers = {name: draw_weights(_make(family.network, network, device, dtype), f"{model}/{name}") for name in there}
    kind = getattr(diffusers, known_checkpoints.tables()["families"][family.name]["autoencoder"])
    vae = draw_weights(_make(kind, vae_config(family, card), device, torch.float32), f"{model}/vae")
    given = dict.fromkeys(types) | dict(family.stock_options or {}) | denoisers
    pipe = stock(**given | {"vae": vae, "scheduler": _scheduler(types["scheduler"][0])})
    for part in denoisers.values() if quantize != "none" else ():
        quantize_blocks(repeated_blocks(part), quantize, device)
    stock_loading.freeze(pipe, device)
    if chosen.gradient_checkpointing:
        for part in denoisers.values():
            checkpoint_blocks(part, device, dtype)
    own = replace(family, embed=_embedding, embed_sources=None, num_sources=(0, 0), count_sources=None)
    p = FamilyPipeline(own, card, chosen, pipe=pipe, denoisers=denoisers, dtype=dtype, device=device)
    family.prepare(p)
    p.attention = give_kernel(denoisers.values(), attention, family.attention.known(card.network), dtype, device)
    if compile == "blocks":
        compile_blocks(p.denoiser)
    return p


def shorten(card: Card, layers: int) -> Card:
    """A card of the same network with at most so many blocks of each kind. Raises ValueError: its blocks differ."""
    network = vars(card.network)
    return replace(card, network=SimpleNamespace(**with_blocks(network, fewer_blocks(card, layers))))


def fewer_blocks(card: Card, layers: int) -> dict[str, int]:
    """Kind of block -> how many of them are left, of at most so many. Raises ValueError: the blocks are not alike."""
    kinds = block_kinds(vars(card.network))
    if not kinds:
        raise ValueError(
            f"`layers` {layers}: the network of {card.model} is no stack of equal blocks, so none can be left out"
        )
    return {kind: min(layers, count) for kind, count in kinds.items()}


def draw_weights(module: nn.Module, name: str) -> nn.Module:
    """A network with random weights, a function of its name: matrices with std 1 / sqrt(fan_in), norms 1."""
    normals = counter_normal((_PERIOD,), "weights", name).to(next(module.parameters()).device)
    with torch.no_grad():
        for key, weight in module.named_parameters():
            if weight.ndim == 1 and not key.endswith("bias"):
                weight.fill_(1)
                continue
            std = weight[0].numel() ** -0.5 if weight.ndim > 1 else _BIAS_STD
            first = counter_seed("place", key) % _PERIOD
            place = weight.view(-1)
            for start in range(-first, weight.numel(), _PERIOD):
                low, high = max(start, 0), min(start + _PERIOD, weight.numel())
                place[low:high].copy_(normals[low - start : high - start] * std)
    return module


def vae_config(family: Family, card: Card) -> dict[str, Any]:
    """The configuration of a published checkpoint's autoencoder, beside the defaults of its class."""
    channels = family.grid(card.network).channels
    kind = known_checkpoints.tables()["families"][family.name]["autoencoder"]
    usual: dict[str, Any] = _VAES.get(kind, {})
    if kind == "AutoencoderKL":
        old = channels == 4
        usual = usual | {"latent_channels": channels, "use_quant_conv": old, "use_post_quant_conv": old}
    elif card.index.get("expand_timesteps"):
        usual = _VAES["residual"] | {"latents_mean": [0.0] * channels, "latents_std": [1.0] * channels}
    return usual | dict(card.vae)


def _scheduler(kind: Any) -> Any:
    """A scheduler of a stock class; of several kinds the plainest. Its noise levels do not matter here."""
    if kind is diffusers.DPMSolverMultistepScheduler:  # Sana's
        return kind(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0)
    if issubclass(kind, Enum):  # one of many, of Stable Diffusion
        return diffusers.DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    return kind()


def _make(cls: Any, config: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A network in a dtype as `from_pretrained` loads it: saved buffers too, not the parts that stay float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), _Uninitialised():
            module: nn.Module = cls.from_config(dict(config))
    finally:
        torch.set_default_dtype(before)
    exact = kept_in_float32(cls)
    for key, weight in module.named_parameters():
        wanted = torch.float32 if any(part in key.split(".") for part in exact) else dtype
        weight.data = weight.data.to(wanted)
    saved = module.state_dict(keep_vars=True)
    for key, buffer in module.named_buffers():
        if key in saved and buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)
    return module


class _Uninitialised(TorchDispatchMode):
    """Inside, layers are not initialised at random: weights are drawn afterwards."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.uniform_.default, torch.ops.aten.normal_.default):
            return args[0]
        return func(*args, **(kwargs or {}))


def _embedding(p: FamilyPipeline, prompt: str, _: Sequence[Tensor]) -> dict[str, Tensor]:
    """Random embeddings of a prompt: a function of its text."""
    tokens = p.family.seen_tokens(p.card, p.max_sequence_length)
    found = dict[str, Tensor]()
    for name, tensor in p.family.conditioning(p, tokens).items():
        if not tensor.is_meta:
            found[name] = tensor
        elif name == "mask":
            found[name] = torch.ones(tensor.shape, dtype=p.dtype)
        elif name != "guidance":  # guidance puts it in
            found[name] = counter_normal(tensor.shape, "embedding", name, prompt).to(p.dtype)
    return Conditioning(found).to(p.device).tensors
