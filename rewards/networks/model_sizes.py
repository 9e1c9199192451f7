"""How many weights the models of rewards have: published ones by a table, folders by the headers of their files."""

from __future__ import annotations

from pathlib import Path

from flowrl.rewards.base import Model
from flowrl.runtime.files import read_json, safetensors_parameters

PARAMETERS: dict[str, int] = read_json(Path(__file__).with_suffix(".json"))
"""Hub id -> parameters."""


def model_of(name: str, bytes_per_weight: int = 4) -> Model:
    """A model that a reward holds, with the number of its weights where that is known without a download."""
    folder = Path(name).expanduser()
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    known = sum(map(safetensors_parameters, files)) if files else PARAMETERS.get(name)
    return Model(name, bytes_per_weight, known)
