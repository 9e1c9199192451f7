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
from torch import Tensor
from torch.nn import functional

from flowrl.rewards.base import FunctionReward, Reward, RewardInputs, RewardOutput
from flowrl.rewards.networks import pretrained
from flowrl.rewards.networks.clip_encoder import (
    CLIP_MODEL,
    Preprocess,
    gradient_of,
    score_output,
    transformers_clip,
)
from flowrl.rewards.networks.model_sizes import OneModel
from flowrl.runtime.shapes import Float

DEFAULT_HEAD = "ttj/sac-logos-ava1-l14-linearMSE"
HEAD_FILE = "model.safetensors"
PLACES = (0, 2, 4, 6, 7)  # places of the linear layers in the published list of layers; dropout is between them
WIDTHS = (768, 1024, 128, 64, 16, 1)
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
        give = f"head: the weights sac+logos+ava1-l14-linearMSE, or {DEFAULT_HEAD}, which holds them"
        pretrained.check_shapes(weights, head_shapes(), owner=OWNER, give=give)
        if (width := encoder.texts([""]).shape[-1]) != WIDTHS[0]:
            raise ValueError(
                f"{OWNER}: the head reads embeddings of width {WIDTHS[0]}, those of {self.model!r} have {width}: give "
                f"model: a CLIP ViT-L/14, such as {CLIP_MODEL}."
            )
        weights = {name: tensor.to(device, torch.float32) for name, tensor in weights.items()}

        def score(inputs: RewardInputs) -> RewardOutput:
            with gradient_of(inputs, encoder), torch.autocast(encoder.device.type, enabled=False):
                return score_output(apply_head(weights, encoder.images(inputs.images)), inputs)

        return FunctionReward(
            name="aesthetic",
            score=score,
            needs=frozenset({"images"}),
            version=f"aesthetic:{self.head}@{pretrained.fingerprint(weights.values())}:{self.model}:{encoder.version}",
            differentiable=encoder.differentiable,
        )


def head_shapes() -> dict[str, tuple[int, ...]]:
    """The head's tensors by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for place, fan_in, fan_out in zip(PLACES, WIDTHS[:-1], WIDTHS[1:], strict=True):
        shapes |= {f"layers.{place}.weight": (fan_out, fan_in), f"layers.{place}.bias": (fan_out,)}
    return shapes


def apply_head(weights: Mapping[str, Tensor], embeddings: Float[Tensor, " b d"]) -> Float[Tensor, " b"]:
    """The five linear layers, one after the other."""
    for place in PLACES:
        embeddings = functional.linear(embeddings, weights[f"layers.{place}.weight"], weights[f"layers.{place}.bias"])
    return embeddings[:, 0]
