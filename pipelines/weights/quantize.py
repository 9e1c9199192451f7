"""The frozen weights of a denoiser in few bits (`pipeline.quantize`), layer by layer on the way to its device.

Quantised are the linear layers of the blocks that a network repeats: attention, feed-forward, and the modulation by the
time. What comes before and after the blocks (embeddings of latents, text and time, the last projection), norms,
convolutions, biases and layers of fewer than 32 inputs or outputs stay in the dtype of the base: they are few, and
errors in them reach everything. In a UNet the projections of the time in residual blocks stay too.

Rollout and update use the same rounded weights, and so does the reference of a KL: the policy is trained on the model
as it is quantised. The LoRA over them stays float32.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from flowrl.config.together import refuse_together
from flowrl.pipelines.arithmetic.quantized_linear import NormalFloatLinear, QuantizedLinear, WholeNumberLinear

LIBRARIES = {"int8": "torchao", "fp8": "torchao", "nf4": "bitsandbytes", "int8_bnb": "bitsandbytes"}
"""Forms of `pipeline.quantize`, and what makes them."""

_NARROWEST = 32  # inputs or outputs


def check_quantize(form: str, device: torch.device | str | None, *, compile: str = "none") -> None:
    """Refuses a form of weights that cannot work, before weights load. A device of None leaves out what depends on this
    machine. Raises ValueError: no such form; its library is not installed; on MPS; together with compiled blocks."""
    if form == "none":
        return
    if form not in LIBRARIES:
        raise ValueError(f"pipeline.quantize must be none, {', '.join(LIBRARIES)}, got {form!r}")
    refuse_together({"pipeline.quantize": form, "pipeline.compile": compile})
    if device is None:
        return
    if torch.device(device).type == "mps":
        raise ValueError(
            f"pipeline.quantize={form} is for CUDA and CPU devices, and pipeline.device is mps: set "
            "pipeline.quantize=none"
        )
    if importlib.util.find_spec(LIBRARIES[form]) is None:
        raise ValueError(
            f"pipeline.quantize={form} needs the package {LIBRARIES[form]}, which is not installed: "
            "pip install -e '.[quantize]', or set pipeline.quantize=none"
        )


def large_layers(block: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """The linear layers of a repeated block to quantise: parent, name in it, layer."""
    for path, parent in block.named_modules():
        for name, layer in parent.named_children():
            time = "time_emb" in f"{path}.{name}"
            if type(layer) is nn.Linear and not time and min(layer.in_features, layer.out_features) >= _NARROWEST:
                yield parent, name, layer


def quantize_blocks(
    blocks: Iterable[nn.Module], form: str, device: torch.device | str, rest: torch.device | str | None = None
) -> int:
    """Quantises the large linear layers of blocks in place, each on the device and one after another.

    At no time does the device hold more than one of them as it was read; the rest of the network is left where it is.
    What was quantised stays on the device, or goes to `rest`.

    Returns the number of layers. Raises ValueError: none, so quantising would save nothing.
    """
    found = [entry for block in blocks for entry in large_layers(block)]
    if form != "none" and not found:
        raise ValueError(
            f"pipeline.quantize={form} found no linear layer with {_NARROWEST} inputs and outputs or more in the "
            "blocks of this model: set pipeline.quantize=none"
        )
    for parent, name, layer in found:
        setattr(parent, name, quantize_layer(layer.requires_grad_(False).to(device), form).to(rest or device))
    return len(found)


@torch.no_grad()
def quantize_layer(layer: nn.Linear, form: str) -> QuantizedLinear:
    """A layer in another form, on its device; the layer's own weight is not kept."""
    weight = layer.weight.detach()
    if form in ("int8", "fp8"):
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_  # type: ignore[import-untyped]

        config = {"int8": Int8WeightOnlyConfig, "fp8": Float8WeightOnlyConfig}[form]
        alone: Any = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        alone.weight = nn.Parameter(weight, requires_grad=False)
        quantize_(alone, config(set_inductor_config=False))  # compiles nothing: the process's settings stay
        return QuantizedLinear(layer, codes=alone.weight.qdata, scale=alone.weight.scale)
    from bitsandbytes import functional

    if form == "int8_bnb":
        codes, scale, _ = functional.int8_vectorwise_quant(weight.half(), threshold=0.0)
        return WholeNumberLinear(layer, codes=codes, scale=scale)
    packed, state = functional.quantize_4bit(
        weight.contiguous(), blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    outer = state.state2
    return NormalFloatLinear(
        layer, codes=packed, scale=state.absmax, quantiles=state.code, scale_scale=outer.absmax,
        scale_codes=outer.code, scale_offset=state.offset,
    )  # fmt: skip
