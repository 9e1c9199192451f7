"""A checkpoint of VideoReward: its settings, and its weights with LoRA merged.

It is a folder with model_config.json and checkpoint-<n>/, which holds model.pth with all weights, or LoRA matrices
(adapter_model.safetensors) and the other trained weights (non_lora_state_dict.pth), which change a base model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.rewards.networks import pretrained
from flowrl.rewards.networks.qwen_vl import newer_name
from flowrl.runtime.files import read_json

DIMENSIONS = ("VQ", "MQ", "TA")
OWNER = "reward 'video_align'"
_LORA = re.compile(r"(.+)\.lora_([AB])(?:\.\w+)?\.weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSettings:
    """What a checkpoint's model_config.json says: frames, pixels, LoRA, and (mean, std) of each dimension."""

    constants: tuple[tuple[float, float], ...]
    fps: float
    num_frames: int | None
    max_pixels: int
    lora_alpha: float
    rslora: bool


def read_settings(folder: Path, *, normalise: bool) -> CheckpointSettings:
    """The settings of a checkpoint; without `normalise` the constants are (0, 1). Raises ValueError: if the file is
    missing or lacks something, or is of a model that samples or reads out otherwise."""
    file = folder / "model_config.json"
    try:
        content = read_json(file)
    except ValueError as error:
        raise ValueError(f"{OWNER}: cannot read {str(file)!r}: {error}. Give model: a VideoReward folder.") from error
    data, model, lora = (content.get(part) or {} for part in ("data_config", "model_config", "peft_lora_config"))
    if data.get("sample_type", "uniform") != "uniform" or not model.get("use_special_tokens", True):
        raise ValueError(f"{OWNER}: {str(file)!r} must have sample_type uniform and use_special_tokens true.")
    identity = ((0.0, 1.0),) * len(DIMENSIONS)
    return CheckpointSettings(
        constants=_constants(content.get("inference_config") or {}, file) if normalise else identity,
        fps=float(data.get("fps") or 2.0),
        num_frames=data.get("num_frames"),
        max_pixels=int(data.get("max_frame_pixels") or 240 * 320),
        lora_alpha=float(lora.get("lora_alpha", 32)),
        rslora=bool(lora.get("use_rslora", False)),
    )


def _constants(known: Mapping[str, Any], file: Path) -> tuple[tuple[float, float], ...]:
    """(mean, std) of each dimension."""
    wanted = [f"{name}_{what}" for name in DIMENSIONS for what in ("mean", "std")]
    if missing := [name for name in wanted if name not in known]:
        raise ValueError(
            f"{OWNER}: {str(file)!r} has no {missing[0]} under inference_config: set normalise: false, or give a "
            f"checkpoint with its constants."
        )
    constants = tuple((float(known[f"{name}_mean"]), float(known[f"{name}_std"])) for name in DIMENSIONS)
    if not all(math.isfinite(mean) and math.isfinite(std) and std > 0 for mean, std in constants):
        raise ValueError(f"{OWNER}: {str(file)!r}: means must be finite and standard deviations positive.")
    return constants


def checkpoint_of(folder: Path, number: int | None) -> Path:
    """The folder checkpoint-<n> with the given or the largest n."""
    found = {int(path.name.removeprefix("checkpoint-")): path for path in folder.glob("checkpoint-*[0-9]")}
    wanted = max(found, default=None) if number is None else number
    if wanted not in found:
        have = ", ".join(str(n) for n in sorted(found)) or "none"
        raise ValueError(
            f"{OWNER}: {str(folder)!r} has no checkpoint-{'<n>' if number is None else number}; n: {have}."
        )
    return found[wanted]


def merge_lora(weights: Mapping[str, Tensor], *, alpha: float, rslora: bool) -> dict[str, Tensor]:
    """Weights as peft names them, under the model's own names, W + alpha / r B A for each pair of matrices.

    r is the number of rows of A; rank-stabilised LoRA divides by its root instead. Names without anything of peft stay
    as they are.
    """
    plain: dict[str, Tensor] = {}
    pairs: dict[str, dict[str, Tensor]] = {}
    for given, weight in weights.items():
        name = _plain_name(given)
        if found := _LORA.fullmatch(name):
            pairs.setdefault(found[1], {})[found[2]] = weight
        elif ".original_module." not in name:
            plain[re.sub(r"\.modules_to_save\.(?:default\.)?", ".", name.replace(".base_layer.", "."))] = weight
    for module, pair in pairs.items():
        name = f"{module}.weight"
        if set(pair) != {"A", "B"} or name not in plain:
            raise ValueError(
                f"{OWNER}: the checkpoint's LoRA of {module} lacks a matrix or the weight that it changes."
            )
        rank = pair["A"].shape[0]
        change = pair["B"].float() @ pair["A"].float() * (alpha / (math.sqrt(rank) if rslora else rank))
        plain[name] = (plain[name].float() + change).to(plain[name].dtype)
    return plain


def _plain_name(name: str) -> str:
    return newer_name(name.removeprefix("base_model.model."))


def read_trained_weights(
    checkpoint: Path, settings: CheckpointSettings, base: str, base_revision: str | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """All weights of backbone and head, with LoRA merged; of the base model where the checkpoint keeps only changes."""
    merge = partial(merge_lora, alpha=settings.lora_alpha, rslora=settings.rslora)
    if (checkpoint / "model.pth").is_file():
        return merge(pretrained.read_weights(checkpoint / "model.pth", owner=OWNER))
    from transformers import Qwen2VLModel

    trained: dict[str, Tensor] = {}
    for name in ("adapter_model.safetensors", "non_lora_state_dict.pth"):
        if not (checkpoint / name).is_file():
            raise ValueError(f"{OWNER}: {str(checkpoint)!r} holds neither model.pth nor {name}: fetch it again.")
        trained |= pretrained.read_weights(checkpoint / name, owner=OWNER)
    network = pretrained.load_network(
        Qwen2VLModel,
        base,
        device=torch.device("cpu"),
        revision=base_revision,
        owner=OWNER,
        option="base",
        what="Qwen2-VL",
        shared=False,
        dtype=dtype,
    )
    # Pairs are merged only once trained weights have taken the base's place.
    return merge(network.state_dict() | {_plain_name(name): weight for name, weight in trained.items()})
