"""CLIPScore: how well a picture matches its prompt, by the cosine of CLIP's embeddings (Hessel et al. 2021).

arXiv 2104.08718. Uses of the score differ in scaling only; in OpenAI's checkpoints exp(logit_scale) is 100:

    plain cosine                    scale: cosine
    logits / 100, or / 30           scale: logits, divisor: 100 (or 30)
    2.5 max(cos, 0), the paper's    scale: cosine, divisor: 0.4, clamp_min: 0
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import torch
from PIL import Image

from flowrl.rewards import FunctionReward, Reward, RewardInputs, RewardOutput, to_uint8
from flowrl.rewards.pretrained import check_model, clip_fingerprint, clip_image, clip_text, load_clip

Scale = Literal["cosine", "logits"]
DEFAULT_MODEL = "openai/clip-vit-large-patch14"


def check(
    *,
    model: str = DEFAULT_MODEL,
    revision: str | None = None,
    scale: Scale = "cosine",
    divisor: float = 1.0,
    clamp_min: float | None = None,
) -> None:
    """Refuses option values that are wrong, without loading the model."""
    if not (math.isfinite(divisor) and divisor > 0):
        raise ValueError(f"reward 'clip_score': divisor must be positive, got {divisor}.")
    if clamp_min is not None and not math.isfinite(clamp_min):
        raise ValueError(f"reward 'clip_score': clamp_min must be a finite number or null, got {clamp_min}.")
    check_model(model, owner="reward 'clip_score'", what="CLIP")


def clip_score(
    *,
    device: torch.device,
    model: str = DEFAULT_MODEL,
    revision: str | None = None,
    scale: Scale = "cosine",
    divisor: float = 1.0,
    clamp_min: float | None = None,
) -> Reward:
    """`max(s / divisor, clamp_min)` with s the cosine of image and prompt, or exp(logit_scale) times it for `logits`.

    Runs in float32: the spread within a group is about 0.01, which half precision would round away. The pictures go
    through the checkpoint's own processor as 8-bit images, so no gradient flows.

    Args:
        device: where the model runs.
        model: a local folder, or an id on the Hugging Face hub.
        revision: branch, tag or commit on the hub.
        scale: `cosine` or `logits`.
        divisor: what the score is divided by.
        clamp_min: lower bound of the divided score, null for none.

    Raises:
        ValueError: if the model is neither on disk nor to be had from the hub.
    """
    check(model=model, revision=revision, scale=scale, divisor=divisor, clamp_min=clamp_min)
    network, processor = _load(model, revision, device)
    bound = "none" if clamp_min is None else f"{clamp_min:g}"
    return FunctionReward(
        name="clip_score",
        score=partial(
            _score,
            network=network,
            processor=processor,
            scale=scale,
            divisor=divisor,
            clamp_min=clamp_min,
            device=device,
        ),
        needs=frozenset({"images", "prompts"}),
        version=f"clip_score:{model}@{clip_fingerprint(network)}:{scale}/{divisor:g}:clamp_min-{bound}:"
        f"{type(processor.image_processor).__name__}:float32",
    )


def _load(model: str, revision: str | None, device: torch.device) -> tuple[Any, Any]:
    return load_clip(model, revision=revision, device=device, owner="reward 'clip_score'", option="model")


@torch.no_grad()
def _score(
    inputs: RewardInputs,
    *,
    network: Any,
    processor: Any,
    scale: Scale,
    divisor: float,
    clamp_min: float | None,
    device: torch.device,
) -> RewardOutput:
    pictures = [Image.fromarray(image) for image in to_uint8(inputs.images)]
    pixels = processor.image_processor(pictures, return_tensors="pt").to(device)
    with torch.autocast(device.type, enabled=False):
        image = clip_image(network, pixels["pixel_values"])
        text = clip_text(network, processor.tokenizer, inputs.prompts, device)
        score = (image * text).sum(-1)
        if scale == "logits":
            score = network.logit_scale.exp() * score
    score = score / divisor
    if clamp_min is not None:
        score = score.clamp(min=clamp_min)
    values = score.to(inputs.images.device)
    return RewardOutput(values=values, valid=torch.ones_like(values, dtype=torch.bool))
