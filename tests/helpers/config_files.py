"""A configuration that says no more than it must, and what loading it with overrides refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.config.train import ConfigError, load_config

MINIMAL = """\
num_iterations: 3
prompts_per_step: 4
group_size: 6
pipeline: {model: "asset:tiny-sd3"}
sampler: {kernel: flow_sde}
prompts: {train: "asset:prompts.txt", eval: held_out.jsonl}
rewards:
  - name: scene
  - {file: my.py, function: sharp, weight: 0.5, options: {radius: 1e-1}}
"""


def minimal_file(folder: Path) -> Path:
    """The configuration in a file."""
    file = folder / "run.yaml"
    file.write_text(MINIMAL)
    return file


def refusal(path: Path, *overrides: str) -> str:
    """What is said of a configuration that is refused, in one line."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def as_launched(monkeypatch: pytest.MonkeyPatch, processes: int) -> None:
    """What a launcher tells the first of several processes."""
    told = {"WORLD_SIZE": str(processes), "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for variable, value in told.items():
        monkeypatch.setenv(variable, value)
