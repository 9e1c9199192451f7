"""Networks that tests read from equal files again and again: libraries read them once a process, then they are copied.

Most of what a tiny model takes to load is the making of its modules in Python. Here the `from_pretrained` of networks
keeps what it has read, by class, arguments and the bytes of all files of the folder, and gives a copy the next time.
Nothing is shared with a caller: modules are unpickled, tensors are cloned. What our own code does around that call runs
each time. A network that cannot be copied so, or is asked for with more than words and numbers, is read as always.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import wraps
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

READERS = {
    "diffusers.models.modeling_utils": "ModelMixin", "transformers.modeling_utils": "PreTrainedModel",
}  # fmt: skip
"""Module and class whose `from_pretrained` reads networks."""
LARGEST, MOST = 32 << 20, 256 << 20
"""Bytes of a folder that is kept at all, and of all that is kept."""
_PLAIN = (str, bool, int, float, type(None), torch.dtype)
_PLACE = "place"

_kept: OrderedDict[Any, Kept | None] = OrderedDict()
_installed: set[str] = set()


class Unkept(Exception):
    """What was read cannot be copied."""


class Kept:
    """A network as it was read, and whatever came with it."""

    def __init__(self, read: Any, place: Any) -> None:
        stream, self.tensors = io.BytesIO(), dict[int, Tensor]()
        held, starts = dict[int, Tensor](), set[tuple[int, Any]]()

        class Writer(pickle.Pickler):
            def persistent_id(self, thing: Any) -> Any:
                if isinstance(thing, Tensor):
                    held[id(thing)] = thing  # and stays alive, so that no other has its number
                    return id(thing)
                return _PLACE if isinstance(thing, str | Path) and thing == place else None

        try:
            Writer(stream, pickle.HIGHEST_PROTOCOL).dump(read)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise Unkept from error
        for number, tensor in held.items():
            start = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
            plain = type(tensor) in (Tensor, nn.Parameter) and tensor.is_leaf and tensor.layout is torch.strided
            if not plain or (tensor.numel() and not tensor.is_meta and start in starts):
                raise Unkept
            starts.add(start)
            self.tensors[number] = _cloned(tensor)
        self.text = stream.getvalue()
        if str(place).encode() in self.text:
            raise Unkept  # the folder's name within another text
        self.size = len(self.text) + sum(tensor.nbytes for tensor in self.tensors.values())

    def copy(self, place: Any) -> Any:
        """As it would be read from a folder of the same files."""
        found: dict[Any, Any] = {_PLACE: place}

        class Reader(pickle.Unpickler):
            def persistent_load(self, number: Any) -> Any:
                if number not in found:
                    found[number] = _cloned(kept[number])
                return found[number]

        kept = self.tensors
        return Reader(io.BytesIO(self.text)).load()


def _cloned(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        copy = nn.Parameter(copy, tensor.requires_grad)
    vars(copy).update(vars(tensor))
    return copy


def _key(cls: type, place: Any, options: Mapping[str, Any]) -> Any:
    """What decides what is read; None if that is not known."""
    if not isinstance(place, str | Path):
        return None  # weights that a caller hands over
    folder = Path(place) / (options.get("subfolder") or "")
    if not folder.is_dir() or not all(isinstance(value, _PLAIN) for value in options.values()):
        return None
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    if sum(path.stat().st_size for path in files) > LARGEST:
        return None
    digests = [(path.name, blake2b(path.read_bytes()).digest()) for path in files]
    around = str(torch.get_default_device()), torch.get_default_dtype()
    return cls, type(place), *around, *sorted((name, str(value)) for name, value in options.items()), *digests


def keeping(read: Callable[..., Any]) -> Any:
    """A reader of networks that reads equal files once."""

    @wraps(read)
    def from_pretrained(cls: Any, place: Any, *args: Any, **options: Any) -> Any:
        key = None if args else _key(cls, place, options)
        if key is None:
            return read(cls, place, *args, **options)
        if (kept := _kept.get(key)) is not None:
            _kept.move_to_end(key)
            return kept.copy(place)
        found = read(cls, place, **options)
        if key not in _kept:
            try:
                _kept[key] = Kept(found, place)
            except Unkept:
                _kept[key] = None
            while sum(one.size for one in _kept.values() if one is not None) > MOST:
                _kept.popitem(last=False)
        return found

    return classmethod(from_pretrained)


def install() -> None:
    """Has the libraries that are imported by now keep what they read."""
    for module, name in READERS.items():
        cls = vars(sys.modules[module]).get(name) if module in sys.modules else None
        if cls is not None and module not in _installed:
            _installed.add(module)
            cls.from_pretrained = keeping(vars(cls)["from_pretrained"].__func__)
