"""Helpers around whole training runs that take a second: a random pipeline, a reward of brightness, four prompts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from flowrl.cli import main
from flowrl.training.checkpoints import checkpoints, own_state

PROMPTS = ["a photo of a red circle", "two blue squares", "a green star", "three yellow triangles"]

REWARDS = """
def brightness(images, prompts, metadata):
    return 100 * images.mean((1, 2, 3))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyRuns:
    """A folder with a configuration, its prompts and its rewards, and the commands on it."""

    folder: Path
    config: Path

    def train(self, name: str, *overrides: str) -> Path:
        """A run of the real command, in this process, that must succeed; returns its folder."""
        out = self.folder / name
        assert main(["train", str(self.config), f"out={out}", *overrides]) == 0
        return out

    def rewards(self, source: str) -> str:
        """Writes another reward file and returns the override that takes its function `reward`."""
        path = self.folder / f"rewards_{len(list(self.folder.glob('rewards_*.py')))}.py"
        path.write_text(source)
        return f"rewards=[{{file: {path}, function: reward}}]"


def tiny_runs(folder: Path, model: Path, **settings: Any) -> TinyRuns:
    """Writes what a run needs into a folder; `settings` replace top-level keys."""
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    (folder / "brightness.py").write_text(REWARDS)
    config: dict[str, Any] = {
        "num_iterations": 2, "prompts_per_step": 2, "group_size": 4, "checkpoint_every": 1, "progress": False,
        "pipeline": {"model": str(model), "dtype": "float32", "max_sequence_length": 16, "device": "cpu"},
        "policy": {"lora_rank": 2},
        "sampler": {"kernel": "flow_sde", "num_steps": 3},
        "optim": {"lr": 0.01},
        "prompts": {"train": str(folder / "prompts.txt")},
        "rewards": [{"file": str(folder / "brightness.py"), "function": "brightness"}],
        "logging": {"tensorboard": False},
    }  # fmt: skip
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(config | settings))
    return TinyRuns(folder=folder, config=path)


def metrics(run: Path) -> list[dict[str, Any]]:
    """Rows of a run without the times."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("seconds")} for row in rows]


def lora(run: Path) -> bytes:
    """The tensors of a run's LoRA file, byte for byte; the header before them holds metadata in an arbitrary order."""
    data = (run / "lora" / "pytorch_lora_weights.safetensors").read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]


def lora_tensors(run: Path) -> dict[str, Tensor]:
    """The LoRA of a run by name."""
    return load_file(run / "lora" / "pytorch_lora_weights.safetensors")


def model_tensors(run: Path) -> dict[str, Tensor]:
    """The trained networks that a run ships, by name."""
    files = sorted((run / "model").glob("transformer*/*.safetensors"))
    return {f"{path.parent.name}.{name}": tensor for path in files for name, tensor in load_file(path).items()}


def state(run: Path, number: int | None = None) -> dict[str, Any]:
    """State of a run's newest checkpoint, or of one by number."""
    folder = checkpoints(run)[-1] if number is None else run / "checkpoints" / f"{number:06d}"
    loaded: dict[str, Any] = torch.load(folder / "state.pt", weights_only=True)
    parts = [torch.load(path, weights_only=True) for path in sorted(folder.glob("part-*.pt"))]
    return own_state(loaded | {"parts": parts}, None) if parts else loaded


def lasting(run: Path) -> dict[str, Any]:
    """State of a run's newest checkpoint without the run's name and the time it took."""
    found = {key: value for key, value in state(run).items() if key != "run"}
    return {**found, "counters": {key: value for key, value in found["counters"].items() if key != "seconds"}}


def differences(a: Any, b: Any) -> float:
    """Largest difference of two nests of mappings, lists, tensors and numbers of one shape; text must be equal."""
    if isinstance(a, Mapping):
        assert a.keys() == b.keys()
        return max((differences(a[key], b[key]) for key in a), default=0.0)
    if isinstance(a, list | tuple):
        assert len(a) == len(b)
        return max((differences(x, y) for x, y in zip(a, b, strict=True)), default=0.0)
    if isinstance(a, Tensor):
        return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
    if isinstance(a, int | float) and not isinstance(a, bool):
        return abs(a - b)
    assert a == b
    return 0.0


def start(arguments: Sequence[str], folder: Path, **environment: str) -> subprocess.Popen[str]:
    """A command of this Python, or of PYTHON_EXEC, in a process of its own, with the checkout on the import path."""
    checkout = Path(__file__).resolve().parents[2]
    paths = [str(checkout), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [environment.get("PYTHON_EXEC", sys.executable), *arguments], cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment},
    )  # fmt: skip
