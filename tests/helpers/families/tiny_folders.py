"""The smallest folder of every family, and the settings that it is loaded with."""

from __future__ import annotations

import atexit
import importlib
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from flowrl.runtime.temporary import TemporaryFolder

TINY = {
    "chroma": "tiny_flux:save_tiny_chroma", "cogvideox": "tiny_cogvideox", "flux": "tiny_flux", "flux2": "tiny_flux2",
    "flux_fill": "tiny_flux:save_tiny_flux_fill", "hunyuan_image": "tiny_qwen_image:save_tiny_hunyuan_image",
    "hunyuan_video": "tiny_hunyuan_video",
    "hunyuan_video15": "tiny_hunyuan_video15",
    "kontext": "tiny_flux:save_tiny_kontext", "krea2": "tiny_krea2", "lucy_edit": "tiny_wan:save_tiny_lucy_edit",
    "ltx2": "tiny_ltx2", "ltx_video": "tiny_ltx_video",
    "lumina2": "tiny_lumina2", "motif_video": "tiny_wan:save_tiny_motif_video", "qwen_image": "tiny_qwen_image",
    "qwen_image_21": "tiny_qwen_image_21",
    "qwen_image_edit": "tiny_qwen_image:save_tiny_qwen_image_edit", "sana": "tiny_sana",
    "sana_video": "tiny_sana_video", "sd": "tiny_sd",
    "sd3": "tiny_models:save_tiny_sd3", "sdxl": "tiny_sd:save_tiny_sdxl", "wan": "tiny_wan",
    "wan_animate": "tiny_wan:save_tiny_wan_animate",
    "wan_vace": "tiny_wan:save_tiny_wan_vace", "z_image": "tiny_z_image",
}  # fmt: skip
"""Family -> module in tests/ that writes its smallest folder, and the function where it is not `save_tiny_<family>`."""
_CLIP = {"height": 32, "width": 48, "num_frames": 5, "fps": 8.0, "max_sequence_length": 16}
SETTINGS: dict[str, dict[str, Any]] = {
    "chroma": {"height": 32, "width": 32, "max_sequence_length": 16},
    "cogvideox": {**_CLIP, "num_frames": 9}, "hunyuan_video": _CLIP, "hunyuan_video15": _CLIP, "wan": _CLIP,
    "lucy_edit": _CLIP, "motif_video": _CLIP, "wan_animate": _CLIP, "wan_vace": _CLIP,
    "hunyuan_image": {"height": 32, "width": 48, "max_sequence_length": 32},
    "ltx2": {**_CLIP, "height": 64, "width": 64, "num_frames": 9},
    "ltx_video": {**_CLIP, "width": 64, "num_frames": 9},
    "flux": {"height": 32, "width": 32, "max_sequence_length": 16},
    "flux_fill": {"height": 32, "width": 32, "max_sequence_length": 16},
    "flux2": {"height": 64, "width": 64, "max_sequence_length": 64},
    "kontext": {"height": 32, "width": 32, "max_sequence_length": 16},
    "lumina2": {"height": 32, "width": 32, "max_sequence_length": 200},
    "qwen_image": {"height": 16, "width": 16, "max_sequence_length": 24},
    "krea2": {"height": 16, "width": 16, "max_sequence_length": 24},
    "qwen_image_21": {"height": 64, "width": 64, "max_sequence_length": 48},
    "qwen_image_edit": {"height": 16, "width": 16, "max_sequence_length": 128},
    "sana": {"max_sequence_length": 16},
    "sana_video": {**_CLIP, "width": 64},
    "sd3": {"max_sequence_length": 16},
    "z_image": {"height": 16, "width": 16, "max_sequence_length": 24},
}  # fmt: skip
"""Family -> settings of its tiny folder that are not the family's own."""


def narrow_glyphs(projection: Any) -> None:
    """Has a class that brings quoted text into a network take few channels on the way where tiny ones are made: stock
    writes down 2048, four million weights that are loaded each time and read 256 tokens at each call."""
    stock = projection.__init__

    def init(self: Any, in_features: int, hidden_size: int, out_features: int) -> None:
        stock(self, in_features, hidden_size if in_features > 64 else 2 * in_features, out_features)

    projection.__init__ = init


def save_tiny(name: str, folder: Path) -> Path:
    """Writes a family's smallest folder; it is made once a process."""
    return Path(shutil.copytree(_made(name), folder, dirs_exist_ok=True))


@cache
def _made(name: str) -> Path:
    module, _, function = TINY[name].partition(":")
    saved: Path = getattr(importlib.import_module(module), function or f"save_tiny_{name}")(Path(_room().name) / name)
    return saved


@cache
def _room() -> TemporaryFolder:
    room = TemporaryFolder("flowrl-tiny-")
    atexit.register(room.cleanup)
    return room
