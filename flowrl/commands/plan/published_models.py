"""What a model's parts weigh besides its denoiser: of published checkpoints by a table, of folders by their files."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from flowrl.files import parse_json
from flowrl.pipelines import known_checkpoints
from flowrl.rewards import Model

_DENOISERS = ("transformer", "transformer_2", "unet")

MODELS = {
    "openai/clip-vit-large-patch14": 427_616_513,
    "laion/CLIP-ViT-H-14-laion2B-s32B-b79K": 986_109_441,
    "xswu/HPSv2": 986_109_441,
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


Parts = Mapping[str, int]
"""Name of a pipeline's part, which is that of its folder -> number of its parameters."""


def other_parts(model: str) -> Parts | None:
    """The parts of a folder or a published checkpoint besides the denoiser; None where nothing is known."""
    if Path(model).is_dir():
        return {name: count for name, count in folder_parts(Path(model)).items() if name not in _DENOISERS}
    known = known_checkpoints.checkpoints().get(model)
    return None if known is None else known.parts


def folder_parts(folder: Path) -> Parts:
    """Every part of a pipeline folder that has weights, read from the headers of its safetensors files."""
    parts = {}
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        files = sorted(path.glob("*.safetensors"))
        plain = [file for file in files if ".fp16." not in file.name] or files
        if plain:
            parts[path.name] = sum(_parameters(file) for file in plain)
    return parts


def _parameters(file: Path) -> int:
    """Elements of the tensors in a safetensors file, from its header.

    Raises:
        ValueError: the file is another one.
    """
    with file.open("rb") as stream:
        start = stream.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < size < 2**30:
            raise ValueError(f"{file} is not a safetensors file: download or save it again")
        header = parse_json(stream.read(size).decode("utf-8", "replace"), str(file))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def reward_models(models: Sequence[Model]) -> tuple[tuple[str, int, int], ...] | None:
    """(model, parameters, bytes per weight) of a reward's models; None where one is not known."""
    if any(model.name not in MODELS for model in models):
        return None
    return tuple((model.name, MODELS[model.name], model.bytes_per_weight) for model in models)


def in_cache(model: str) -> bool:
    """Whether the hub's cache on this machine holds a snapshot of a model."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", str(home / "hub"))).expanduser()
    return any((cache / f"models--{model.replace('/', '--')}").glob("snapshots/*/*"))
