"""Tensors from files of torch that also hold other programs' objects, without running any code of the file.

Training programs put their logs and settings into a checkpoint as objects of their own classes. torch's safe reader
refuses such a file whole. Here every class and function that the file names, and that torch does not know as harmless,
is replaced by an empty class that accepts any arguments and does nothing: nothing is imported, nothing is called.
A class that inherits from dict or list cannot be replaced, because torch fills only its own: such a file is refused.
"""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from flowrl.runtime.private_names import IMPORT_MAPPING, NAME_MAPPING

_ALLOWED = {
    "collections.OrderedDict",
    "collections.Counter",
    "_codecs.encode",
    "builtins.bytearray",
    "builtins.set",
    "builtins.complex",
}
"""Names of Python's own library that torch's safe reader knows."""
_LEGACY = 4  # pickles of the format before torch 1.6: a mark, its version, the machine, the content


def blank(name: str) -> type:
    """An empty class: made with any arguments, given any state, it stays empty."""

    def new(cls: type, *_: Any, **__: Any) -> Any:
        return object.__new__(cls)

    def ignore(self: Any, *_: Any, **__: Any) -> None:
        return None

    return type(name.rpartition(".")[2], (), {"__new__": new, "__init__": ignore, "__setstate__": ignore})


def foreign_names(path: Path) -> list[str]:
    """Names in a file of torch that are not torch's own: "module.name" each."""
    names: set[str] = set()
    if zipfile.is_zipfile(path):
        try:
            with zipfile.ZipFile(path) as archive:
                for entry in archive.namelist():
                    if entry.endswith("/data.pkl"):
                        with archive.open(entry) as stream:
                            names |= _named(stream)
        except zipfile.BadZipFile as error:
            raise ValueError(f"{error}.") from error
    else:
        with path.open("rb") as stream:
            for _ in range(_LEGACY):
                names |= _named(stream)
    return sorted(name for name in names - _ALLOWED if name.partition(".")[0] != "torch")


def _named(stream: IO[bytes]) -> set[str]:
    """The names in the pickle that begins here, as torch reads those of Python 2; the stream stands after it."""
    found = set()
    for code, value, _ in pickletools.genops(stream):
        if code.name == "GLOBAL":
            module, _, name = str(value).partition(" ")
            module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
            found.add(f"{module}.{name}")
    return found


@contextmanager
def replace_foreign(path: Path) -> Iterator[None]:
    """While it is entered, torch's safe reader takes a file's foreign objects for empty ones."""
    # Of a `defaultdict`, torch sets items on a plain dict and on nothing that stands for one.
    stands: list[Any] = [
        ((lambda *_: {}) if name == "collections.defaultdict" else blank(name), name) for name in foreign_names(path)
    ]
    with torch.serialization.safe_globals(stands):
        yield
