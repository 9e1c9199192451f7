"""CLIPScore: how well an image matches its prompt, by the cosine of CLIP's embeddings (Hessel et al. 2021).

arXiv 2104.08718. Published uses differ in the model, its preprocessing and the scaling; with s = exp(logit_scale),
which is 100 in OpenAI's checkpoints:

    scale         score              used so by
    cosine        cos                Flow-Factory; Pref-GRPO (open_clip ViT-H-14), MixGRPO (DFN5B ViT-H-14-384)
    logits        s cos              the model's own logits
    logits_100    s cos / 100        DiffusionNFT, Edit-R1
    logits_30     s cos / 30         Adv-GRPO, PaCo-RL, UniRL
    paper         2.5 max(cos, 0)    the original metric

Group-relative methods do not see a factor except through the floor of the deviation and in sums of rewards.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.rewards import Reward
from flowrl.rewards.networks.clip_encoder import (
    Library,
    Preprocess,
    check_open_clip,
    check_threshold,
    open_clip_encoder,
    prompt_reward,
    transformers_clip,
)
from flowrl.rewards.networks.pretrained import check_model

Scale = Literal["cosine", "logits", "logits_100", "logits_30", "paper"]
DEFAULT_MODEL = "openai/clip-vit-large-patch14"
OWNER = "reward 'clip_score'"


def check(
    *,
    model: str = DEFAULT_MODEL,
    revision: str | None = None,
    library: Library = "transformers",
    preprocess: Preprocess = "processor",
    scale: Scale = "cosine",
    threshold: float | None = None,
) -> None:
    """Refuses option values that are wrong, without loading the model."""
    check_threshold(threshold, owner=OWNER)
    if library == "transformers":
        check_model(model, owner=OWNER, what="CLIP")
        return
    for option, value, default in (("revision", revision, None), ("preprocess", preprocess, "processor")):
        if value != default:
            raise ValueError(f"{OWNER}: {option} is for library transformers; open_clip takes its own: leave it out.")
    check_open_clip(model, owner=OWNER)


def clip_score(
    *,
    device: torch.device,
    model: str = DEFAULT_MODEL,
    revision: str | None = None,
    library: Library = "transformers",
    preprocess: Preprocess = "processor",
    scale: Scale = "cosine",
    threshold: float | None = None,
) -> Reward:
    """The scaled cosine of image and prompt, in float32; differentiable with `preprocess` bilinear or bicubic.

    Args:
        device: where the model runs.
        model: of transformers a local folder or an id on the hub; of open_clip `architecture/weights` such as
            ViT-H-14/laion2b_s32b_b79k, `hf-hub:owner/name` or `local-dir:folder`.
        revision: branch, tag or commit on the hub.
        library: what loads the model and prepares the images.
        preprocess: `processor`, the checkpoint's own on 8-bit images; `bilinear` or `bicubic`, on float images.
            DiffusionNFT, Edit-R1, Adv-GRPO and PaCo-RL use `bilinear`.
        scale: see the module.
        threshold: makes the reward `1[score > threshold]`; DanceGRPO's binary reward takes 0.39 of the cosine.

    Raises:
        ValueError: if the model is neither on disk nor to be had from the hub.
    """
    check(model=model, revision=revision, library=library, preprocess=preprocess, scale=scale, threshold=threshold)
    if library == "open_clip":
        encoder = open_clip_encoder(model, device=device, owner=OWNER)
    else:
        encoder = transformers_clip(model, device=device, revision=revision, preprocess=preprocess, owner=OWNER)

    def scaling(cosine: Tensor, logit_scale: float) -> Tensor:
        return scaled(cosine, logit_scale, scale)

    return prompt_reward("clip_score", encoder, scaling, threshold=threshold, version=f"{model}:{scale}")


def scaled(cosine: Float[Tensor, " b"], logit_scale: float, scale: Scale) -> Float[Tensor, " b"]:
    """The score of a cosine under a published scaling."""
    match scale:
        case "cosine":
            return cosine
        case "paper":
            return 2.5 * cosine.clamp(min=0.0)
        case "logits":
            return logit_scale * cosine
        case "logits_100":
            return logit_scale * cosine / 100.0
        case "logits_30":
            return logit_scale * cosine / 30.0
