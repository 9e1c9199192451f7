"""How much an image resembles reference images: `max_j cos(f(x), f(r_j))`, with features f of DINOv2 or CLIP.

DINOv2 (arXiv 2304.07193) sees objects, layout and texture; CLIP sees what an image is of. References come with the
samples (`RewardInputs.reference_images`), or from files named in the options. Each is encoded once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from flowrl.prompts.loading import Prompt
from flowrl.rewards.base import FunctionReward, Model, Reward, RewardInputs, RewardOutput, output_of, to_uint8
from flowrl.rewards.base.prompt_needs import no_reference
from flowrl.rewards.image_files import image_files, no_listed, read_image
from flowrl.rewards.networks import pretrained
from flowrl.rewards.networks.clip_encoder import CLIP_MODEL as DEFAULT_CLIP
from flowrl.rewards.networks.dinov2 import DINOV2_MODEL, load_dinov2
from flowrl.rewards.networks.pretrained import model_of
from flowrl.runtime.precision import network_autocast
from flowrl.runtime.shapes import Float, UInt8

Embed = Callable[[Sequence[UInt8[np.ndarray, " h w 3"]]], Float[Tensor, " n d"]]

BATCH = 32  # reference images encoded at once
REMEMBERED = 4096  # features of references that came with samples
OWNER = "reward 'similarity'"


@dataclass(frozen=True, kw_only=True, slots=True)
class Similarity:
    """The largest cosine between features of an image and of its references (DINO, CLIP), in [-1, 1], in float32.
    Images are read in 8 bits by the checkpoint's processor: no gradient. Without references: "missing_reference"."""

    features: Literal["dinov2", "clip"] = "dinov2"
    """Features of DINOv2, or CLIP's projected embedding."""
    model: str | None = None
    """A local folder or an id on the hub; null takes facebook/dinov2-base or CLIP ViT-L/14."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    pooling: Literal["cls", "mean"] = "cls"
    """For DINOv2, `cls`, the class token after the last normalisation, or `mean`, the mean of the patch tokens."""
    references: str | None = None
    """Null, for those that come with the samples; a folder, every image in it and in its folders a reference of every
    prompt; or a JSON file `{prompt: image or images}`, with paths from its own folder."""

    def __post_init__(self) -> None:
        if self.features == "clip" and self.pooling != "cls":
            raise ValueError("pooling is for features dinov2, CLIP has an embedding of its own: leave it out.")
        pretrained.check_model(self.weights, what={"dinov2": "DINOv2", "clip": "CLIP"}[self.features])
        if self.references is not None:
            image_files(self.references)

    @property
    def weights(self) -> str:
        """Folder or hub id of the model."""
        return self.model or {"dinov2": DINOV2_MODEL, "clip": DEFAULT_CLIP}[self.features]

    @property
    def models(self) -> tuple[Model, ...]:
        return (model_of(self.weights),)

    def lacks(self, prompt: Prompt) -> str | None:
        """A reference image: the prompt's own, or one that `references` lists for it."""
        return no_reference(prompt) if self.references is None else no_listed(prompt.text, self.references)

    def build(self, device: torch.device) -> Reward:
        """Loads the model and encodes the references that are files."""
        embed: Embed
        if self.features == "clip":
            network, processor = pretrained.load_clip(self.weights, device=device, revision=self.revision, owner=OWNER)
            embed = partial(pretrained.clip_of_pixels, network, processor)
            version = pretrained.clip_fingerprint(network)
        else:
            from transformers import AutoImageProcessor

            vision = load_dinov2(self.weights, device=device, revision=self.revision, owner=OWNER)
            processor = pretrained.load_processor(
                AutoImageProcessor, self.weights, revision=self.revision, owner=OWNER, what="DINOv2"
            )

            def embed(images: Sequence[UInt8[np.ndarray, " h w 3"]]) -> Float[Tensor, " n d"]:
                with network_autocast(device):
                    found = vision(
                        pixel_values=pretrained.process_images(processor, images).to(device)
                    ).last_hidden_state
                tokens = found.float()
                return pretrained.unit(tokens[:, 0] if self.pooling == "cls" else tokens[:, 1:].mean(1))

            version = pretrained.fingerprint([vision.layernorm.weight, vision.embeddings.cls_token])
        source, known, needs = "given", None, {"images", "reference_images"}
        memory = FeatureMemory(embed)
        if self.references is not None:
            known = image_files(self.references)
            source = memory.remember_files(known)
            needs = {"images"} if None in known else {"images", "prompts"}

        @torch.no_grad()
        def score(inputs: RewardInputs) -> RewardOutput:
            if known is None:
                keys = memory.remember_given(inputs)
            else:
                keys = [[str(path) for path in known.get(None, known.get(prompt, ()))] for prompt in inputs.prompts]
            images = embed(list(to_uint8(inputs.images)))
            values = [
                float((torch.stack([memory.features[key] for key in mine]) @ image).max()) if mine else None
                for mine, image in zip(keys, images, strict=True)
            ]
            return output_of(values, inputs, errors=[None if mine else "missing_reference" for mine in keys])

        return FunctionReward(
            name="similarity",
            score=score,
            needs=frozenset(needs),
            version=f"similarity:{self.features}:{self.weights}@{version}:{self.pooling}:references-{source}:max-cosine:"
            f"float32",
        )


class FeatureMemory:
    """Features of reference images, each encoded once, by a file's path or by a digest of what came with a sample."""

    def __init__(self, embed: Embed) -> None:
        self.embed = embed
        self.features: dict[str, Tensor] = {}

    def remember_files(self, files: Mapping[str | None, Sequence[Path]]) -> str:
        """Encodes all files; returns a short hash of their contents."""
        paths = {str(path): path for path in sorted({path for listed in files.values() for path in listed})}
        digest = hashlib.sha256()
        self._remember(list(paths), lambda key: read_image(paths[key], owner=OWNER))
        for path in paths.values():
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return f"{len(paths)}-{digest.hexdigest()[:12]}"

    def remember_given(self, inputs: RewardInputs) -> list[Sequence[str]]:
        """Encodes the samples' references that were not seen before; returns each sample's keys."""
        if inputs.reference_images is None:
            raise ValueError(
                f"{OWNER} needs reference images, and the samples have none: give them with the prompts, or name files "
                f"by option references."
            )
        by_key: dict[str, UInt8[np.ndarray, " h w 3"]] = {}
        keys: list[Sequence[str]] = []
        for images in inputs.reference_images:
            arrays = [to_uint8(image[None])[0] for image in images]
            mine = [hashlib.sha256(str(array.shape).encode() + array.tobytes()).hexdigest() for array in arrays]
            by_key.update(zip(mine, arrays, strict=True))
            keys.append(mine)
        if len(self.features.keys() | by_key.keys()) > REMEMBERED:
            self.features.clear()
        self._remember([key for key in by_key if key not in self.features], by_key.__getitem__)
        return keys

    @torch.no_grad()
    def _remember(self, keys: Sequence[str], image: Callable[[str], UInt8[np.ndarray, " h w 3"]]) -> None:
        for start in range(0, len(keys), BATCH):
            part = keys[start : start + BATCH]
            # Cloned, so a cached one does not keep its whole batch.
            features = [feature.clone() for feature in self.embed([image(key) for key in part])]
            self.features.update(zip(part, features, strict=True))
