"""CLIPScore: how well a picture matches its prompt, by the cosine of CLIP's embeddings (Hessel et al. 2021).

arXiv 2104.08718. Uses of the score differ in scaling only; in OpenAI's checkpoints exp(logit_scale) is 100:

    plain cosine                    scale: cosine
    logits / 100, or / 30           scale: logits, divisor: 100 (or 30)
    2.5 max(cos, 0), the paper's    scale: cosine, divisor: 0.4, clamp_min: 0
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from flowrl.rewards import FunctionReward, Reward, RewardInputs, RewardOutput, to_uint8

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
    if model.startswith((".", "/", "~")) and not Path(model).expanduser().is_dir():
        raise ValueError(
            f"reward 'clip_score': there is no folder {model!r}: give a folder with a CLIP model or a hub id."
        )
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("reward 'clip_score' needs the package transformers: pip install transformers.")


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
    network, processor = _load(str(Path(model).expanduser()) if model.startswith("~") else model, revision, device)
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
        version=f"clip_score:{model}@{_fingerprint(network)}:{scale}/{divisor:g}:clamp_min-{bound}:"
        f"{type(processor.image_processor).__name__}:float32",
    )


def _load(model: str, revision: str | None, device: torch.device) -> tuple[Any, Any]:
    from transformers import CLIPModel, CLIPProcessor

    try:
        network = CLIPModel.from_pretrained(model, revision=revision, dtype=torch.float32)
        processor = CLIPProcessor.from_pretrained(model, revision=revision)
    except OSError as error:  # what transformers raises for missing files, unknown ids and no connection alike
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"reward 'clip_score' could not load the CLIP model {model!r}: {reason} Give model: a folder that holds a "
            f"complete CLIP checkpoint (config, weights, tokenizer, preprocessor), or a hub id while the hub can be "
            f"reached; fetch it beforehand with `hf download {model}`, or take a reward that needs no weights."
        ) from error
    return network.to(device).eval().requires_grad_(False), processor


def _fingerprint(network: Any) -> str:
    """A short hash of the two projections: tells checkpoints apart where a folder or a branch name does not."""
    digest = hashlib.sha256()
    for layer in (network.visual_projection, network.text_projection):
        digest.update(layer.weight.detach().cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


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
    tokens = processor.tokenizer(
        inputs.prompts,
        padding=True,  # the text tower is causal and read at the end token, so how far it is padded does not matter
        truncation=True,
        max_length=network.config.text_config.max_position_embeddings,
        return_tensors="pt",
    ).to(device)
    with torch.autocast(device.type, enabled=False):
        image = _unit(_features(network.get_image_features(pixel_values=pixels["pixel_values"])))
        text = _unit(
            _features(network.get_text_features(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]))
        )
        score = (image * text).sum(-1)
        if scale == "logits":
            score = network.logit_scale.exp() * score
    score = score / divisor
    if clamp_min is not None:
        score = score.clamp(min=clamp_min)
    values = score.to(inputs.images.device)
    return RewardOutput(values=values, valid=torch.ones_like(values, dtype=torch.bool))


def _features(output: Any) -> Float[Tensor, " b d"]:
    """The projected embedding; transformers 4 returns the tensor itself, 5 an output object that holds it."""
    features: Tensor = output if isinstance(output, Tensor) else output.pooler_output
    return features


def _unit(features: Float[Tensor, " b d"]) -> Float[Tensor, " b d"]:
    unit: Tensor = features / features.norm(dim=-1, keepdim=True)
    return unit
