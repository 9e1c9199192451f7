"""The folder that every trial of bad input starts from: a configuration, prompts, rewards, images, a finished run."""

from __future__ import annotations

import hashlib
import json
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

CONFIG: dict[str, Any] = {
    "num_iterations": 2, "prompts_per_step": 2, "group_size": 4, "checkpoint_every": 1, "eval_every": 1,
    "progress": False,
    "pipeline": {"model": "model", "dtype": "float32", "max_sequence_length": 16, "device": "cpu"},
    "policy": {"lora_rank": 2},
    "sampler": {"kernel": "flow_sde", "num_steps": 3},
    "optim": {"lr": 0.001},
    "prompts": {"train": "prompts.txt", "eval": "eval.jsonl"},
    "eval": {"num_steps": 2, "num_images": 2},
    "rewards": [{"file": "brightness.py", "function": "brightness"}],
    "logging": {"tensorboard": False},
}  # fmt: skip
TRAIN = ["train", "tiny.yaml"]
REWARDS = "def brightness(images, prompts, metadata):\n    return 100 * images.mean((1, 2, 3))\n"
_PROMPTS = ["a red circle", "two blue squares", "a green triangle", "a blue circle"]
_EVAL = ["a green square", "two red circles"]


def write_inputs(folder: Path) -> None:
    """Writes all but the run."""
    shutil.copytree(Path(str(resources.files("flowrl") / "assets" / "tiny-sd3")), folder / "model")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(CONFIG))
    (folder / "prompts.txt").write_text("\n".join(_PROMPTS) + "\n")
    (folder / "eval.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in _EVAL))
    (folder / "brightness.py").write_text(REWARDS)
    (folder / "mine.txt").write_text("a file that flowrl did not write\n")
    (folder / "images").mkdir()
    rng = np.random.default_rng(0)
    for number in range(4):
        Image.fromarray(rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(folder / "images" / f"{number}.png")
    pair = {"prompt": _PROMPTS[0], "winner": "images/0.png", "loser": "images/1.png"}
    (folder / "pairs.jsonl").write_text((json.dumps(pair) + "\n") * 4)


def digests(folder: Path) -> dict[str, str]:
    """What every file of a folder holds; links and folders by what they are."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if "__pycache__" in name:
            continue
        if path.is_symlink():
            found[name] = f"link to {path.readlink()}"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = "folder" if path.is_dir() else "special"
    return found
