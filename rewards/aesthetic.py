"""LAION's aesthetic predictor, version 2: how much people like an image, about 1 to 10, whatever its prompt.

A head of five linear layers, 768 -> 1024 -> 128 -> 64 -> 16 -> 1, on the unit embedding of CLIP ViT-L/14. It has no
activations, and dropout does nothing outside training, so the score is an affine function of the embedding.

Weights: sac+logos+ava1-l14-linearMSE of christophschuhmann/improved-aesthetic-predictor, here from a mirror in
safetensors. The raw value is used unscaled by Flow-GRPO and Pref-GRPO; it spreads 10 to 50 times as widely as
PickScore / 26, so a sum of the two needs a small weight, such as 0.3, or rewards that are normalised one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from flowrl.rewards.base import FunctionReward, Reward, RewardInputs, RewardOutput
from flowrl.rewards.image_reward import linear_head
from flowrl.rewards.networks import pretrained
from flowrl.rewards.networks.clip_encoder import CLIP_MODEL, Preprocess, gradient_of, score_output, transformers_clip
from flowrl.rewards.networks.pretrained import OneModel

DEFAULT_HEAD = "ttj/sac-logos-ava1-l14-linearMSE"
HEAD_FILE = "model.safetensors"
WIDTH = 768  # of the embeddings that the head reads
OWNER = "reward 'aesthetic'"


@dataclass(frozen=True, kw_only=True, slots=True)
class Aesthetic(OneModel):
    """LAION's aesthetic predictor, in float32; differentiable with `preprocess` bilinear or bicubic."""

    model: str = CLIP_MODEL
    """The CLIP that the head was trained on, a local folder or an id on the hub."""
    revision: str | None = None
    """Branch, tag or commit of `model` on the hub."""
    head: str = DEFAULT_HEAD
    """A file of weights (.pth or .safetensors), or a folder or hub repository with model.safetensors."""
    preprocess: Preprocess = "processor"
    """`processor`, the checkpoint's own on 8-bit images; `bilinear` or `bicubic`, on float images."""
    differentiable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        pretrained.check_model(self.model, what="CLIP")
        pretrained.check_file(self.head, option="head")

    def build(self, device: torch.device) -> Reward:
        """Loads CLIP and the head."""
        encoder = transformers_clip(
            self.model, device=device, revision=self.revision, preprocess=self.preprocess, owner=OWNER
        )
        weights = pretrained.read_weights(
            pretrained.fetch_file(self.head, HEAD_FILE, owner=OWNER, option="head"), owner=OWNER
        )
        head = head_of(weights).to(device, torch.float32)
        if (width := encoder.texts([""]).shape[-1]) != WIDTH:
            raise ValueError(
                f"{OWNER}: the head reads embeddings of width {WIDTH}, those of {self.model!r} have {width}: give "
                f"model: a CLIP ViT-L/14, such as {CLIP_MODEL}."
            )

        def score(inputs: RewardInputs) -> RewardOutput:
            with gradient_of(inputs, encoder), torch.autocast(encoder.device.type, enabled=False):
                return score_output(head(encoder.images(inputs.images))[:, 0], inputs)

        return FunctionReward(
            name="aesthetic",
            score=score,
            needs=frozenset({"images"}),
            version=f"aesthetic:{self.head}@{pretrained.fingerprint(weights.values())}:{self.model}:{encoder.version}",
            differentiable=encoder.differentiable,
        )


def head_of(weights: Mapping[str, Tensor]) -> nn.Sequential:
    """The frozen head of a checkpoint. Raises ValueError: the weights are those of another network."""
    with torch.device("meta"):
        head = linear_head(WIDTH)
    wanted = {f"layers.{name}": tuple(weight.shape) for name, weight in head.state_dict().items()}
    give = f"head: the weights sac+logos+ava1-l14-linearMSE, or {DEFAULT_HEAD}, which holds them"
    pretrained.check_shapes(weights, wanted, owner=OWNER, give=give)
    head.load_state_dict({name.removeprefix("layers."): weight for name, weight in weights.items()}, assign=True)
    return head.eval().requires_grad_(False)
