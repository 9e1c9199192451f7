"""Features of images for measures of diversity: of CLIP, or of the pixels themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import torch
from PIL import Image

from flowrl.benchmarks.diversity import Distance
from flowrl.config.options import unknown_name
from flowrl.generation.folders import ImageFile
from flowrl.rewards.networks.clip_encoder import CLIP_MODEL
from flowrl.rewards.networks.pretrained import check_model, clip_fingerprint, clip_of_pixels, load_clip
from flowrl.runtime.shapes import Float64

Features = Literal["clip", "pixels"]

DISTANCE: dict[Features, Distance] = {"clip": "cosine", "pixels": "euclidean"}
_SIDE = 16
_BATCH = 32
OWNER = "diversity"


def check_features(features: str, model: str | None) -> Features:
    """The features by name; loads no model. Raises ValueError: an unknown name, or a model for features without."""
    for known in get_args(Features):
        if features == known:
            if known == "pixels" and model is not None:
                raise ValueError(f"{OWNER}: features pixels have no model, got {model!r}: leave feature_model out.")
            if known == "clip":
                check_model(model or CLIP_MODEL, owner=OWNER, what="CLIP")
            return known
    raise ValueError(unknown_name("features", features, get_args(Features)))


def features_of(
    images: Sequence[ImageFile], features: Features, model: str | None = None
) -> tuple[Float64[np.ndarray, " n d"], str]:
    """Features [N, D] of images, and the version of what made them. `clip`: the projected unit embedding. `pixels`:
    colours at 16 x 16 over the root of their number, so a Euclidean distance is the root mean square difference."""
    if features == "pixels":
        small = [Image.fromarray(image.pixels()).resize((_SIDE, _SIDE), Image.Resampling.BOX) for image in images]
        values = np.stack([np.asarray(one, dtype=np.float64).reshape(-1) / 255.0 for one in small])
        return values / np.sqrt(values.shape[1]), f"pixels:{_SIDE}x{_SIDE}"
    name = model or CLIP_MODEL
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network, processor = load_clip(name, device=device, revision=None, owner=OWNER, option="feature_model")
    found = []
    for first in range(0, len(images), _BATCH):
        with torch.no_grad():
            pixels = [image.pixels() for image in images[first : first + _BATCH]]
            found.append(clip_of_pixels(network, processor, pixels).double().cpu().numpy())
    return np.concatenate(found), f"clip:{name}@{clip_fingerprint(network)}"
