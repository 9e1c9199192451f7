"""Tiny runs of several families and every recipe, made so that processes which share weights have unequal work.

Of three prompts in an iteration some teach nothing, so that micro-batches, pairs and experts differ from process to
process; of three held-out prompts one process has two, the other one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tiny_flux import save_tiny_flux
from tiny_models import save_tiny_sd3
from tiny_qwen_image import save_tiny_qwen_image
from tiny_wan import save_tiny_wan
from toy_pipeline import reward_list, write_toy

FAMILIES: Mapping[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "sd3": (save_tiny_sd3, ("pipeline.max_sequence_length=16",)),
    "flux": (save_tiny_flux, ("pipeline.height=32", "pipeline.width=32", "pipeline.max_sequence_length=16")),
    "qwen_image": (save_tiny_qwen_image, ("pipeline.height=16", "pipeline.width=16")),
    "wan": (
        lambda folder: save_tiny_wan(folder, "t2v-a14b"),
        ("pipeline.height=32", "pipeline.width=48", "pipeline.num_frames=5", "pipeline.fps=8", "sampler.shift=1.0",
         "pipeline.options={guidance_scale_2: 3.0}", "sampler.guidance_scale=2.0"),
    ),
}  # fmt: skip
"""How a tiny checkpoint is written, and what a run of it is told."""
ODE = ("sampler.kernel=ode",)
# Adam divides by the gradient's size: where that is 0 but for rounding, as of biases of keys, so would be its step.
FULL = ("policy.train=full", "policy.lora_rank=null", "policy.ema_decay=0.5", "optim.lr=1e-3", "optim.eps=0.01")
ROUTED = (
    "FUNCTION=half_fail redness",
    "reward_aggregation=each",
    "rewards.0.routes=[left]",
    "rewards.1.routes=[right]",
)
"""Each half of a state learns from a reward of its own."""
RECIPES: Mapping[str, tuple[str, ...]] = {
    "grpo": ("prompts_per_step=3", "micro_batch_size=2", "rollout_batch_size=2", "FUNCTION=half_fail", "kl_coef=0.1"),
    "forward": ("prompts_per_step=3", "micro_batch_size=1", "rollout_batch_size=2", "FUNCTION=brightness", *ODE,
                "recipe=forward", "objective.name=rft", "times.count=2", "kl_coef=0.1"),
    "preference": ("prompts_per_step=4", "micro_batch_size=2", "rollout_batch_size=2", "FUNCTION=half_fail", *ODE,
                   "recipe=preference", "objective.name=dpo", "times.count=2"),
    "backprop": ("prompts_per_step=3", "micro_batch_size=2", *ODE, "recipe=backprop", "objective.name=draft",
                 "rewards=[{name: smooth_brightness}]", "pipeline.gradient_checkpointing=true"),
}  # fmt: skip

RUNS = {"sd3": "grpo", "wan": "forward", "flux": "preference", "qwen_image": "backprop"}
"""Each family with one recipe, each recipe with one family."""
KILLING = """
import os, signal
from pathlib import Path
from flowrl.training import checkpoints

stock = checkpoints._write_tensors
def write(path, state):
    if path.name == "part-001.pt" and path.parent.name == ".000002" and not Path(__file__).with_suffix(".was").exists():
        path.write_bytes(b"half")
        Path(__file__).with_suffix(".was").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return stock(path, state)
checkpoints._write_tensors = write
"""
"""Appended to a file of rewards: the second of two processes is killed with half of its part of the second checkpoint
on the disk, once."""


def command(folder: Path, family: str, recipe: str, out: Path, *overrides: str) -> list[str]:
    """Arguments of `flowrl train`; the checkpoint and the configuration are written where they are not there yet."""
    write, settings = FAMILIES[family]
    model = folder / f"model-{family}"
    if not model.is_dir():
        write(model)
    config = folder / "toy.yaml"
    if not config.is_file():
        write_toy(folder)
    chosen = [reward_list(folder, *text.removeprefix("FUNCTION=").split()) if text.startswith("FUNCTION=") else text
              for text in (*settings, *RECIPES[recipe], *overrides)]  # fmt: skip
    return [
        str(config), f"out={out}", f"pipeline.name={family}", f"pipeline.model={model}", "num_iterations=2",
        "sampler.num_steps=3", "optim.lr=0.01", f"prompts.eval={folder / 'prompts.txt'}", "eval_every=2",
        "eval.num_prompts=3", "eval.batch_size=1", "eval.num_images=0", *chosen,
    ]  # fmt: skip


def bytes_of(nest: Any) -> int:
    """Bytes of the tensors in a nest of mappings."""
    if isinstance(nest, dict):
        return sum(map(bytes_of, nest.values()))
    return nest.numel() * nest.element_size() if isinstance(nest, torch.Tensor) else 0


def sizes_of_parts(run: Path) -> list[int]:
    """Bytes of the tensors in each part of a run's newest checkpoint."""
    newest = max((run / "checkpoints").iterdir())
    return [bytes_of(torch.load(path, weights_only=True)) for path in sorted(newest.glob("part-*.pt"))]
