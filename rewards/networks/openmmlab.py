"""GenEval's own detector: OpenMMLab's Mask2Former Swin-S from its released file, in transformers' class.

mmdet itself, which GenEval runs, does not install on today's Python. The network is the same one under other names.
Its input and output are processed as in `mask2former`, which follows OpenMMLab's pipeline.

The files are not shipped here and are not on the hub. Those that OpenMMLab released, by the first digits of their
sha256, which end their names:

    743b7d99    https://download.openmmlab.com/mmdetection/v2.0/mask2former/mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco/
    c9d0c4f2    https://download.openmmlab.com/mmdetection/v3.0/mask2former/mask2former_swin-s-p4-w7-224_8xb2-lsj-50e_coco/

`openmmlab_keys.yaml` has the names of mmdet 3; those of mmdet 2 are brought to them first. One thing differs in more
than names. Swin halves the resolution by laying four neighbours' channels side by side. mmdet takes them from
`torch.nn.Unfold`, a channel's four neighbours next to each other and row by row; transformers takes all channels of one
neighbour after the other, by column. So `downsample.reduction` and `downsample.norm` are reordered.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.config.strict_yaml import read_mapping
from flowrl.rewards.networks import pretrained
from flowrl.rewards.networks.clip_encoder import CLIP_MODEL as DEFAULT_CLIP
from flowrl.rewards.networks.detectors import Detector
from flowrl.rewards.networks.mask2former import UNREAD, Mask2Former, Mask2FormerDetector, check_classes
from flowrl.rewards.networks.pretrained import check_shapes

_PIXELS = "model.pixel_level_module"
_SWIN = f"{_PIXELS}.encoder.swin"
_HEAD = "model.transformer_module"
_LEVELS, _POINTS = 3, 4  # sizes of deformable attention, fixed in both libraries

_REST = re.compile(r"([a-z_]+\.)?(weight|bias)|")  # of a name, after the beginning
_HALVED = re.compile(r"backbone\.stages\.(\d+)\.downsample\.(reduction\.weight|norm\.weight|norm\.bias)")


def to_transformers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of mmdet's Mask2Former with Swin, of release 2 or 3, under the names of transformers' class."""
    renamed: dict[str, Tensor] = {}
    unknown, names = [], read_mapping(Path(__file__).with_name("openmmlab_keys.yaml"))
    for given, tensor in weights.items():
        name = given
        for pattern, replacement in names["older"].items():
            name = re.sub(pattern, replacement, name)
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


RELEASED = {
    "743b7d99": "mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco_20220504_001756-743b7d99.pth",
    "c9d0c4f2": "mask2former_swin-s-p4-w7-224_8xb2-lsj-50e_coco_20220504_001756-c9d0c4f2.pth",
}
"""First digits of the sha256 of a released file -> its name: that of mmdet 2, which GenEval's script fetches, and the
same training under the names of mmdet 3."""
OWNER = "judge 'openmmlab'"
_GIVE = (
    f"give detector: the path of {RELEASED['743b7d99']}, which OpenMMLab offers at download.openmmlab.com (the address "
    f"is in docs/benchmarks.md)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenMMLab(Mask2Former):
    """Options of the detector, which runs in float32."""

    detector: str = ""
    """The released file, or another one of mmdet 2 or 3 of the same network and COCO's 80 classes."""
    clip_model: str = DEFAULT_CLIP
    """A CLIP model, a folder or an id on the hub; GenEval's is ViT-L/14 of OpenAI, the default here."""
    rgb_as_bgr: bool = False
    """Whether the detector sees red as blue and blue as red, as with Flow-GRPO's reward server, which hands arrays in
    RGB to a pipeline that takes arrays for BGR. Colours are named from the image as it is. GenEval's own script reads
    files and is not affected."""

    def __post_init__(self) -> None:
        if not self.detector:
            raise ValueError(f"{OWNER} has no file to load: {_GIVE}.")
        if not Path(self.detector).expanduser().is_file():
            raise ValueError(f"{OWNER}: there is no file {self.detector!r}: {_GIVE}.")
        pretrained.check_model(self.clip_model, what="CLIP", option="clip_model")

    def build(self, device: torch.device) -> Detector:
        """Loads both models."""
        path = Path(self.detector).expanduser()

        def load() -> torch.nn.Module:
            weights = pretrained.read_weights(path, owner=OWNER, others=True)
            network: torch.nn.Module = network_of(weights, unread=UNREAD, owner=OWNER).to(device)
            return network

        network = pretrained.shared_network(("openmmlab", str(path.resolve()), str(device)), load)
        check_classes(network, self.detector, owner=OWNER)
        clip, processor = pretrained.load_clip(self.clip_model, device=device, owner=OWNER, option="clip_model")
        with path.open("rb") as stream:
            digits = hashlib.file_digest(stream, "sha256").hexdigest()[:8]
        weights = f"released-{digits}" if digits in RELEASED else f"{path.name}@{digits}"
        apart = []  # what sets the judge apart from GenEval's own, a sentence each
        if digits not in RELEASED:
            apart.append(
                f"The detector's file (sha256 {digits}...) is not one that OpenMMLab released: numbers of this judge "
                f"are not GenEval's own."
            )
        if self.clip_model != DEFAULT_CLIP:
            apart.append(f"GenEval names colours by {DEFAULT_CLIP}, this judge by {self.clip_model}.")
        if self.rgb_as_bgr:
            apart.append(
                "The detector was shown red as blue, as by Flow-GRPO's reward server: compare with numbers of that "
                "server."
            )
        own = (
            "Rules, detector and colour model are GenEval's own: published numbers of the same prompts and images per "
            "prompt compare with these (network checked on random weights, not on this file)."
        )
        return Mask2FormerDetector(
            network=network,
            clip=clip,
            tokenizer=processor.tokenizer,
            device=device,
            swapped=self.rgb_as_bgr,
            remarks=tuple(apart) or (own,),
            version=f"openmmlab-1:{weights}:{'rgb_as_bgr' if self.rgb_as_bgr else 'rgb'}:"
            f"{self.clip_model}@{pretrained.clip_fingerprint(clip)}:float32",
        )
