"""Arithmetic of frozen networks that are not the denoiser: the autoencoder's and rewards', by a key each
(`flowrl.config.sections.Precision`).

| kind | weights | products |
|---|---|---|
| float32 | float32 | as torch is set up: in float32, but convolutions of CUDA devices in TF32 |
| tf32 | float32 | TF32 on CUDA: 10 bits of mantissa, added up in float32 |
| bfloat16 | float32 | bfloat16 by autocast, which leaves norms and sums in float32 |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_bfloat16: ContextVar[bool] = ContextVar("bfloat16", default=False)  # of this thread's calls alone


def refuse_unable(kind: str, device: torch.device | str, key: str) -> None:
    """Refuses a kind that a device does not have; `key` is what asked for it. Raises ValueError: TF32 without a CUDA
    device of compute capability 8.0."""
    device = torch.device(device)
    if kind == "tf32" and not (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)):
        raise ValueError(
            f"{key}=tf32 needs a CUDA device of compute capability 8.0 (Ampere) or later, and this run is on {device}: "
            f"set {key} to float32 or bfloat16"
        )


@contextmanager
def arithmetic(kind: str) -> Iterator[None]:
    """Inside, frozen networks under `network_autocast` compute as `kind` says; gradients taken later as the process is
    set up then. TF32 is a setting of the whole process, so no other thread may compute meanwhile."""
    if kind == "tf32":
        before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before[0])
            torch.backends.cudnn.allow_tf32 = before[1]
        return
    token = _bfloat16.set(kind == "bfloat16")
    try:
        yield
    finally:
        _bfloat16.reset(token)


def network_autocast(device: torch.device) -> torch.autocast:
    """Around the call of a frozen network: bfloat16 where `arithmetic` asks for it, else none, whatever a caller's own
    region says. What comes out is the caller's to turn into float32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=_bfloat16.get(), cache_enabled=False)


def in_arithmetic(kind: str, device: torch.device, network: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A frozen network's call as `kind` says; what it gives is float32."""

    def run(x: Tensor) -> Tensor:
        with arithmetic(kind), network_autocast(device):
            return network(x).float()

    return run
