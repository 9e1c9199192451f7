"""How models are sampled where their own settings are not to hold: one object for every function that draws."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from flowrl.config.bounds import GUIDANCE, SIDE, STEPS

MOST = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """What a caller says of sampling; None takes a run's own setting, else what the checkpoint is made for.

    Attributes:
        steps: denoising steps.
        guidance: guidance scale.
        dtype: of the network: float32, bfloat16 or float16.
        max_sequence_length: text tokens that are read.
        height: pixels.
        width: pixels.
    """

    steps: int | None = None
    guidance: float | None = None
    dtype: str | None = None
    max_sequence_length: int | None = None
    height: int | None = None
    width: int | None = None

    def __post_init__(self) -> None:
        limits = {"steps": STEPS, "max_sequence_length": MOST, "height": SIDE, "width": SIDE}
        for name, most in limits.items():
            check_count(name, getattr(self, name), most)
        if self.guidance is not None and not 0 <= self.guidance <= GUIDANCE:
            raise ValueError(f"`guidance` must be a number from 0 to {GUIDANCE:g}, got {self.guidance!r}")

    @property
    def given(self) -> list[str]:
        """Names of what is not None."""
        return [name for name, value in asdict(self).items() if value is not None]

    @property
    def of_source(self) -> dict[str, Any]:
        """The same under the names of `flowrl.generation.models.find_source`."""
        renamed = {"steps": "num_steps", "guidance": "guidance_scale"}
        return {renamed.get(name, name): value for name, value in asdict(self).items()}


def check_count(name: str, value: int | None, most: int = MOST) -> None:
    """Refuses what is no whole number from 1 to `most`; None was not given.

    Raises:
        ValueError: names the parameter.
    """
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most):
        raise ValueError(f"`{name}` must be a whole number from 1 to {most:,}, got {value!r}")
