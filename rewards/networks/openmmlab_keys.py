"""Mask2Former with Swin as OpenMMLab's mmdet names its weights, in transformers' class: the same network.

`openmmlab_keys.yaml` has the names of mmdet 3; those of mmdet 2 are brought to them first.

One thing differs in more than names. Swin halves the resolution by laying four neighbours' channels side by side. mmdet
takes them from `torch.nn.Unfold`, a channel's four neighbours next to each other and row by row; transformers takes all
channels of one neighbour after the other, by column. So `downsample.reduction` and `downsample.norm` are reordered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.config.strict_yaml import read_mapping
from flowrl.rewards.networks.pretrained import check_shapes

_PIXELS = "model.pixel_level_module"
_SWIN = f"{_PIXELS}.encoder.swin"
_HEAD = "model.transformer_module"
_LEVELS, _POINTS = 3, 4  # sizes of deformable attention, fixed in both libraries

_REST = re.compile(r"([a-z_]+\.)?(weight|bias)|")  # of a name, after the beginning
_HALVED = re.compile(r"backbone\.stages\.(\d+)\.downsample\.(reduction\.weight|norm\.weight|norm\.bias)")


def newer_name(name: str, older: Mapping[str, str]) -> str:
    """The name that mmdet 3 gives to a weight of mmdet 2 or 3."""
    for pattern, replacement in older.items():
        name = re.sub(pattern, replacement, name)
    return name


def to_transformers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of mmdet's Mask2Former with Swin, of release 2 or 3, under the names of transformers' class."""
    renamed: dict[str, Tensor] = {}
    unknown, names = [], read_mapping(Path(__file__).with_suffix(".yaml"))
    for given, tensor in weights.items():
        name = newer_name(given, names["older"])
        if match := _HALVED.fullmatch(name):
            renamed[f"{_SWIN}.encoder.layers.{match[1]}.downsample.{match[2]}"] = neighbours_apart(tensor)
            continue
        for pattern, new in names["three_in_one"].items():
            if match := re.fullmatch(pattern, name):
                for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                    renamed[match.expand(new).format(letter)] = part.contiguous()
                break
        else:
            for beginning, place in names["beginnings"].items():
                if (match := re.match(beginning, name)) and _REST.fullmatch(name[match.end() :]):
                    if place is not None:
                        renamed[match.expand(place) + name[match.end() :]] = tensor
                    break
            else:
                unknown.append(given)
    if unknown:
        raise ValueError(
            f"{len(unknown)} of {len(weights)} weights have no place in a Mask2Former with Swin (first: "
            f"{sorted(unknown)[0]})"
        )
    return renamed


def neighbours_apart(tensor: Tensor) -> Tensor:
    """The last axis, 4 C numbers, from mmdet's order (channel, row, column) to transformers' (column, row, channel)."""
    return tensor.unflatten(-1, (-1, 2, 2)).movedim(-1, -3).movedim(-1, -2).flatten(-3).contiguous()


def config_of(weights: Mapping[str, Tensor]) -> Any:
    """The configuration of a checkpoint under transformers' names: every size is read off the weights' shapes."""
    from transformers import Mask2FormerConfig, SwinConfig

    shape = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    width, _, patch, _ = shape[f"{_SWIN}.embeddings.patch_embeddings.projection.weight"]
    stages = 1 + _last(weights, rf"{re.escape(_SWIN)}\.encoder\.layers\.(\d+)\.")
    blocks = [f"{_SWIN}.encoder.layers.{stage}.blocks" for stage in range(stages)]
    tables = [shape[f"{block}.0.attention.relative_position_bias.relative_position_bias_table"] for block in blocks]
    backbone = SwinConfig(
        embed_dim=width,
        patch_size=patch,
        depths=[1 + _last(weights, rf"{re.escape(b)}\.(\d+)\.") for b in blocks],
        num_heads=[heads for _, heads in tables],
        window_size=(round(tables[0][0] ** 0.5) + 1) // 2,
        mlp_ratio=shape[f"{blocks[0]}.0.mlp.fc1.weight"][0] / width,
        drop_path_rate=0.0,
        out_features=[f"stage{stage + 1}" for stage in range(stages)],
    )
    encoder, decoder = f"{_PIXELS}.decoder.encoder.layers", f"{_HEAD}.decoder.layers"
    queries, hidden = shape[f"{_HEAD}.queries_features.weight"]
    return Mask2FormerConfig(
        backbone_config=backbone,
        hidden_dim=hidden,
        num_queries=queries,
        feature_size=shape[f"{_PIXELS}.decoder.input_projections.0.0.weight"][0],
        mask_feature_size=shape[f"{_PIXELS}.decoder.mask_projection.weight"][0],
        encoder_layers=1 + _last(weights, rf"{re.escape(encoder)}\.(\d+)\."),
        encoder_feedforward_dim=shape[f"{encoder}.0.fc1.weight"][0],
        num_attention_heads=shape[f"{encoder}.0.self_attn.attention_weights.weight"][0] // (_LEVELS * _POINTS),
        decoder_layers=2 + _last(weights, rf"{re.escape(decoder)}\.(\d+)\."),  # transformers counts the first guess
        dim_feedforward=shape[f"{decoder}.0.fc1.weight"][0],
        num_labels=shape["class_predictor.weight"][0] - 1,
    )


def _last(weights: Mapping[str, Tensor], pattern: str) -> int:
    """The largest number in the names that begin so."""
    found = [int(match[1]) for name in weights if (match := re.match(pattern, name))]
    if not found:
        raise KeyError(pattern)
    return max(found)


def network_of(weights: Mapping[str, Tensor], *, unread: tuple[str, ...], owner: str) -> Any:
    """A frozen `Mask2FormerForUniversalSegmentation` in float32 on the host, all of whose weights are mmdet's."""
    from fnmatch import fnmatchcase

    from transformers import Mask2FormerForUniversalSegmentation

    give = "OpenMMLab's Mask2Former Swin-S for COCO instances"
    try:
        renamed = to_transformers(weights)
        config = config_of(renamed)
    except KeyError as error:
        raise ValueError(f"{owner}: the checkpoint lacks {error}: give {give}.") from error
    except ValueError as error:
        raise ValueError(f"{owner}: {error}: give {give}.") from error
    with torch.random.fork_rng(devices=[]):  # its first weights are drawn, and then replaced
        network = Mask2FormerForUniversalSegmentation(config)
    wanted = {
        name: tuple(value.shape)
        for name, value in network.named_parameters()
        if not any(fnmatchcase(name, pattern) for pattern in unread)
    }
    check_shapes(renamed, wanted, owner=owner, give=give)
    network.load_state_dict({name: tensor.float() for name, tensor in renamed.items()}, strict=False)
    return network.eval().requires_grad_(False)
