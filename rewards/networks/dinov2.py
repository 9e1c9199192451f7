"""DINOv2 (arXiv 2304.07193): its loading, and the sizes of images that it reads."""

from __future__ import annotations

from typing import Any

import torch

from flowrl.rewards.networks.pretrained import load_network

DINOV2_MODEL = "facebook/dinov2-base"
IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def load_dinov2(
    model: str, *, device: torch.device, revision: str | None, owner: str, image_size: int | None = None
) -> Any:
    """A frozen `Dinov2Model` of transformers, shared with every reward that asks for the same.

    Args:
        model, device, revision, owner: see `flowrl.rewards.networks.pretrained`.
        image_size: side of the images that it will read, if a square; position embeddings are interpolated to it.
    """
    from transformers import Dinov2Model

    network = load_network(Dinov2Model, model, device=device, revision=revision, owner=owner, what="DINOv2")
    patch: int = network.config.patch_size
    if image_size is not None and image_size % patch:
        raise ValueError(
            f"{owner}: image_size must be a multiple of the model's patches of {patch} pixels, got {image_size}: take "
            f"{max(1, round(image_size / patch)) * patch}."
        )
    return network
