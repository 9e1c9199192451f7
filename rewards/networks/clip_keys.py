"""CLIP checkpoints of open_clip, in transformers' CLIPModel: the same network under other names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flowrl.rewards.networks.pretrained import check_shapes

_WHOLE = {
    "logit_scale": "logit_scale",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
}
_NORMS = {
    "visual.ln_pre": "vision_model.pre_layrnorm",  # spelt so in transformers
    "visual.ln_post": "vision_model.post_layernorm",
    "ln_final": "text_model.final_layer_norm",
}
_WHOLE |= {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in _NORMS.items() for kind in ("weight", "bias")}
_TRANSPOSED = {"visual.proj": "visual_projection.weight", "text_projection": "text_projection.weight"}
_BLOCK = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+)\.(weight|bias)")
_IN_BLOCK = {
    "attn.out_proj": "self_attn.out_proj",
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_QKV = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.attn\.in_proj_(weight|bias)")


def to_transformers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of an open_clip `CLIP` with two transformers under the names of transformers' `CLIPModel`."""
    renamed: dict[str, Tensor] = {}
    unknown = []
    for name, tensor in state.items():
        if name in _WHOLE:
            renamed[_WHOLE[name]] = tensor
        elif name in _TRANSPOSED:
            renamed[_TRANSPOSED[name]] = tensor.T.contiguous()
        elif match := _QKV.fullmatch(name):
            layer, kind = _layer(match[1], match[2]), match[3]
            for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                renamed[f"{layer}.self_attn.{letter}_proj.{kind}"] = part.contiguous()
        elif (match := _BLOCK.fullmatch(name)) and match[3] in _IN_BLOCK:
            renamed[f"{_layer(match[1], match[2])}.{_IN_BLOCK[match[3]]}.{match[4]}"] = tensor
        else:
            unknown.append(name)
    if unknown:
        raise ValueError(
            f"{len(unknown)} of {len(state)} weights have no place in a CLIP model with two transformers (first: "
            f"{sorted(unknown)[0]}): give a checkpoint of open_clip's CLIP, such as one of HPSv2."
        )
    return renamed


def _layer(visual: str | None, number: str) -> str:
    return f"{'vision' if visual else 'text'}_model.encoder.layers.{number}"


def clip_from_open_clip(state: Mapping[str, Tensor], config: Any, *, owner: str) -> Any:
    """A frozen `CLIPModel` in float32 and evaluation mode, on all weights of the checkpoint."""
    from transformers import CLIPModel

    with torch.device("meta"):
        wanted = {name: tuple(tensor.shape) for name, tensor in CLIPModel(config).state_dict().items()}
    try:
        renamed = to_transformers(state)
    except ValueError as error:
        raise ValueError(f"{owner}: {error}") from error
    check_shapes(renamed, wanted, owner=owner, give="the checkpoint that this reward names")
    network = CLIPModel.from_pretrained(None, config=config, state_dict=renamed, dtype=torch.float32)
    return network.eval().requires_grad_(False)
