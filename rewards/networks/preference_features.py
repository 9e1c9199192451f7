"""Features of images from frozen networks, for heads that learn what people prefer.

    clip        unit embedding of the image, and its product, entry by entry, with that of the prompt: 2 D numbers, of
                which a linear head can make a taste, CLIPScore, and one CLIPScore weighted by direction
    dinov2      class token and mean of the patches: 2 D numbers; the prompt is not read
    attributes  means of the embedded world's scorer over its cells, and the share of cells of each kind of object: 93
                numbers, without any download; the prompt is not read

Shapes: b images, d features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.rewards.embedded.attributes import PAIRS, load_net, shipped_weights
from flowrl.rewards.networks.clip_encoder import CLIP_MODEL, Preprocess, transformers_clip
from flowrl.rewards.networks.dinov2 import DINOV2_MODEL, IMAGENET_MEAN, IMAGENET_STD, load_dinov2
from flowrl.rewards.networks.pretrained import check_model, fingerprint
from flowrl.runtime.precision import network_autocast
from flowrl.runtime.shapes import Float

Backbone = Literal["clip", "dinov2", "attributes"]

MODELS: dict[Backbone, str] = {"clip": CLIP_MODEL, "dinov2": DINOV2_MODEL}
"""The default models; `attributes` takes the one that comes with flowrl."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """A loaded backbone."""

    of: Callable[[Float[Tensor, " b 3 h w"], list[str]], Float[Tensor, " b d"]]
    """float32 images [b, 3, H, W] in [0, 1] and b prompts -> features [b, d] on the backbone's device."""
    width: int
    """d."""
    reads_prompts: bool
    """Whether the prompts matter."""
    differentiable: bool
    """Whether the gradient of the images passes."""
    version: str
    """Fingerprint of the weights and the preprocessing."""


def check_backbone(backbone: Backbone, model: str | None, image_size: int) -> None:
    """Refuses a model that cannot be there, and settings that the backbone does not have; loads nothing."""
    if backbone == "attributes":
        if model is not None:
            raise ValueError(f"backbone attributes comes with flowrl and takes no model, got {model!r}.")
        return
    check_model(model or MODELS[backbone], what="CLIP" if backbone == "clip" else "DINOv2")
    if image_size < 14:
        raise ValueError(f"image_size must be at least one patch of 14 pixels, got {image_size}.")


def build_features(
    backbone: Backbone,
    *,
    model: str | None = None,
    revision: str | None = None,
    preprocess: Preprocess = "processor",
    image_size: int = 224,
    device: torch.device,
    owner: str,
) -> Features:
    """Loads a backbone, frozen, in float32.

    Args:
        backbone: see the module.
        model, revision, device, owner: see `flowrl.rewards.networks.pretrained`; model None takes that of `MODELS`.
        preprocess: of clip, see `flowrl.rewards.networks.clip_encoder`.
        image_size: of dinov2: images' short side, a multiple of the model's patches.
    """
    differentiable = True
    if backbone == "clip":
        encoder = transformers_clip(
            model or MODELS["clip"], device=device, revision=revision, preprocess=preprocess, owner=owner
        )

        def of(images: Tensor, prompts: list[str]) -> Tensor:
            image = encoder.images(images)
            with torch.no_grad():
                text = encoder.texts(prompts)
            return torch.cat([image, image * text], dim=1)

        with torch.no_grad():
            width = 2 * encoder.texts(["a"]).shape[1]
        differentiable, version = encoder.differentiable, f"clip:{encoder.version}"
    elif backbone == "dinov2":
        network = load_dinov2(
            model or MODELS["dinov2"], device=device, revision=revision, owner=owner, image_size=image_size
        )

        def of(images: Tensor, prompts: list[str]) -> Tensor:
            from torchvision.transforms import functional as vision

            mode, size = vision.InterpolationMode.BICUBIC, [image_size]
            square = vision.center_crop(vision.resize(images.to(device), size, mode, antialias=True), size)
            pixels = vision.normalize(square.clamp(0.0, 1.0), IMAGENET_MEAN, IMAGENET_STD)
            with network_autocast(device):
                tokens: Tensor = network(pixel_values=pixels).last_hidden_state
            tokens = tokens.float()
            return torch.cat([tokens[:, 0], tokens[:, 1:].mean(dim=1)], dim=1)

        weights = [network.embeddings.patch_embeddings.projection.weight, network.layernorm.weight]
        width, version = 2 * network.config.hidden_size, f"dinov2:{fingerprint(weights)}:{image_size}px-bicubic"
    else:
        from flowrl.world.scenes import SIZE

        net = load_net(shipped_weights(), device)

        def of(images: Tensor, prompts: list[str]) -> Tensor:
            cells = net.features(images.to(device))
            kinds = net.cells(cells).softmax(dim=1)
            return torch.cat([cells.mean(dim=(2, 3)), kinds.mean(dim=(2, 3))], dim=1)

        width = net.cells.in_channels + 1 + len(PAIRS)
        version = f"attributes:{fingerprint([net.cells.weight])}:{SIZE}px"
    return Features(
        of=of, width=width, reads_prompts=backbone == "clip", differentiable=differentiable, version=version
    )
