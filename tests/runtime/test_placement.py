"""Copies to a device: from pinned memory where they are large."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flowrl.runtime.placement import sent


class Host(torch.Tensor):
    """A tensor of the host that notes how it is copied."""

    def pin_memory(self, device: Any = None) -> torch.Tensor:
        self.said.append("pinned")
        return self

    def to(self, device: Any, non_blocking: bool = False) -> torch.Tensor:  # type: ignore[override]
        self.said.append(f"to {device}, non_blocking {non_blocking}")
        return self

    said: list[str]


@pytest.mark.parametrize(
    ("device", "elements", "available", "said"),
    [
        ("cuda", 2**14 + 1, True, ["pinned", "to cuda, non_blocking True"]),
        ("cuda", 2**14, True, ["to cuda, non_blocking True"]),
        ("cuda", 2**20, False, ["to cuda, non_blocking True"]),
        ("mps", 2**20, True, ["to mps, non_blocking False"]),
    ],
)
def test_large_tensors_are_pinned_for_cuda(
    monkeypatch: pytest.MonkeyPatch, device: str, elements: int, available: bool, said: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    tensor = torch.zeros(elements).as_subclass(Host)
    tensor.said = []
    sent(tensor, torch.device(device))
    assert tensor.said == said
