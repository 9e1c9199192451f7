"""The sampling options of all functions that draw images."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from flowrl.config.bounds import GUIDANCE, SIDE, STEPS, check_counts
from flowrl.config.sections import share


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions:
    """Your sampling options; None takes the run's value, or else what the checkpoint is made for."""

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
    """Text tokens to read."""
    first_block_cache: float | None = None
    """Threshold of First-Block Cache (`sampler.first_block_cache`); never that of a run."""

    def __post_init__(self) -> None:
        check_counts(STEPS, steps=self.steps)
        check_counts(SIDE, height=self.height, width=self.width)
        check_counts(max_sequence_length=self.max_sequence_length)
        check_guidance(guidance=self.guidance)
        share("`first_block_cache`", self.first_block_cache)

    @property
    def given(self) -> list[str]:
        """The names of the given options."""
        return [one.name for one in fields(self) if getattr(self, one.name) is not None]


def check_guidance(**values: float | None) -> None:
    """Refuses guidance scales, by parameter name, that are not numbers from 0 to `GUIDANCE`; None passes."""
    for name, value in values.items():
        if value is not None and not (math.isfinite(value) and 0 <= value <= GUIDANCE):
            raise ValueError(f"`{name}` must be a number from 0 to {GUIDANCE:g}, got {value!r}")
