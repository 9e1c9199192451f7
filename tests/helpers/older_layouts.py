"""Checkpoints as transformers 4 wrote them: `tests/rewards/networks/older_layouts/`.

`tests/trials/save_older_layouts.py` makes them. A file keeps configuration, names and shapes of the weights, and
the outputs that transformers 4 computed. The weights themselves are a formula of their names, so that files are small.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors.torch import save_file
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "rewards" / "networks" / "older_layouts"
DEPTH = 1_000
"""Roundings on the way through one of these networks: two layers, each eight products of 32 to 128 terms."""


def noise(name: str, shape: tuple[int, ...], scale: float = 1.0) -> Tensor:
    """Uniform in [-scale, scale]: a hash of name and place in whole numbers, so equal everywhere. Unlike a sine it has
    full rank, without which a wrong order of rows would hardly show."""
    hashed = (torch.arange(math.prod(shape)) + crc32(name.encode())) * 2654435761 & 0xFFFFFFFF
    hashed = ((hashed ^ hashed >> 16) * 0x45D9F3B) & 0xFFFFFFFF
    hashed = hashed ^ hashed >> 16
    return (scale * (hashed.double() / 2**31 - 1)).float().view(shape)


def weight(name: str, shape: tuple[int, ...]) -> Tensor:
    """A weight of a size that keeps activations near 1; single numbers, vectors named weight and scales are near 1."""
    if len(shape) < 2:
        near_one = name.endswith(("weight", "lambda1", "logit_scale"))
        return noise(name, shape, 0.2) + (1.0 if near_one else 0.0)
    return noise(name, shape, 1.7 / math.sqrt(math.prod(shape[1:])))


def stored(name: str) -> dict[str, Any]:
    """What a file keeps: class, config, shapes, integers (buffers), inputs, outputs."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def weights_of(case: Mapping[str, Any]) -> dict[str, Tensor]:
    """The checkpoint's tensors by the names that transformers 4 gave them."""
    made = {name: weight(name, tuple(shape)) for name, shape in case["shapes"].items()}
    return made | {name: torch.tensor(values) for name, values in case["integers"].items()}


def write_checkpoint(case: Mapping[str, Any], folder: Path) -> Path:
    """A folder with config.json and model.safetensors, as the hub has it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(case["config"]))
    save_file(weights_of(case), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def dtype_of(case: Mapping[str, Any]) -> torch.dtype:
    """The arithmetic that the outputs were computed in."""
    found: torch.dtype = getattr(torch, case["dtype"])
    return found


def inputs_of(case: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors by argument: `{"shape": ...}` stands for a formula, lists for themselves."""
    return {
        name: noise(name, tuple(value["shape"])).to(dtype_of(case)) if isinstance(value, dict) else torch.tensor(value)
        for name, value in case["inputs"].items()
    }


@torch.no_grad()
def outputs_of(case: Mapping[str, Any], network: Callable[..., Any]) -> dict[str, Tensor]:
    """The outputs that the case names, for its inputs."""
    found = network(**inputs_of(case))
    return {name: getattr(found, name) for name in case["outputs"]}


def expected(case: Mapping[str, Any]) -> dict[str, Tensor]:
    """The same as transformers 4 computed them."""
    return {name: torch.tensor(values, dtype=dtype_of(case)) for name, values in case["outputs"].items()}
