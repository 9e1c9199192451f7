"""PickScore: CLIP ViT-H/14 trained on people's choices between two images of a prompt (Kirstain et al. 2023).

arXiv 2305.01569; weights yuvalkirstain/PickScore_v1. Published uses differ in the scaling of s = exp(logit_scale) cos:

    scale        score           used so by
    flow_grpo    s / 26          Flow-GRPO, PaCo-RL, Flow-Factory, verl-omni, UniRL
    cosine       cos             DanceGRPO, Pref-GRPO
    mixgrpo      (s - 18) / 8    MixGRPO
    raw          s               the checkpoint's own logit
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.rewards import Reward
from flowrl.rewards.networks.clip_encoder import Preprocess, check_threshold, prompt_reward, transformers_clip
from flowrl.rewards.networks.pretrained import check_model

Scale = Literal["flow_grpo", "cosine", "mixgrpo", "raw"]
DEFAULT_MODEL = "yuvalkirstain/PickScore_v1"
OWNER = "reward 'pick_score'"


def check(
    *,
    model: str = DEFAULT_MODEL,
    revision: str | None = None,
    preprocess: Preprocess = "processor",
    scale: Scale = "flow_grpo",
    threshold: float | None = None,
) -> None:
    """Refuses option values that are wrong, without loading the model."""
    check_threshold(threshold, owner=OWNER)
    check_model(model, owner=OWNER, what="CLIP")


def pick_score(
    *,
    device: torch.device,
    model: str = DEFAULT_MODEL,
    revision: str | None = None,
    preprocess: Preprocess = "processor",
    scale: Scale = "flow_grpo",
    threshold: float | None = None,
) -> Reward:
    """PickScore under a published scaling, in float32; differentiable with `preprocess` bilinear or bicubic.

    Half precision changes the third decimal, and scores of a group differ by 0.005 to 0.02.

    Args:
        device: where the model runs.
        model: a CLIP of transformers with tokenizer and preprocessor, a local folder or an id on the hub.
        revision: branch, tag or commit on the hub.
        preprocess: `processor`, the checkpoint's own on 8-bit images; `bilinear` or `bicubic`, on float images.
        scale: see the module.
        threshold: makes the reward `1[score > threshold]`.

    Raises:
        ValueError: if the model is neither on disk nor to be had from the hub.
    """
    check(model=model, revision=revision, preprocess=preprocess, scale=scale, threshold=threshold)
    encoder = transformers_clip(model, device=device, revision=revision, preprocess=preprocess, owner=OWNER)

    def scaling(cosine: Tensor, logit_scale: float) -> Tensor:
        return scaled(cosine, logit_scale, scale)

    return prompt_reward("pick_score", encoder, scaling, threshold=threshold, version=f"{model}:{scale}")


def scaled(cosine: Float[Tensor, " b"], logit_scale: float, scale: Scale) -> Float[Tensor, " b"]:
    """The score of a cosine under a published scaling."""
    match scale:
        case "cosine":
            return cosine
        case "flow_grpo":
            return logit_scale * cosine / 26.0
        case "mixgrpo":
            return (logit_scale * cosine - 18.0) / 8.0
        case "raw":
            return logit_scale * cosine
