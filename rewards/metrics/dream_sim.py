"""DreamSim: how alike two images look to people, in layout, pose and content (Fu et al. 2023, arXiv 2306.09344).

The distance is that of embeddings of vision transformers, DINO B/16, CLIP B/16 and OpenCLIP B/16 side by side in the
best variant, with a LoRA trained on people's choices. With e the joint embedding of an image squeezed to
224 x 224, less the mean of its own entries,

    distance(a, b) = 1 - cos(e_a, e_b),     the reward is minus the smallest distance to a reference

DINO gives the class token after its last block, CLIP and OpenCLIP their projected one. The published folder holds the
transformers in the layout of DINO's code, which is that of timm (extra `metrics`).
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from flowrl.prompts.loading import Prompt
from flowrl.rewards.base import FunctionReward, Model, Reward, RewardInputs, RewardOutput, to_uint8
from flowrl.rewards.metrics.against import FIELDS, Against, best_of_others, no_other
from flowrl.rewards.networks.clip_encoder import CLIP_MEAN, CLIP_STD
from flowrl.rewards.networks.dinov2 import IMAGENET_MEAN, IMAGENET_STD
from flowrl.rewards.networks.pretrained import fingerprint, first_line, model_of, read_weights, shared_network
from flowrl.runtime.files import read_json
from flowrl.runtime.precision import network_autocast
from flowrl.runtime.shapes import Float, UInt8

OWNER = "reward 'dreamsim'"
SIDE = 224
HEAD_WIDTH = 64  # width of an attention head of the B networks


class Tower(NamedTuple):
    """A vision transformer of DreamSim: its files in the folder, the first that is there, and what CLIP changes."""

    files: tuple[str, ...]
    clip: bool = False
    quick_gelu: bool = False


_DINO = Tower(("checkpoints/dino_vitbase16_pretrain.pth", "dino_vitbase16_pretrain.pth"))
_CLIP = {size: Tower((f"clip_vitb{size}_pretrain.pth.tar",), clip=True, quick_gelu=True) for size in (16, 32)}
_OPEN_CLIP = {size: Tower((f"open_clip_vitb{size}_pretrain.pth.tar",), clip=True) for size in (16, 32)}
VARIANTS: dict[str, tuple[str, tuple[Tower, ...]]] = {
    "ensemble": ("ensemble_lora", (_DINO, _CLIP[16], _OPEN_CLIP[16])),
    "dino_vitb16": ("dino_vitb16_single_lora", (_DINO,)),
    "clip_vitb32": ("clip_vitb32_single_lora", (_CLIP[32],)),
    "open_clip_vitb32": ("open_clip_vitb32_single_lora", (_OPEN_CLIP[32],)),
}
"""Variant -> the folder of its LoRA and its towers, in the order in which embeddings are joined."""

_ADAPTED = re.compile(r"extractor_list\.(\d+)\.model\.(.+)\.lora_([AB])\.weight$")


@dataclass(frozen=True, kw_only=True, slots=True)
class DreamSim:
    """Minus DreamSim's distance, in [-2, 0], in float32, to the nearest of several references; `distance` is the number
    as papers print it. Images go through in 8 bits, so no gradient flows."""

    folder: str
    """Cache folder of the package dreamsim: the unpacked release with the towers and the LoRA, and for DINO the file
    dino_vitbase16_pretrain.pth of its authors (there, or in checkpoints/)."""
    variant: Literal["ensemble", "dino_vitb16", "clip_vitb32", "open_clip_vitb32"] = "ensemble"
    """The published model; papers report `ensemble`."""
    against: Against = "references"
    """What an image is compared with: the sample's `references`, or the `sources` of an edit."""

    def __post_init__(self) -> None:
        if importlib.util.find_spec("timm") is None:
            raise ValueError("the package timm is missing: in flowrl's folder, pip install -e '.[metrics]'.")
        if not Path(self.folder).expanduser().is_dir():
            raise ValueError(
                f"there is no folder {self.folder!r}: unpack a release of github.com/ssundaram21/dreamsim there, or "
                f"give the cache_dir that the package dreamsim was called with."
            )

    @property
    def models(self) -> tuple[Model, ...]:
        return (model_of(self.folder),)

    def lacks(self, prompt: Prompt) -> str | None:
        """An image to compare with."""
        return no_other(prompt, self.against)

    def build(self, device: torch.device) -> Reward:
        """Loads the towers, with the LoRA in them."""
        key = ("dreamsim", str(Path(self.folder).expanduser()), self.variant, str(device))
        network = shared_network(key, lambda: load_towers(Path(self.folder).expanduser(), self.variant, device))
        version = fingerprint(tower.cls_token for tower in network.networks)

        def score(inputs: RewardInputs) -> RewardOutput:
            images = embed_images(network, to_uint8(inputs.images))

            def score(item: int, other: Tensor) -> Tensor:
                return images[item] @ embed_images(network, to_uint8(other[None]))[0] - 1

            output = best_of_others(inputs, self.against, score, owner=OWNER)
            output.parts["distance"] = -output.values
            return output

        return FunctionReward(
            name="dreamsim",
            score=score,
            needs=frozenset({"images", FIELDS[self.against]}),
            version=f"dreamsim:{self.variant}@{version}:{self.against}:minus-distance:float32",
        )


@torch.no_grad()
def embed_images(towers: Towers, images: UInt8[np.ndarray, " b h w 3"]) -> Float[Tensor, " b d"]:
    """The joint embeddings of 8-bit images, less their own mean, at length 1."""
    squeezed = [Image.fromarray(image).resize((SIDE, SIDE), Image.Resampling.BICUBIC) for image in images]
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in squeezed])).permute(0, 3, 1, 2).float() / 255
    with network_autocast(towers.mean.device):
        joined = towers(pixels.to(towers.mean.device)).float()
    centred = joined - joined.mean(-1, keepdim=True)
    return centred / centred.norm(dim=-1, keepdim=True)


