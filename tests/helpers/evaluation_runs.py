"""Run folders as far as evaluations look at them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from toy_pipeline import write_toy


def make_run(folder: Path, **settings: Any) -> Path:
    """A run folder as far as evaluations look at it."""
    folder.mkdir()
    written = yaml.safe_load(write_toy(folder, **settings).read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump(written))
    (folder / "lora").mkdir()
    pair = {"lora_A": torch.zeros(2, 17), "lora_B": torch.zeros(16, 2)}
    tensors = {f"transformer.inner.{name}.weight": value for name, value in pair.items()}
    save_file(tensors, folder / "lora" / "pytorch_lora_weights.safetensors")
    return folder
