"""A pretend GPU: the arithmetic is the CPU's, but tensors remember that they live on a device.

    with pretend_gpu("cuda") as findings:
        ...                                 # whole training runs of the real code
    assert not findings.faults

What a real device would refuse is counted with its place in our code and goes on: operations on tensors of host and
device, host tensors in collectives, and float64 where there is none (MPS). So is what makes the host wait until the
device has come so far: numbers read (`item`, `bool`, `tolist`), copies in either direction that are not
`non_blocking`, and operations whose result has a size that depends on values (`nonzero`, `unique`, boolean masks). That
is what `torch.cuda.set_sync_debug_mode` reports.

A `Pretended` tensor holds an ordinary one. Functions (`x.to(...)`, `x.device`) are seen by a function mode,
operations, also those of the backward pass, by a dispatch mode. Tensors that C++ makes on its way, such as zeros for a
gradient that nobody gave, name the device that their neighbours truly have, the CPU: they belong to the device whose
tensors the call is about.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

Kind = Literal["cuda", "mps"]
_ROOT = Path(__file__).resolve().parents[2]
_ROOMS = tuple(f"{_ROOT / room}/" for room in ("flowrl", "samplers", "rewards", "pipelines"))
_aten = torch.ops.aten
_INDEX = {
    _aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default,
    _aten._unsafe_index.Tensor, _aten._unsafe_index_put.default,
}  # fmt: skip
_COPY = {_aten._to_copy.default, _aten.copy_.default, _aten.copy.default}
_WAITING = {
    _aten._local_scalar_dense.default, _aten.nonzero.default, _aten.masked_select.default, _aten._unique2.default,
    _aten.unique_dim.default, _aten.unique_consecutive.default, _aten.is_nonzero.default, _aten.equal.default,
    _aten.bincount.default, _aten.repeat_interleave.Tensor,
}  # fmt: skip
_FACTORIES = tuple(
    getattr(torch, name) for name in
    ("empty", "zeros", "ones", "full", "arange", "linspace", "eye", "rand", "randn", "randint", "randperm")
)  # fmt: skip
_UPLOADS = (torch.tensor, torch.as_tensor, torch.asarray)


@dataclass
class Findings:
    """What a run did that a device refuses, and where it waited; each text ends with the place in our code."""

    mixed: Counter[str] = field(default_factory=Counter)
    wide: Counter[str] = field(default_factory=Counter)
    waits: list[str] = field(default_factory=list)
    boundaries: int = 0
    """Times that the clock of a stage waited, which is what it is for."""

    @property
    def faults(self) -> list[str]:
        """What a real device refuses."""
        return [f"{count} times {text}" for text, count in (self.mixed + self.wide).most_common()]


class Pretended(torch.Tensor):
    """A tensor of the device; `held` has its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Pretended:
        """Takes the numbers."""
        made: Pretended = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype
        )
        made.held = held
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.Tensor.__reduce_ex__(self.held.detach(), protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _device.dispatch(func, args, kwargs or {})

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _device.call(func, args, kwargs or {})


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        return x.held.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient if isinstance(gradient, Pretended) else Pretended(gradient)


class _ToDevice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        return Pretended(x.detach().clone())

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient.held if isinstance(gradient, Pretended) else gradient


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _device.call(func, args, kwargs or {})


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _device.dispatch(func, args, kwargs or {})


class _Device:
    """The device that tensors live on meanwhile, and what is found."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.device = kind, torch.device(kind, 0)
        self.findings = Findings()
        self.busy = False  # inside a function that is about tensors of the device
        tensor = torch.Tensor
        self.special: dict[Any, Callable[..., Any]] = {
            tensor.device.__get__: lambda x: self.device,  # type: ignore[attr-defined]
            tensor.is_cuda.__get__: lambda x: kind == "cuda",  # type: ignore[attr-defined]
            tensor.is_mps.__get__: lambda x: kind == "mps",  # type: ignore[attr-defined]
            tensor.data.__get__: lambda x: Pretended(x.held.detach()),  # type: ignore[attr-defined]
            tensor.data.__set__: self._set_data,  # type: ignore[attr-defined]
            tensor.cpu: lambda x: self._moved(x, torch.device("cpu"), False),
            tensor.tolist: self._to_list, tensor.numpy: self._numpy, tensor.__array__: self._numpy,
        }  # fmt: skip

    def here(self, device: Any) -> bool:
        """Whether a device is this one."""
        return device is not None and torch.device(device).type == self.kind

    def wait(self, what: str) -> None:
        """Notes that the host waits."""
        self.findings.waits.append(f"{what} at {_place()}")

    # ---- functions -----------------------------------------------------------------------------------------------

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A function of torch: those that move tensors or say where they are, as the device would."""
        if func is torch.Tensor.to:
            return self._to(*args, **kwargs)
        if func in self.special and isinstance(args[0], Pretended):
            return self.special[func](*args, **kwargs)
        if func in _UPLOADS:
            return self._made(func, *args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if func in _FACTORIES and self.here(kwargs.get("device")):
                return self._born(func(*args, **{**kwargs, "device": "cpu"}), func.__name__)
            outer = self.busy
            self.busy = outer or _has_pretended(args) or _has_pretended(kwargs)
            try:
                return func(*args, **kwargs)
            finally:
                self.busy = outer

    def _to(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        copied = bool(kwargs.pop("copy", False))
        like = args[0] if args and isinstance(args[0], Tensor) else kwargs.pop("other", None)
        if like is None:
            device, dtype, ahead, layout = torch._C._nn._parse_to(*args, **kwargs)  # type: ignore[attr-defined]
        else:
            device, dtype, ahead, layout = self._device_of(like), like.dtype, bool(kwargs.get("non_blocking")), None
        if device is not None:
            x = self._moved(x, device, ahead)
        with torch._C.DisableTorchFunctionSubclass():
            options: dict[str, Any] = {"dtype": dtype or x.dtype, "memory_format": layout or torch.preserve_format}
            return torch.Tensor.to(x, copy=copied, **options)

    def _device_of(self, x: Tensor) -> torch.device:
        with torch._C.DisableTorchFunctionSubclass():
            return self.device if isinstance(x, Pretended) else x.device

    def _moved(self, x: Any, device: torch.device, ahead: bool) -> Any:
        if isinstance(x, Pretended) and not self.here(device):
            self.wait("a copy to the host")
            return _ToHost.apply(x)  # type: ignore[no-untyped-call]
        if not isinstance(x, Pretended) and self.here(device):
            if not ahead:
                self.wait("a copy to the device")
            self._born(x, "a copy to the device")
            return _ToDevice.apply(x)  # type: ignore[no-untyped-call]
        return x

    def _made(self, func: Any, data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if isinstance(data, Pretended):  # as_tensor
            return self._to(data, device=device, dtype=kwargs.get("dtype"))
        if isinstance(data, Tensor) and func is not torch.tensor and self.here(device):
            return self._to(data, device=device, dtype=kwargs.get("dtype"))
        with torch._C.DisableTorchFunctionSubclass():
            made = func(data, *args, device=None if self.here(device) else device, **kwargs)
        if self.here(device):
            self.wait("a copy to the device")
            return self._born(made, func.__name__)
        return made

    def _born(self, x: Tensor, what: object) -> Pretended:
        if x.dtype == torch.float64 and self.kind == "mps":
            self.findings.wide[f"float64 in {what} at {_place()}"] += 1
        return Pretended(x)

    def _set_data(self, x: Pretended, value: Any) -> None:
        if not isinstance(value, Pretended):
            raise AssertionError(f"data of a device tensor are set to those of a host tensor at {_place()}")
        x.held = value.held.detach()

    def _to_list(self, x: Pretended) -> Any:
        self.wait("tolist")
        return x.held.tolist()

    def _numpy(self, x: Pretended, *args: Any, **kwargs: Any) -> Any:
        self.findings.mixed[f"numpy of a device tensor at {_place()}"] += 1
        return x.held.detach().numpy()

    # ---- operations ----------------------------------------------------------------------------------------------

    def dispatch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """An operation: done on the CPU, with notes on what the device thinks of it."""
        tensors, target = _tensors((args, kwargs)), kwargs.get("device")
        own = [x for x in tensors if isinstance(x, Pretended)]
        if own:
            self._judge(func, args, tensors, own)
        if func is _aten._fused_sdp_choice.default:
            return 0  # the plain formula, as operations that are seen
        here = target is not None and self.here(target)
        if not own and not here and (tensors or not self.busy):
            return func(*args, **kwargs)  # the host's alone
        given, options = (_mapped(_held, args), _mapped(_held, kwargs)) if own else (args, kwargs)
        result = func(*given, **({**options, "device": torch.device("cpu")} if here else options))
        if self._in_place(func):
            return args[0] if args else result
        if func in _INDEX and not isinstance(args[0], Pretended):
            return result
        return _mapped(lambda x: self._result(x, func), result)

    def _result(self, x: Any, func: Any) -> Any:
        if isinstance(x, Tensor) and not isinstance(x, Pretended) and x.device.type == "cpu":
            return self._born(x, func)
        return x

    def _judge(self, func: Any, args: Sequence[Any], tensors: list[Tensor], own: list[Pretended]) -> None:
        """Notes an operation with tensors of the device that is refused, or waited for."""
        host = [x for x in tensors if not isinstance(x, Pretended)]
        if func in _INDEX:
            places = [x for x in args[1] if x is not None]
            if not isinstance(args[0], Pretended) and any(isinstance(x, Pretended) for x in places):
                self._refuse("a host tensor is indexed by one of the device", func, tensors)
            elif len(args) > 2 and isinstance(args[2], Pretended) != isinstance(args[0], Pretended) and args[2].dim():
                self._refuse("values are put into a tensor that lives elsewhere", func, tensors)
            elif any(x.dtype in (torch.bool, torch.uint8) for x in places) and not _fills(args):
                self.wait("a boolean mask")
            elif any(not isinstance(x, Pretended) for x in places):
                self.wait("an index on the host")
            return
        if func in _COPY:
            ahead = func is _aten.copy_.default and len(args) > 2 and args[2]  # a copy that the device makes by itself
            if func is not _aten._to_copy.default and host and not ahead:
                self.wait("a copy into a tensor that lives elsewhere")
            return
        if func in _WAITING:
            self.wait(str(func))
        if any(x.dim() for x in host) or (host and torch.Tag.pointwise not in func.tags):
            self._refuse("tensors of host and device", func, tensors)

    def _refuse(self, why: str, func: Any, tensors: list[Tensor]) -> None:
        given = ", ".join(f"{'device' if isinstance(x, Pretended) else 'host'} {list(x.shape)}" for x in tensors)
        self.findings.mixed[f"{func}, {why} ({given}), at {_place()}"] += 1

    @staticmethod
    @cache
    def _in_place(func: Any) -> bool:
        returned, taken = func._schema.returns, func._schema.arguments
        about = [one[0].alias_info for one in (returned, taken) if one]
        return len(about) == 2 and all(info is not None and info.is_write for info in about)


def _has_pretended(nest: Any) -> bool:
    """Whether a tensor of the device is among nested lists, tuples and mappings; asked of every call."""
    if isinstance(nest, dict):
        nest = nest.values()
    elif not isinstance(nest, list | tuple):
        return isinstance(nest, Pretended)
    for part in nest:
        if isinstance(part, Pretended) or (isinstance(part, dict | list | tuple) and _has_pretended(part)):
            return True
    return False


def _tensors(nest: Any) -> list[Tensor]:
    """The tensors of nested lists, tuples and mappings."""
    found = list[Tensor]()
    for part in nest.values() if isinstance(nest, dict) else nest:
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, dict | list | tuple) and part:
            found += _tensors(part)
    return found


def _mapped(change: Callable[[Any], Any], nest: Any) -> Any:
    """Nested lists, tuples and mappings with other leaves; named tuples become tuples."""
    if isinstance(nest, dict):
        return {key: _mapped(change, part) for key, part in nest.items()}
    if isinstance(nest, list | tuple):
        parts = [_mapped(change, part) for part in nest]
        return parts if isinstance(nest, list) else tuple(parts)
    return change(nest)


def _held(x: Any) -> Any:
    return x.held if isinstance(x, Pretended) else x


def _fills(args: Sequence[Any]) -> bool:
    """Whether an index_put sets one value under a mask, which needs no places of it."""
    return len(args) > 2 and args[2].numel() == 1 and not (len(args) > 3 and args[3])


def _place() -> str:
    """The innermost line of our code; of the backward pass the line that asked for it."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_ROOMS):
            return f"{Path(frame.f_code.co_filename).relative_to(_ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "no line of ours"


class _Accelerator:
    """One process with a device. What is gathered is made on it; sums of host tensors go by gloo."""

    is_main_process, process_index, num_processes = True, 0, 1

    def __init__(self) -> None:
        self.device = _device.device

    def reduce(self, tensor: Tensor, reduction: str = "sum") -> Tensor:
        """The sum over the one process."""
        return tensor if not isinstance(tensor, Pretended) else self._taken(tensor)

    def gather(self, tensor: Tensor) -> Tensor:
        """What the one process has."""
        taken = self._taken(tensor)
        return taken if taken.ndim else taken[None]

    def wait_for_everyone(self) -> None:
        """There is nobody else."""

    def _taken(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, Pretended):
            _device.findings.mixed[f"a host tensor in a collective at {_place()}"] += 1
        return tensor.clone()


_device: Any = None


def _boundary(*_: Any) -> None:
    _device.findings.boundaries += 1


class _Event:
    """A mark on the device, which is passed at once."""

    def __init__(self, *, enable_timing: bool) -> None:
        self.moment = 0.0

    def record(self) -> None:
        self.moment = time.perf_counter()

    def elapsed_time(self, later: _Event) -> float:
        return 1000 * (later.moment - self.moment)

    synchronize = _boundary


@contextmanager
def pretend_gpu(kind: Kind) -> Iterator[Findings]:
    """Inside, `flowrl.training.run.Run` finds a device of this kind; gives what is found, also while it goes on."""
    global _device
    from flowrl.pipelines.weights import stock_loading

    load = stock_loading.load_stock

    def load_on_host(*args: Any, **options: Any) -> Any:
        with _disable_current_modes(), _pop_mode_temporarily():
            return load(*args, **options)

    outer, _device = _device, _Device(kind)
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    replaced: dict[str, Any] = {
        "flowrl.training.run.accelerator_of": lambda device: _Accelerator(),
        "flowrl.pipelines.weights.stock_loading.load_stock": load_on_host,
        "torch.cuda._lazy_init": lambda: None,
        "torch.cuda.get_device_name": lambda *_: "pretend",
        "torch.cuda.Event": _Event,
        "torch.cuda.max_memory_allocated": lambda *_: 0,
        "torch.cuda.reset_peak_memory_stats": lambda *_: None,
        "torch.accelerator.synchronize": _boundary,
    }
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch(name, value))
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # parameters become pretended ones
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrites)
        stack.enter_context(_Functions())
        stack.enter_context(_Operations())  # type: ignore[no-untyped-call]
        try:
            yield _device.findings
        finally:
            _device = outer