class Towers(nn.Module):
    """The transformers of a variant; images in [0, 1] to their features side by side, [b, d]."""

    networks: nn.ModuleList
    mean: Tensor
    std: Tensor

    def __init__(self, towers: Sequence[tuple[Tower, nn.Module, Tensor | None]]) -> None:
        super().__init__()
        self.networks = nn.ModuleList([network for _, network, _ in towers])
        self.projections = nn.ParameterList([torch.eye(0) if matrix is None else matrix for _, _, matrix in towers])
        looks = [(CLIP_MEAN, CLIP_STD) if tower.clip else (IMAGENET_MEAN, IMAGENET_STD) for tower, _, _ in towers]
        for name, values in zip(("mean", "std"), zip(*looks, strict=True), strict=True):
            self.register_buffer(name, torch.tensor(values)[:, :, None, None])

    def forward(self, images: Float[Tensor, " b 3 h w"]) -> Float[Tensor, " b d"]:
        features = []
        for place, network in enumerate(self.networks):
            token = network.forward_features((images - self.mean[place]) / self.std[place])[:, 0]  # type: ignore[operator]
            matrix = self.projections[place]
            features.append(token @ matrix if len(matrix) else token)
        return torch.cat(features, -1)


def load_towers(folder: Path, variant: str, device: torch.device) -> Towers:
    """The frozen networks of a variant with its LoRA in their weights."""
    adapter, towers = VARIANTS[variant]
    names = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
    config, *files = (folder / adapter / name for name in names)
    file = next((file for file in files if file.is_file()), None)
    if file is None or not config.is_file():
        raise ValueError(f"{OWNER}: {str(folder / adapter)!r} must hold {names[0]} and {names[1]} or {names[2]}.")
    settings = read_json(config)
    pairs: dict[tuple[int, str], dict[str, Tensor]] = {}
    for name, weight in read_weights(file, owner=OWNER).items():
        if (match := _ADAPTED.search(name)) is None:
            raise ValueError(f"{OWNER}: {file.name} holds {name}, which is not a LoRA of a DreamSim release.")
        pairs.setdefault((int(match[1]), f"{match[2]}.weight"), {})[match[3]] = weight.float()
    changes: dict[int, dict[str, Tensor]] = {}  # what the LoRA adds, alpha / r B A, by place of the tower and name
    try:
        scale = settings["lora_alpha"] / settings["r"]
        for (place, name), pair in pairs.items():
            changes.setdefault(place, {})[name] = scale * pair["B"] @ pair["A"]
    except (KeyError, TypeError, RuntimeError, ZeroDivisionError) as error:
        given = str(folder / adapter)
        raise ValueError(f"{OWNER}: {given!r} is not a complete LoRA ({error!r}): fetch it again.") from error
    loaded = []
    for place, tower in enumerate(towers):
        path = next((folder / name for name in tower.files if (folder / name).is_file()), None)
        if path is None:
            raise ValueError(f"{OWNER}: the folder {str(folder)!r} lacks {tower.files[-1]}: add it.")
        weights = read_weights(path, owner=OWNER)
        for name, change in changes.pop(place, {}).items():
            if weights.get(name, change[:0]).shape != change.shape:
                raise ValueError(f"{OWNER}: the LoRA in {adapter} changes {name}, which {path.name} lacks: fetch both.")
            weights[name] = weights[name] + change
        loaded.append((tower, *_transformer(tower, weights, path.name)))
    if changes:
        raise ValueError(f"{OWNER}: the LoRA in {adapter} is for more networks than {variant} has: fetch it again.")
    return Towers(loaded).float().to(device).eval().requires_grad_(False)


def _transformer(tower: Tower, weights: dict[str, Tensor], file: str) -> tuple[nn.Module, Tensor | None]:
    """The network of a tower, and CLIP's projection; the weights give the sizes."""
    from timm.layers.activations import QuickGELU
    from timm.models.vision_transformer import VisionTransformer

    weights = dict(weights)
    projection = weights.pop("proj", None) if tower.clip else None
    if tower.clip:  # it normalises before the blocks; the conversion put that where dropout is
        weights = {name.replace("pos_drop.", "norm_pre."): weight for name, weight in weights.items()}
    else:  # the token is read before the last normalisation
        weights = {name: weight for name, weight in weights.items() if not name.startswith(("norm.", "head."))}
    try:
        width = weights["cls_token"].shape[-1]
        patch = weights["patch_embed.proj.weight"].shape[-1]
        depth = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
        network = VisionTransformer(
            img_size=SIDE,
            patch_size=patch,
            embed_dim=width,
            depth=depth,
            num_heads=max(1, width // HEAD_WIDTH),
            num_classes=0,
            pre_norm=tower.clip,
            final_norm=tower.clip,
            weight_init="skip",
            norm_layer=partial(nn.LayerNorm, eps=1e-5 if tower.clip else 1e-6),
            act_layer=QuickGELU if tower.quick_gelu else nn.GELU,
        )
        if tower.clip:
            network.patch_embed.proj.bias = nn.Parameter(torch.zeros(width))
        network.load_state_dict(weights)
    except (KeyError, RuntimeError) as error:
        raise ValueError(
            f"{OWNER}: {file} is not the transformer of a DreamSim release: {first_line(error)}"
        ) from error
    if tower.clip and (projection is None or len(projection) != width):
        raise ValueError(f"{OWNER}: {file} lacks the projection proj of its embedding: fetch it again.")
    return network, projection
