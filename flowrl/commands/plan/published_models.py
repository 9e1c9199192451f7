"""What a model's parts weigh besides its denoiser: of published checkpoints by a table, of folders by their files."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.pipelines import published

_DENOISERS = ("transformer", "transformer_2", "unet")

MODELS = {
    "openai/clip-vit-large-patch14": 427_616_513,
    "laion/CLIP-ViT-H-14-laion2B-s32B-b79K": 986_109_441,
    "yuvalkirstain/PickScore_v1": 986_109_441,
    "THUDM/ImageReward": 446_900_000,
    "MizzenAI/HPSv3": 8_291_375_616,
    "KwaiVGI/VideoReward": 2_208_985_600,
    "Qwen/Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "facebook/dinov2-base": 86_580_480,
    "facebook/mask2former-swin-small-coco-instance": 68_741_083,
    "facebook/vjepa2-vitl-fpc64-256": 326_000_000,
    "Falconsai/nsfw_image_detection": 85_800_194,
}
"""Hub id -> parameters of models that rewards use."""

_CLIP = "openai/clip-vit-large-patch14"
_BY_MODEL = {  # reward -> its default model, and whether it runs in two bytes per weight unless told otherwise
    "aesthetic": (_CLIP, False), "clip_score": (_CLIP, False), "pick_score": ("yuvalkirstain/PickScore_v1", False),
    "hps": ("laion/CLIP-ViT-H-14-laion2B-s32B-b79K", False), "hpsv3": ("MizzenAI/HPSv3", True),
    "image_reward": ("THUDM/ImageReward", False), "level_tokens": ("Qwen/Qwen2.5-VL-7B-Instruct", True),
    "physics": ("facebook/vjepa2-vitl-fpc64-256", False), "safety": ("Falconsai/nsfw_image_detection", False),
    "similarity": ("facebook/dinov2-base", False), "video_align": ("KwaiVGI/VideoReward", True),
}  # fmt: skip
_WITHOUT = ("attributes", "jpeg_compressibility", "jpeg_incompressibility", "ocr", "remote", "temporal_smoothness")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part of a pipeline, or a reward's model.

    Attributes:
        name: its folder, or the model's id.
        parameters: their number.
        stored: bytes of its files here; None for what is to be downloaded.
    """

    name: str
    parameters: int
    stored: int | None = None


def other_parts(model: str) -> tuple[Part, ...] | None:
    """The parts of a folder or a published checkpoint besides the denoiser; None where nothing is known."""
    if Path(model).is_dir():
        return tuple(part for part in folder_parts(Path(model)) if part.name not in _DENOISERS)
    known = published.checkpoints().get(model)
    if known is None:
        return None
    return tuple(Part(name=name, parameters=count) for name, count in known.parts.items())


def folder_parts(folder: Path) -> tuple[Part, ...]:
    """Every part of a pipeline folder that has weights, read from the headers of its safetensors files."""
    parts = []
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        files = sorted(path.glob("*.safetensors"))
        plain = [file for file in files if ".fp16." not in file.name] or files
        if plain:
            parameters = sum(_parameters(file) for file in plain)
            parts.append(Part(name=path.name, parameters=parameters, stored=sum(file.stat().st_size for file in plain)))
    return tuple(parts)


def _parameters(file: Path) -> int:
    """Elements of the tensors in a safetensors file, from its header.

    Raises:
        ValueError: the file is none.
    """
    with file.open("rb") as stream:
        start = stream.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < size < 2**30:
            raise ValueError(f"{file} is not a safetensors file: download or save it again")
        header = json.loads(stream.read(size))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def reward_models(name: str | None, options: Mapping[str, Any]) -> tuple[tuple[str, int, int], ...] | None:
    """(model, parameters, bytes per weight) of what a reward holds on the device; None where that is not known.

    Args:
        name: of a built-in reward; None for a user's own.
        options: its options.
    """
    if name in _WITHOUT or (name == "geneval" and options.get("judge", "shapes") == "shapes"):
        return ()
    if name == "geneval":
        detector = options.get("detector", "facebook/mask2former-swin-small-coco-instance")
        return _known((detector, 4), (options.get("clip_model") or _CLIP, 4))
    if name == "adversarial" and options.get("backbone", "dinov2") == "attributes":
        return ()
    if name == "adversarial" and options.get("model") is None:
        backbones = {"dinov2": "facebook/dinov2-base", "clip": "yuvalkirstain/PickScore_v1"}
        return _known((backbones[options.get("backbone", "dinov2")], 4))
    if name == "similarity" and options.get("features") == "clip":
        return _known((options.get("model") or _CLIP, 4))
    if name not in _BY_MODEL:
        return None
    default, low = _BY_MODEL[name]
    size = {"float32": 4, "bfloat16": 2, "float16": 2}.get(str(options.get("dtype")), 2 if low else 4)
    return _known((options.get("model") or default, size))


def _known(*models: tuple[str, int]) -> tuple[tuple[str, int, int], ...] | None:
    if any(model not in MODELS for model, _ in models):
        return None
    return tuple((model, MODELS[model], size) for model, size in models)


def in_cache(model: str) -> bool:
    """Whether the hub's cache on this machine holds a snapshot of a model."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", str(home / "hub"))).expanduser()
    return any((cache / f"models--{model.replace('/', '--')}").glob("snapshots/*/*"))
