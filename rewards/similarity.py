"""How much an image resembles reference images: `max_j cos(f(x), f(r_j))`, with features f of DINOv2 or CLIP.

DINOv2 (arXiv 2304.07193) sees objects, layout and texture; CLIP sees what an image is of. References come with the
samples (`RewardInputs.reference_images`), or from files named in the options. Each is encoded once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from flowrl.rewards import FunctionReward, Reward, RewardInputs, RewardOutput, output_of, to_uint8
from flowrl.rewards.clip import DEFAULT_MODEL as DEFAULT_CLIP
from flowrl.rewards.image_files import image_files, read_image
from flowrl.rewards.networks.pretrained import (
    check_model,
    clip_fingerprint,
    clip_image,
    fingerprint,
    load_clip,
    load_network,
    load_processor,
)

Features = Literal["dinov2", "clip"]
Pooling = Literal["cls", "mean"]
Embed = Callable[[Sequence[UInt8[np.ndarray, " h w 3"]]], Float[Tensor, " n d"]]

DEFAULT_MODELS: dict[Features, str] = {"dinov2": "facebook/dinov2-base", "clip": DEFAULT_CLIP}
BATCH = 32  # reference images encoded at once
REMEMBERED = 4096  # features of references that came with samples
OWNER = "reward 'similarity'"


def check(
    *,
    features: Features = "dinov2",
    model: str | None = None,
    revision: str | None = None,
    pooling: Pooling = "cls",
    references: str | None = None,
) -> None:
    """Refuses option values that are wrong, without loading the model."""
    if features == "clip" and pooling != "cls":
        raise ValueError(f"{OWNER}: pooling is for features dinov2, CLIP has an embedding of its own: leave it out.")
    check_model(model or DEFAULT_MODELS[features], owner=OWNER, what={"dinov2": "DINOv2", "clip": "CLIP"}[features])
    if references is not None:
        image_files(references, owner=OWNER)


def similarity(
    *,
    device: torch.device,
    features: Features = "dinov2",
    model: str | None = None,
    revision: str | None = None,
    pooling: Pooling = "cls",
    references: str | None = None,
) -> Reward:
    """The largest cosine between an image's features and those of its references, in [-1, 1], in float32.

    Images go through the checkpoint's own processor in 8 bits, so no gradient flows. A sample without any
    reference fails with "missing_reference".

    Args:
        device: where the model runs.
        features: of DINOv2, or CLIP's projected embedding.
        model: a local folder or an id on the hub; null takes facebook/dinov2-base or CLIP ViT-L/14.
        revision: branch, tag or commit on the hub.
        pooling: of DINOv2, `cls`, the class token after the last normalisation, or `mean`, that of the patch tokens.
        references: null, for those that come with the samples; a folder, every image in it and in its folders a
            reference of every prompt; or a JSON file `{prompt: image or images}`, with paths from its own folder.

    Raises:
        ValueError: if a model or a reference cannot be had.
    """
    check(features=features, model=model, revision=revision, pooling=pooling, references=references)
    name = model or DEFAULT_MODELS[features]
    if features == "clip":
        embed, weights = _clip(name, revision, device)
    else:
        embed, weights = _dinov2(name, revision, device, pooling)
    source, known, needs = "given", None, {"images", "reference_images"}
    memory: dict[str, Tensor] = {}
    if references is not None:
        known = image_files(references, owner=OWNER)
        source = _remember_files(known, embed, memory)
        needs = {"images"} if None in known else {"images", "prompts"}

    @torch.no_grad()
    def score(inputs: RewardInputs) -> RewardOutput:
        if known is None:
            keys = _remember_given(inputs, embed, memory)
        else:
            keys = [[str(path) for path in known.get(None, known.get(prompt, ()))] for prompt in inputs.prompts]
        images = embed(list(to_uint8(inputs.images)))
        values = [
            float((torch.stack([memory[key] for key in mine]) @ image).max()) if mine else None
            for mine, image in zip(keys, images, strict=True)
        ]
        return output_of(values, inputs, errors=[None if mine else "missing_reference" for mine in keys])

    return FunctionReward(
        name="similarity",
        score=score,
        needs=frozenset(needs),
        version=f"similarity:{features}:{name}@{weights}:{pooling}:references-{source}:max-cosine:float32",
    )


# ---- references ------------------------------------------------------------------------------------------------------


def _remember_files(files: Mapping[str | None, Sequence[Path]], embed: Embed, memory: dict[str, Tensor]) -> str:
    """Encodes all files into the memory; returns a short hash of their contents."""
    paths = sorted({path for listed in files.values() for path in listed})
    digest = hashlib.sha256()
    for start in range(0, len(paths), BATCH):
        part = paths[start : start + BATCH]
        features = _embedded([read_image(path, owner=OWNER) for path in part], embed)
        memory.update(zip(map(str, part), features, strict=True))
    for path in paths:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return f"{len(paths)}-{digest.hexdigest()[:12]}"


def _remember_given(inputs: RewardInputs, embed: Embed, memory: dict[str, Tensor]) -> list[Sequence[str]]:
    """Encodes the samples' references that were not seen before; returns each sample's keys into the memory."""
    if inputs.reference_images is None:
        raise ValueError(
            f"{OWNER} needs reference images, and the samples have none: give them with the prompts, or name files by "
            f"option references."
        )
    by_key: dict[str, UInt8[np.ndarray, " h w 3"]] = {}
    keys: list[Sequence[str]] = []
    for images in inputs.reference_images:
        arrays = [to_uint8(image[None])[0] for image in images]
        mine = [hashlib.sha256(str(array.shape).encode() + array.tobytes()).hexdigest() for array in arrays]
        by_key.update(zip(mine, arrays, strict=True))
        keys.append(mine)
    if len(memory.keys() | by_key.keys()) > REMEMBERED:
        memory.clear()
    new = [key for key in by_key if key not in memory]
    for start in range(0, len(new), BATCH):
        part = new[start : start + BATCH]
        memory.update(zip(part, _embedded([by_key[key] for key in part], embed), strict=True))
    return keys


@torch.no_grad()
def _embedded(images: list[UInt8[np.ndarray, " h w 3"]], embed: Embed) -> list[Tensor]:
    # Cloned, so that one that is remembered does not keep its whole batch.
    return [feature.clone() for feature in embed(images)]


# ---- features --------------------------------------------------------------------------------------------------------


def _dinov2(model: str, revision: str | None, device: torch.device, pooling: Pooling) -> tuple[Embed, str]:
    from transformers import AutoImageProcessor, Dinov2Model

    network = load_network(
        Dinov2Model, model, device=device, revision=revision, owner=OWNER, option="model", what="DINOv2"
    )
    processor = load_processor(AutoImageProcessor, model, revision=revision, owner=OWNER, option="model", what="DINOv2")

    def embed(images: Sequence[UInt8[np.ndarray, " h w 3"]]) -> Float[Tensor, " n d"]:
        pixels = processor([Image.fromarray(image) for image in images], return_tensors="pt").to(device)
        with torch.autocast(device.type, enabled=False):
            tokens = network(pixel_values=pixels["pixel_values"]).last_hidden_state
        feature = tokens[:, 0] if pooling == "cls" else tokens[:, 1:].mean(1)
        unit: Tensor = feature / feature.norm(dim=-1, keepdim=True)
        return unit

    return embed, fingerprint([network.layernorm.weight, network.embeddings.cls_token])


def _clip(model: str, revision: str | None, device: torch.device) -> tuple[Embed, str]:
    network, processor = load_clip(model, device=device, revision=revision, owner=OWNER, option="model")

    def embed(images: Sequence[UInt8[np.ndarray, " h w 3"]]) -> Float[Tensor, " n d"]:
        pil_images = [Image.fromarray(image) for image in images]
        pixels = processor.image_processor(pil_images, return_tensors="pt").to(device)
        with torch.autocast(device.type, enabled=False):
            return clip_image(network, pixels["pixel_values"])

    return embed, clip_fingerprint(network)
