"""What is asked of a stock class that no family is written for: its LoRA in stock, and a run from the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from family_sampling import adapted, idle_tensors, replayed
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from PIL import Image
from tiny_generic import TINY_GENERIC
from tiny_generic_later import LATER
from train_command import train

from flowrl.pipelines import family
from flowrl.pipelines.generic import generic_family
from flowrl.pipelines.generic.generic_family import PROMPTS, check_reproduces
from flowrl.runtime.randomness import counter_normal

SETTINGS = {name: settings for name, (_, settings) in {**TINY_GENERIC, **LATER}.items()}
REWARDS = """
def darkness(images, prompts, metadata):
    return -images.mean((1, 2, 3))
"""


def proof(name: str, folder: Path, room: Path) -> dict[str, Any]:
    """Checks gradient, ratio and LoRA of a class; gives its largest deviation from stock's own two steps."""
    p: Any = family("generic").load(str(folder), dtype=torch.float32, **SETTINGS[name])
    policy = adapted(p)
    images = p.sources.examples(3, (40, 24))[1:]  # others than those of the test at load
    cond, negative = p.encode(PROMPTS, images), p.encode(["blue"], images[:1])
    velocity = p.guided(p.network, cond, negative, 2.0)
    log_prob = replayed(p, velocity, 2, 3)  # the same to the bit as the rollout's
    idle = idle_tensors(policy, log_prob.sum())
    assert len(idle) < len(policy.parameters) / 2
    deviation = check_reproduces(p)  # with the LoRA too
    p.save_lora(room, policy.peft_tensors(), policy.config)
    x, level = counter_normal((1, *p.latent_shape), "x"), p.schedule(3, "diffusers")
    with torch.no_grad():
        tuned = p.guided(p.network, cond[:1], negative, 2.0)(x, level.sigma[1], level.timestep[1])
    with mock.patch.object(generic_family, "check_reproduces"):  # which passed above
        again: Any = family("generic").load(str(folder), dtype=torch.float32, **SETTINGS[name])
    again.alone = p.alone  # which that check finds out
    again.encode([*PROMPTS, "blue"], [*images, images[0]])
    stock = hasattr(again.pipe, "load_lora_weights") and not hasattr(again.pipe, "unet_name")  # PRX's asks for a UNet
    by = "load_lora_weights" if stock else "PEFT"
    if by == "load_lora_weights":
        again.pipe.load_lora_weights(room)
    else:
        PeftModel.from_pretrained(again.pipe.transformer, str(room))  # its layers are put into the network
    assert any(isinstance(layer, BaseTunerLayer) for layer in again.denoiser.modules())
    with torch.no_grad():
        loaded = again.guided(again.network, cond[:1], negative, 2.0)(x, level.sigma[1], level.timestep[1])
    torch.testing.assert_close(loaded, tuned, atol=1e-5 * float(tuned.abs().max()), rtol=1e-5)
    return {"deviation": deviation, "lora_by": by, "one_prompt_at_a_time": p.alone, "targets": list(p.lora_targets)}


def one_iteration(name: str, folder: Path, room: Path, route: str | None = None) -> list[dict[str, Any]]:
    """One training iteration from the command; the rows of its log."""
    room.mkdir(exist_ok=True)
    rows = [{"prompt": prompt} for prompt in ("a red fox", "a blue cat on a table")]
    if "ImageTo" in name:
        for row, colour in zip(rows, ("red", "blue"), strict=True):
            Image.new("RGB", (40, 24), colour).save(room / f"{colour}.png")
            row["source"] = f"{colour}.png"
    (room / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (room / "rewards.py").write_text(REWARDS)
    config: dict[str, Any] = {
        "num_iterations": 1, "prompts_per_step": 2, "group_size": 2, "eval_every": 1, "progress": False,
        "out": str(room / "run"), "threads": 1,
        "pipeline": {"model": str(folder), "name": route, "dtype": "float32",
                     "device": "cpu", **SETTINGS[name]},
        "policy": {"lora_rank": 2},
        "sampler": {"kernel": "flow_sde", "noise_level": 0.3, "num_steps": 3, "guidance_scale": 2.0,
                    "sde_window_range": [0, 2]},
        "prompts": dict.fromkeys(("train", "eval"), str(room / "prompts.jsonl")),
        "rewards": [{"file": str(room / "rewards.py"), "function": "darkness"}],
        "eval": {"num_images": 1, "initial": False}, "logging": {"tensorboard": False},
    }  # fmt: skip
    (room / "run.yaml").write_text(yaml.safe_dump(config))
    assert train(str(room / "run.yaml"), []) == 0
    return [json.loads(line) for line in (room / "run" / "metrics.jsonl").read_text().splitlines()]
