"""How many weights the models of rewards have: published ones by a table, folders by the headers of their files."""

from __future__ import annotations

from pathlib import Path

from flowrl.rewards.base import Model
from flowrl.runtime.files import safetensors_parameters

PARAMETERS = {
    "openai/clip-vit-large-patch14": 427_616_513,
    "laion/CLIP-ViT-H-14-laion2B-s32B-b79K": 986_109_441,
    "xswu/HPSv2": 986_109_441,
    "yuvalkirstain/PickScore_v1": 986_109_441,
    "THUDM/ImageReward": 446_900_000,
    "MizzenAI/HPSv3": 8_291_375_616,
    "Junjun2333/HPSv3-PlusPlus": 8_184_736_804,
    "TIGER-Lab/EditReward-Qwen2.5-VL-7B": 7_754_544_228,
    "zhiqiulin/clip-flant5-xxl": 11_156_312_064,
    "zhiqiulin/clip-flant5-xl": 2_856_052_736,
    "openai/clip-vit-large-patch14-336": 303_507_456,
    "laion/clap-htsat-unfused": 153_492_890,
    "KwaiVGI/VideoReward": 2_208_985_600,
    "Qwen/Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "facebook/dinov2-base": 86_580_480,
    "facebook/mask2former-swin-small-coco-instance": 68_741_083,
    "facebook/vjepa2-vitl-fpc64-256": 326_000_000,
    "Falconsai/nsfw_image_detection": 85_800_194,
}
"""Hub id -> parameters."""


def model_of(name: str, bytes_per_weight: int = 4) -> Model:
    """A model that a reward holds, with the number of its weights where that is known without a download."""
    folder = Path(name).expanduser()
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    known = sum(map(safetensors_parameters, files)) if files else PARAMETERS.get(name)
    return Model(name, bytes_per_weight, known)
