"""HPSv2 and v2.1: CLIP ViT-H/14 trained on people's rankings of images (Wu et al. 2023, arXiv 2306.09341).

The score is the plain cosine of image and prompt, about 0.2 to 0.4. The published weights, of open_clip, run here in
transformers' CLIPModel (`flowrl.rewards.networks.clip_encoder`).

Preprocessing is the published one, not CLIP's: the whole image, its long side at 224, in the middle of a square whose
rest is black, that is, zero before normalisation. Ports that cut out CLIP's middle square, or that multiply by
exp(logit_scale), give other numbers; thresholds do not carry over.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from flowrl.config.strict_yaml import read_mapping
from flowrl.rewards.base import Model, Reward
from flowrl.rewards.base.text_limits import CLIP_TOKENS, TextLimit
from flowrl.rewards.networks import pretrained
from flowrl.rewards.networks.clip_encoder import CLIP_MEAN, CLIP_STD, clip_from_open_clip, encoder_of, prompt_reward
from flowrl.rewards.networks.pretrained import model_of
from flowrl.runtime.shapes import Float

FILES = {"v2": "HPS_v2_compressed.pt", "v2.1": "HPS_v2.1_compressed.pt"}
DEFAULT_CHECKPOINT = "xswu/HPSv2"
DEFAULT_TOKENIZER = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
OWNER = "reward 'hps'"

_TOWERS = read_mapping(Path(__file__).with_suffix(".yaml"))
TEXT_TOWER, VISION_TOWER = _TOWERS["text"], _TOWERS["vision"]
WIDTH = 1024  # of the embeddings


@dataclass(frozen=True, kw_only=True, slots=True)
class Hps:
    """HPSv2's cosine of image and prompt, in float32; differentiable: rounding to 8 bits passes gradients on."""

    version: Literal["v2", "v2.1"] = "v2.1"
    """Which weights to take from a folder or the hub; has no effect on a checkpoint given as a file."""
    checkpoint: str = DEFAULT_CHECKPOINT
    """A file of weights, a folder or a hub repository that holds it under its published name."""
    tokenizer: str = DEFAULT_TOKENIZER
    """A folder or hub id with CLIP's tokenizer, which the checkpoint lacks."""
    revision: str | None = None
    """Branch, tag or commit of `checkpoint` on the hub."""
    threshold: float | None = None
    """Makes the reward `1[score > threshold]`; DanceGRPO's binary reward takes 0.28 of v2.1."""
    differentiable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        pretrained.check_file(self.checkpoint, option="checkpoint")
        pretrained.check_model(self.tokenizer, what="CLIP", option="tokenizer")

    @property
    def models(self) -> tuple[Model, ...]:
        return (model_of(self.checkpoint),)

    @property
    def text_limit(self) -> TextLimit:
        """What CLIP reads."""
        return TextLimit(tokens=CLIP_TOKENS, tokenizer=self.tokenizer)

    def build(self, device: torch.device) -> Reward:
        """Loads weights and tokenizer."""
        from transformers import CLIPConfig, CLIPTokenizer

        path = pretrained.fetch_file(
            self.checkpoint, FILES[self.version], revision=self.revision, owner=OWNER, option="checkpoint"
        )

        def load() -> Any:
            config = CLIPConfig(text_config=TEXT_TOWER, vision_config=VISION_TOWER, projection_dim=WIDTH)
            return clip_from_open_clip(pretrained.read_weights(path, owner=OWNER), config, owner=OWNER).to(device)

        network = pretrained.shared_network((OWNER, str(path.resolve()), str(device)), load)
        words = pretrained.load_processor(
            CLIPTokenizer, self.tokenizer, owner=OWNER, option="tokenizer", what="CLIP tokenizer"
        )
        pixels = partial(pad_pixels, size=network.config.vision_config.image_size)
        encoder = encoder_of(network, words, pixels, device=device, differentiable=True, how="long-side-bicubic-black")
        return prompt_reward(
            "hps",
            encoder,
            lambda cosine, _: cosine,
            threshold=self.threshold,
            version=f"{self.checkpoint}:{path.name}:cosine",
        )


def fit_size(height: int, width: int, size: int = 224) -> tuple[int, int]:
    """Height and width at which the long side is `size`."""
    scale = size / max(height, width)
    return round(height * scale), round(width * scale)


def pad_pixels(images: Float[Tensor, " b 3 h w"], *, size: int = 224) -> Float[Tensor, " b 3 size size"]:
    """HPSv2's input: 8-bit images, long side to `size` (bicubic, antialiased, overshoot kept as published), black
    around (an odd row or column last), then normalised."""
    # The value comes from the 8-bit image, the gradient from the float one.
    images = images + (images.detach().mul(255.0).round().clamp(0, 255) / 255.0 - images.detach())
    height, width = fit_size(images.shape[-2], images.shape[-1], size)
    from torchvision.transforms import functional as vision

    images = vision.resize(images, [height, width], vision.InterpolationMode.BICUBIC, antialias=True)
    top, left = (size - height) // 2, (size - width) // 2
    images = functional.pad(images, (left, size - width - left, top, size - height - top))
    return vision.normalize(images, CLIP_MEAN, CLIP_STD)
