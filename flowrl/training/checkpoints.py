"""What a run keeps of its policy: the LoRA as stock diffusers loads it, and its state put back from a checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from flowrl.pipelines import Pipeline
from flowrl.pipelines.lora import Policy


def save_lora(folder: Path, pipeline: Pipeline, policy: Policy) -> None:
    """Replaces the LoRA in a folder, each of its files in one step; a model of two experts has two."""
    staged = folder.with_name(".lora.writing")
    pipeline.save_lora(staged, policy.tensors(), policy.config)
    for path in sorted(staged.rglob("*.safetensors")):
        place = folder / path.relative_to(staged)
        place.parent.mkdir(parents=True, exist_ok=True)
        path.replace(place)
    shutil.rmtree(staged)


def restore(state: dict[str, Any], policy: Policy, optimizer: torch.optim.Optimizer) -> int:
    """Puts a checkpoint back; returns the number of finished iterations."""
    policy.load(state["policy"])
    for slot, tensors in state["slots"].items():
        for name, tensor in tensors.items():
            policy.slots[slot][name].copy_(tensor)
    optimizer.load_state_dict(state["optimizer"])
    return int(state["iteration"])
