"""How images are drawn, where a caller says so: one statement for all that draw."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from flowrl.config.bounds import GUIDANCE, SIDE, STEPS, check_counts


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions:
    """What a caller says of sampling; None leaves it to the run, else to what the checkpoint is made for."""

    steps: int | None = None
    """Denoising steps."""
    guidance: float | None = None
    """Guidance scale."""
    height: int | None = None
    """Pixels."""
    width: int | None = None
    """Pixels."""
    dtype: str | None = None
    """Precision of the network: "float32", "bfloat16" or "float16"."""
    max_sequence_length: int | None = None
    """Text tokens that are read."""

    def __post_init__(self) -> None:
        check_counts(STEPS, steps=self.steps)
        check_counts(SIDE, height=self.height, width=self.width)
        check_counts(max_sequence_length=self.max_sequence_length)
        check_guidance(guidance=self.guidance)

    @property
    def given(self) -> list[str]:
        """The names of those that were given."""
        return [one.name for one in fields(self) if getattr(self, one.name) is not None]


def check_guidance(**values: float | None) -> None:
    """Refuses guidance scales, by their parameters' names, that are no numbers from 0 to `GUIDANCE`; None passes."""
    for name, value in values.items():
        if value is not None and not (math.isfinite(value) and 0 <= value <= GUIDANCE):
            raise ValueError(f"`{name}` must be a number from 0 to {GUIDANCE:g}, got {value!r}")
