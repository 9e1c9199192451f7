"""Where tensors live: copies to a device that the host does not wait for, indexes from the host, the widest numbers,
networks that rest on the host, the threads of a CPU, what is split over processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from threading import RLock
from typing import Any, cast

import torch
from torch import Tensor, nn

from flowrl.runtime.private_names import own_tensors, times_written

PINNED = 2**30
"""Bytes up to which host memory is pinned: torch rounds it up to a power of two, which of more would waste too much."""
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


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a tensor, also of one that is split over processes, which all ask for it then; without gradient."""
    from torch.distributed.tensor import DTensor

    return cast("Tensor", cast(Any, tensor.detach()).full_tensor()) if isinstance(tensor, DTensor) else tensor


def taken(tensor: Tensor, index: Tensor, device: torch.device | None = None) -> Tensor:
    """Rows of a tensor by their numbers, which may live on the host; on a device, or where the tensor lives."""
    rows = tensor[sent(index, tensor.device)]
    return rows if device is None else sent(rows, device)


def host_rows(like: Tensor, count: int, device: torch.device) -> Tensor:
    """Room on the host for `count` rows of this kind; pinned up to a size if from CUDA, which then copies by itself."""
    small = count * like[:1].numel() * like.element_size() <= PINNED
    pinned = small and device.type == "cuda" and torch.cuda.is_available()
    return torch.empty((count, *like.shape[1:]), dtype=like.dtype, device="cpu", pin_memory=pinned)


def put(rows: Tensor, start: int, values: Tensor) -> None:
    """Copies values into rows of the host from `start` on. CUDA does so when it comes to it; see `settle`."""
    rows[start : start + len(values)].copy_(values, non_blocking=values.device.type == "cuda")


def settle(device: torch.device) -> None:
    """Waits until the device has copied what it was asked for, so that the host can read it."""
    if device.type == "cuda" and torch.cuda.is_available():
        torch.cuda.current_stream(device).synchronize()


def widest(device: torch.device) -> torch.dtype:
    """The dtype of sums over many elements: float64, or float32 on Apple's GPUs, which have no other; there a sum of 65
    536 squares is off by some 1e-6 of itself, and equally in rollout and update."""
    return torch.float32 if device.type == "mps" else torch.float64


def widened(tensor: Tensor) -> Tensor:
    """A tensor in the widest dtype of its device."""
    return tensor.to(widest(tensor.device))


def sent_wide(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, in the widest dtype there."""
    return sent(tensor.to(widest(device)), device)


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Inside, torch computes with so many CPU threads (None: as before); afterwards with the caller's own number,
    because sums over another number of threads round otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def awake(resting: Mapping[str, Resting], names: Sequence[str]) -> Iterator[None]:
    """Inside, those of these networks that rest otherwise are awake."""
    with ExitStack() as stack:
        for name in names:
            if name in resting:
                stack.enter_context(resting[name].awake())
        yield


class Resting:
    """Frozen networks that lie on the host; inside `awake` their copies are on the device, for one thread at a time.
    Nothing is copied back: the host's weights take their places again. On a CPU nothing is done."""

    def __init__(self, networks: Sequence[nn.Module], device: torch.device) -> None:
        """Moves the networks to the host, on CUDA into pinned memory. Raises ValueError: a network holds its weights in
        a way that cannot be exchanged."""
        self.networks, self.device = list(networks), device
        self._lock, self._depth = RLock(), 0
        self._places: list[tuple[dict[str, Tensor | None], str, Tensor, Tensor, int]] = []
        if device.type == "cpu":
            return
        for network in networks:
            network.to("cpu")
        for module in (module for network in networks for module in network.modules()):
            weights = [weight for weight in own_tensors(module)[0].values() if weight is not None]
            if isinstance(module, nn.RNNBase) or any(type(weight) is not nn.Parameter for weight in weights):
                raise ValueError(f"a {type(module).__name__} in it holds weights in a form that cannot be moved")
            for weight in weights if device.type == "cuda" and torch.cuda.is_available() else ():
                weight.data = weight.data.pin_memory()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Inside, the networks are on the device."""
        if self.device.type == "cpu":
            yield
            return
        with self._lock:
            self._depth += 1
            try:
                if self._depth == 1:
                    self._wake()
                yield
            finally:
                self._depth -= 1
                if not self._depth:
                    self._rest()

    def _wake(self) -> None:
        moved: dict[int, Tensor] = {}  # a weight that stands in several places is one there too
        for module in (module for network in self.networks for module in network.modules()):
            for tensors in own_tensors(module):
                for name, host in list(tensors.items()):
                    if host is None:
                        continue
                    if id(host) not in moved:
                        copied = sent(host.detach(), self.device)
                        weight = isinstance(host, nn.Parameter)
                        moved[id(host)] = nn.Parameter(copied, requires_grad=False) if weight else copied
                    there = moved[id(host)]
                    self._places.append((tensors, name, host, there, times_written(there)))
                    tensors[name] = there

    def _rest(self) -> None:
        for tensors, name, host, there, version in self._places:
            now = tensors[name]
            changed = now is not there or times_written(there) != version  # a buffer that the network has written
            tensors[name] = now.to("cpu") if changed and now is not None else host
        self._places.clear()
