"""Discriminators: networks that tell reference images from generated ones (Adv-GRPO, arXiv 2511.20256).

Three backbones, each with little to train:

    dinov2      DINOv2, frozen; one head of 394,241 parameters (base size) reads the class token and every patch
    clip        a CLIP model such as PickScore, whose last vision block is trained; the logit is exp(logit_scale) cos
    attributes  the frozen convolutions of the embedded world's scorer, read by the same head: needs no download

Reference and generated images take one path (8-bit, the middle square, resized), or its differences would be learned.

Letters: B images, P patches, D features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import skip_init

from flowrl.rewards.embedded.attributes import GRID, load_net, shipped_weights
from flowrl.rewards.networks.dinov2 import IMAGENET_MEAN, IMAGENET_STD, load_dinov2
from flowrl.rewards.networks.pretrained import (
    clip_fingerprint,
    clip_of_pixels,
    clip_text,
    fingerprint,
    load_network,
    load_processor,
)
from flowrl.runtime.randomness import counter_normal
from flowrl.runtime.shapes import Float, Int64, UInt8

Backbone = Literal["dinov2", "clip", "attributes"]
Loss = Literal["hinge", "logistic", "pairwise"]
Pixels = UInt8[np.ndarray, " h w 3"]

OWNER = "reward 'adversarial'"
CLIP_MODEL = "yuvalkirstain/PickScore_v1"
CLIP_PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"  # the images and words that PickScore was trained with
DINOV2_SIZE = 518
HIDDEN = 512


class Logits(NamedTuple):
    """Logits, positive for "a reference": of the class token, and of the requested patches, if any."""

    whole: Float[Tensor, " b"]
    patches: Float[Tensor, " b n"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadDiscriminator:
    """A head on the tokens of a frozen network."""

    head: nn.Sequential
    """D numbers to one, the same for the class token and the patches."""
    pixels: Callable[[Sequence[Pixels], bool], Tensor]
    """Images to [B, 3, H, W]; the flag says whether a smaller image is made with antialiasing."""
    tokens: Callable[[Tensor], Tensor]
    """Pixels to [B, 1 + P, D], the class token first."""
    num_patches: int
    """P."""
    version: str
    """Of the backbone."""
    published: bool = False
    """Score as the published code does: normalised tokens and no antialiasing, unlike in learning."""

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that learn, by name."""
        return dict(self.head.named_parameters())

    def judge(
        self, images: Sequence[Pixels], prompts: Sequence[str], places: Tensor | None, *, as_reward: bool
    ) -> Logits:
        """Logits of all patches, or of `places` [B, n]; prompts are not read. `as_reward`: to be given as a reward."""
        quirks = self.published and as_reward
        with torch.no_grad():
            tokens = self.tokens(self.pixels(images, not quirks))
            if quirks:
                tokens = F.normalize(tokens, dim=-1, eps=1e-6)
            if places is not None:
                chosen = places.to(tokens.device)[..., None].expand(-1, -1, tokens.shape[-1])
                tokens = torch.cat([tokens[:, :1], tokens[:, 1:].gather(1, chosen)], dim=1)
        logits = self.head(tokens).squeeze(-1)
        return Logits(logits[:, 0], logits[:, 1:])


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipDiscriminator:
    """A CLIP model whose last vision block is trained; its logit tells how well an image fits its prompt."""

    network: Any
    processor: Any
    version: str
    num_patches: int = 0

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that learn, by name."""
        return {name: weight for name, weight in self.network.named_parameters() if weight.requires_grad}

    def judge(
        self, images: Sequence[Pixels], prompts: Sequence[str], places: Tensor | None, *, as_reward: bool
    ) -> Logits:
        """Logits of whole images; there are no patches."""
        device = self.network.logit_scale.device
        # Of the implementations of attention this one's gradient is the same each time.
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            image = clip_of_pixels(self.network, self.processor, images)
            with torch.no_grad():
                text = clip_text(self.network, self.processor.tokenizer, list(prompts), device)
        logits = self.network.logit_scale.exp() * (image * text).sum(dim=-1)
        return Logits(logits, logits.new_zeros(len(logits), 0))


Discriminator = HeadDiscriminator | ClipDiscriminator


def discriminator_loss(loss: Loss, real: Float[Tensor, " *shape"], fake: Float[Tensor, " *shape"]) -> Float[Tensor, ""]:
    """The loss, from logits of references and of generated images.

        hinge     ½ [mean relu(1 - real) + mean relu(1 + fake)]
        logistic  ½ [mean softplus(-real) + mean softplus(fake)]
        pairwise  mean softplus(fake - real): cross entropy of each pair, "the first is the reference"

    Raises ValueError: the shapes differ; broadcasting would pair them wrongly.
    """
    if real.shape != fake.shape:
        raise ValueError(f"real {list(real.shape)} and fake {list(fake.shape)} must have one shape.")
    if loss == "hinge":
        return (F.relu(1.0 - real).mean() + F.relu(1.0 + fake).mean()) / 2
    if loss == "logistic":
        return (F.softplus(-real).mean() + F.softplus(fake).mean()) / 2
    return F.softplus(fake - real).mean()


def make_head(features: int, *, seed: int, device: torch.device | str = "cpu") -> nn.Sequential:
    """Linear(D, 512), GELU, Linear(512, 1). The first is drawn from the seed; the last is zero, so that a head which
    has learned nothing gives 0 to every image rather than noise.
    """
    first = skip_init(nn.Linear, features, HIDDEN, device=device)
    last = skip_init(nn.Linear, HIDDEN, 1, device=device)
    with torch.no_grad():
        # The spread of PyTorch's own uniform start.
        first.weight.copy_(counter_normal(first.weight.shape, seed, "head") / math.sqrt(3 * features))
        for tensor in (first.bias, last.weight, last.bias):
            tensor.zero_()
    return nn.Sequential(first, nn.GELU(), last)


def _squares(images: Sequence[Pixels], size: int, device: torch.device, *, antialias: bool) -> Tensor:
    """[B, 3, size, size] in [0, 1]: the middle squares of 8-bit images of any sizes, bicubic."""
    squares = []
    for image in images:
        height, width = image.shape[:2]
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        square = np.ascontiguousarray(image[top : top + side, left : left + side].transpose(2, 0, 1))
        pixels = torch.from_numpy(square).to(device)[None].float() / 255.0
        if side != size:
            pixels = F.interpolate(pixels, (size, size), mode="bicubic", antialias=antialias, align_corners=False)
        squares.append(pixels.clamp(0.0, 1.0))
    return torch.cat(squares)


def dinov2_discriminator(
    *, model: str, revision: str | None, image_size: int, seed: int, device: torch.device, published: bool
) -> HeadDiscriminator:
    """A head on DINOv2 (transformers' `Dinov2Model`), whose position embeddings are interpolated to the size."""
    network = load_dinov2(model, device=device, revision=revision, owner=OWNER, image_size=image_size)

    def pixels(images: Sequence[Pixels], antialias: bool) -> Tensor:
        from torchvision.transforms.functional import normalize

        return normalize(_squares(images, image_size, device, antialias=antialias), IMAGENET_MEAN, IMAGENET_STD)

    return HeadDiscriminator(
        head=make_head(network.config.hidden_size, seed=seed, device=device),
        pixels=pixels,
        tokens=lambda pixels: network(pixel_values=pixels).last_hidden_state,
        num_patches=(image_size // network.config.patch_size) ** 2,
        version=f"dinov2:{model}@{fingerprint([network.embeddings.patch_embeddings.projection.weight])}:{image_size}px",
        published=published,
    )


def attributes_discriminator(*, seed: int, device: torch.device) -> HeadDiscriminator:
    """A head on the frozen convolutions of the embedded world's scorer; the mean of its 64 cells is the class token."""
    from flowrl.world.scenes import SIZE

    net = load_net(shipped_weights(), device)

    def tokens(pixels: Tensor) -> Tensor:
        cells = net.features(pixels).flatten(2).transpose(1, 2)
        return torch.cat([cells.mean(dim=1, keepdim=True), cells], dim=1)

    return HeadDiscriminator(
        head=make_head(net.cells.in_channels, seed=seed, device=device),
        pixels=lambda images, antialias: _squares(images, SIZE, device, antialias=antialias),
        tokens=tokens,
        num_patches=GRID * GRID,
        version=f"attributes@{fingerprint([net.cells.weight])}:{SIZE}px",
    )


def clip_discriminator(*, model: str, processor: str, revision: str | None, device: torch.device) -> ClipDiscriminator:
    """A CLIP model with gradients only for its last vision block."""
    from transformers import CLIPModel, CLIPProcessor

    # A copy of its own: other rewards may hold the same checkpoint, and theirs must stay as it is.
    network = load_network(CLIPModel, model, device=device, revision=revision, owner=OWNER, what="CLIP", shared=False)
    network.vision_model.encoder.layers[-1].requires_grad_(True)
    prepared = load_processor(CLIPProcessor, processor, owner=OWNER, option="processor", what="CLIP")
    return ClipDiscriminator(
        network=network, processor=prepared, version=f"clip:{model}@{clip_fingerprint(network)}:{processor}"
    )


def patch_places(num_patches: int, count: int, batch: int, seed: int) -> Int64[Tensor, " b n"]:
    """Places of `count` patches for each of `batch` images, with replacement: a function of the seed."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randint(num_patches, (batch, count), generator=generator)
