"""Where checks run: on a card, or in their CPU form on the embedded models; and how two answers are compared."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
CPU_ONLY = "FLOWRL_GPU_CPU"
"""Environment variable: set to 1, checks take their CPU form also where there is a card."""
ROUNDING = 0.02
"""Of the standard deviation of an answer, what two right kernels may differ by in 16 bits: 2^-8 a few times over."""
Figures = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The device of all checks.

    Attributes:
        device: a card, or the CPU.
    """

    device: torch.device

    @classmethod
    def here(cls) -> Place:
        """The first card where there is one and nobody wants the CPU form."""
        on_card = torch.cuda.is_available() and os.environ.get(CPU_ONLY) != "1"
        return cls(device=torch.device("cuda", 0) if on_card else torch.device("cpu"))

    @property
    def on_card(self) -> bool:
        """Whether this is a card."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """What networks are evaluated in: 16 bits on a card, where the CPU form is about equal bits."""
        return torch.bfloat16 if self.on_card else torch.float32

    def pick(self, card: T, cpu: T) -> T:
        """What a check takes on a card, and in its CPU form."""
        return card if self.on_card else cpu

    def settings(self) -> tuple[str, ...]:
        """Settings of any configuration here."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"pipeline.device={self.device.type}", f"pipeline.dtype={dtype}", "threads=1", "progress=false"

    def wait(self) -> None:
        """Returns when the card has done what it was asked for."""
        if self.on_card:
            torch.cuda.synchronize(self.device)

    def allocated(self) -> int:
        """Bytes of tensors on the card; 0 on a CPU, which does not count them."""
        return torch.cuda.memory_allocated(self.device) if self.on_card else 0

    def needs_card(self, why: str) -> None:
        """Skips a check that a CPU carries no part of."""
        if not self.on_card:
            pytest.skip(f"no CUDA device, and a CPU says nothing of it: {why}")

    def free(self) -> None:
        """Gives cached blocks back, so that a check's peak is its own."""
        if self.on_card:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)


def deviation(found: Tensor, wanted: Tensor) -> float:
    """The largest difference of two answers, over the standard deviation of the wanted one.

    >>> deviation(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 2.0])) > 1
    True
    """
    wanted = wanted.detach().double()
    return float((found.detach().double() - wanted).abs().max() / wanted.std())


def compare(place: Place, figures: Figures, name: str, found: Tensor, wanted: Tensor) -> None:
    """Notes how far two answers are apart. On a CPU they must be equal to the bit; on a card kernels may round apart,
    which is a figure, and more than rounding is a fault."""
    assert found.shape == wanted.shape, f"{name}: shapes {tuple(found.shape)} and {tuple(wanted.shape)}"
    assert bool(found.isfinite().all()), f"{name}: an answer is not finite"
    equal, off = torch.equal(found.detach(), wanted.detach()), deviation(found, wanted)
    figures[f"{name}: bitwise"], figures[f"{name}: deviation"] = equal, off
    if place.on_card:
        assert off < ROUNDING, f"{name}: answers differ by {off:.3g} standard deviations, more than rounding"
    else:
        assert equal, f"{name}: answers differ on a CPU, by {off:.3g} standard deviations"


def off_by(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest difference of tensors, each over the largest number of its own wanted one."""
    pairs = zip(found, wanted, strict=True)
    return max(float((a.double() - b.double()).abs().max() / b.double().abs().max()) for a, b in pairs)
