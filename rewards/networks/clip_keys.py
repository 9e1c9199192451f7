"""CLIP checkpoints of open_clip, in transformers' CLIPModel: the same network under other names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.config.strict_yaml import read_mapping
from flowrl.rewards.networks.pretrained import check_shapes

_NAMES = read_mapping(Path(__file__).with_suffix(".yaml"))
_BLOCK = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+)\.(weight|bias)")
_QKV = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.attn\.in_proj_(weight|bias)")


def to_transformers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of an open_clip `CLIP` with two transformers under the names of transformers' `CLIPModel`."""
    renamed: dict[str, Tensor] = {}
    unknown = []
    for name, tensor in state.items():
        if name in _NAMES["whole"]:
            renamed[_NAMES["whole"][name]] = tensor
        elif name in _NAMES["transposed"]:
            renamed[_NAMES["transposed"][name]] = tensor.T.contiguous()
        elif match := _QKV.fullmatch(name):
            layer, kind = _layer(match[1], match[2]), match[3]
            for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                renamed[f"{layer}.self_attn.{letter}_proj.{kind}"] = part.contiguous()
        elif (match := _BLOCK.fullmatch(name)) and match[3] in _NAMES["in_block"]:
            renamed[f"{_layer(match[1], match[2])}.{_NAMES['in_block'][match[3]]}.{match[4]}"] = tensor
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
