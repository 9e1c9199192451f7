"""Where tensors live: copies to a device that the host does not wait for, indexes from the host, the widest numbers."""

from __future__ import annotations

import torch
from torch import Tensor

_LARGE = 2**16  # bytes, from which the driver does not keep a copy of its own


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device, for what is computed there.

    CUDA takes numbers of the host when it comes to them, from a copy of its own, where a plain `to` waits until all
    that was asked for before is done. Other devices promise no such copy. Of large tensors that copy is ours, in pinned
    memory: the driver's goes through a small buffer, for which it may wait.
    """
    cuda = device.type == "cuda"
    if cuda and tensor.device.type == "cpu" and tensor.nbytes > _LARGE and torch.cuda.is_available():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=cuda)


def taken(tensor: Tensor, index: Tensor) -> Tensor:
    """Rows of a tensor by their numbers, which may live on the host."""
    return tensor[sent(index, tensor.device)]


def widest(device: torch.device) -> torch.dtype:
    """The dtype that sums over many elements are taken in: float64, or float32 on Apple's GPUs, which have no other.

    There a sum of 65 536 squares is off by some 1e-6 of itself, and equally in rollout and update.
    """
    return torch.float32 if device.type == "mps" else torch.float64


def widened(tensor: Tensor) -> Tensor:
    """A tensor in the widest dtype of its device."""
    return tensor.to(widest(tensor.device))


def sent_wide(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, in the widest dtype there."""
    return sent(tensor.to(widest(device)), device)
