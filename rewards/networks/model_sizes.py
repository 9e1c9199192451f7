"""How many weights the models of rewards have: published ones by a table, folders by the headers of their files."""

from __future__ import annotations

from pathlib import Path

from flowrl.config.strict_yaml import read_mapping
from flowrl.rewards.base import Model
from flowrl.runtime.files import safetensors_parameters

_PARAMETERS: dict[str, int] = read_mapping(Path(__file__).with_suffix(".yaml"))


def model_of(name: str, bytes_per_weight: int = 4) -> Model:
    """A model that a reward holds, with the number of its weights if that is known without a download."""
    folder = Path(name).expanduser()
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    known = sum(map(safetensors_parameters, files)) if files else _PARAMETERS.get(name)
    return Model(name, bytes_per_weight, known)


class OneModel:
    """What options that name one `model`, held in float32, have in common; each states its fields itself."""

    __slots__ = ()
    model: str

    @property
    def models(self) -> tuple[Model, ...]:
        """That model."""
        return (model_of(self.model),)
