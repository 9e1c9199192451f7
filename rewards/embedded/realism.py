"""Realism of images of the embedded world: how near generated ones come to drawn scenes that no model trained on.

Features are means and standard deviations, over the image, of the channels of three depths of the attribute scorer's
convolutions (edges, outlines, whole shapes), whitened by their spread in drawn scenes: a shift that scenes never show
counts for more than another number of shapes. A discriminator with `backbone: attributes` reads the deepest of the
three with weights of its own; neither it nor a policy was trained on the distance here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.rewards.base import to_uint8
from flowrl.rewards.embedded.attributes import load_net, prepare, shipped_weights
from flowrl.runtime.randomness import Part, counter_seed
from flowrl.runtime.shapes import Float, UInt8
from flowrl.statistics.bootstrap import Interval
from flowrl.statistics.kernel_distance import kernel_interval
from flowrl.world.scene_prompts import train_records
from flowrl.world.scenes import draw_scene, random_scene

_AT_ONCE = 64
_FLOOR = 1e-2  # of the mean eigenvalue, added to each, so directions in which scenes hardly vary do not decide alone
_COPIES = 2  # of the 576 training records, to estimate the covariance of 304 features from


def scene_of(record: Mapping[str, Any], *key: Part) -> UInt8[np.ndarray, " h w 3"]:
    """A scene 64 x 64 of the embedded world in which a GenEval record holds: a function of record and counters."""
    if "include" not in record:
        raise ValueError(
            f"reward 'adversarial': references: world draws what a prompt's GenEval record asks for, but the prompt "
            f"{record.get('prompt', '')!r} has no 'include' in its metadata: take a JSONL file of prompts such as "
            f"asset:prompts/world_train.jsonl, or other references."
        )
    rng = np.random.default_rng(counter_seed("scene", *key))
    return draw_scene(random_scene(record, rng))


def scene_images(
    records: Sequence[Mapping[str, Any]], *, seed: int = 0, stream: str = "realism"
) -> Float[Tensor, " n 3 h w"]:
    """One drawn scene per GenEval record, from counters of its own, unrelated between seeds or streams: no
    discriminator learns from these."""
    scenes = np.stack([scene_of(record, seed, stream, i) for i, record in enumerate(records)])
    return torch.from_numpy(scenes).permute(0, 3, 1, 2).float() / 255.0


def world_features(images: Float[Tensor, " n 3 h w"]) -> Float[np.ndarray, " n d"]:
    """Whitened features float64 [N, 304] of images in [0, 1], rounded to 8 bits as a file would hold them."""
    mean, basis = _whitening()
    return np.asarray((_moments(images) - mean) @ basis)


def world_realism(
    images: Float[Tensor, " n 3 h w"], records: Sequence[Mapping[str, Any]], *, num_resamples: int = 1000
) -> Interval:
    """The kernel distance of generated images to drawn scenes of the same records; 0: no difference seen. The bootstrap
    draws from prompts. Two models on the same prompts and start noise are compared more sharply by `kernel_interval`
    with `before`. Raises ValueError: the lengths differ, or fewer than two prompts."""
    if len(images) != len(records):
        raise ValueError(f"each image needs its record, got {len(images)} images and {len(records)} records.")
    prompts = [str(record.get("prompt")) for record in records]
    real = world_features(scene_images(records))
    return kernel_interval(world_features(images), real, prompts, num_resamples=num_resamples, seed=0)


@torch.no_grad()
def _moments(images: Tensor) -> Float[np.ndarray, " n d"]:
    net = load_net(shipped_weights())
    pixels = torch.from_numpy(to_uint8(images)).permute(0, 3, 1, 2)
    found = []
    for piece in pixels.split(_AT_ONCE):
        hidden, depths = prepare(piece.float() / 255.0), []
        for layer in net.trunk:
            if isinstance(layer, torch.nn.Conv2d) and layer.stride == (2, 2) and layer.in_channels != 3:
                depths.append(hidden)  # the end of one depth: the next convolution halves the image
            hidden = layer(hidden)
        moments = [torch.cat([x.mean(dim=(2, 3)), x.std(dim=(2, 3))], dim=1) for x in (*depths, hidden)]
        found.append(torch.cat(moments, dim=1).double().numpy())
    return np.concatenate(found)


@lru_cache(maxsize=1)
def _whitening() -> tuple[np.ndarray, np.ndarray]:
    """Mean [D] and basis [D, D] in which drawn scenes have about unit variance."""
    moments = _moments(scene_images(train_records() * _COPIES, stream="whitening"))
    values, vectors = np.linalg.eigh(np.cov(moments.T))
    return moments.mean(axis=0), vectors / np.sqrt(np.maximum(values, 0.0) + _FLOOR * values.mean())
