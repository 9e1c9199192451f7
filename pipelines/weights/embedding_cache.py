"""Embeddings of prompts in a folder, one file each, for other processes and later runs.

A file is named by a digest of all that its numbers depend on, and holds that digest and one of its numbers, so that
what is damaged, or lies under another's name, is never taken for an embedding. It appears whole or not at all; two
writers of one file write the same numbers. Files lie in 256 folders, so that none of them grows large.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from flowrl.runtime.files import replacing
from flowrl.runtime.scrubbing import say as print
from flowrl.trajectory import Conditioning

_FORMAT = "flowrl embedding 1"
_UNREAD = ("gradient_checkpointing", "vae_slice", "max_sequence_length")  # the last one resolved
_OF_IMAGES = ("height", "width", "num_frames", "fps", "vae_dtype", "vae_tiling")
_WAYS_OUT = "give prompts.cache another folder, or remove the key"


def check_cache(folder: Path) -> None:
    """Makes the folder of a cache if it is missing. Raises ValueError: it cannot be written into, and why."""
    probe = folder / ".written"
    try:
        with replacing(probe, durable=False) as stream:
            stream.write(b"flowrl")
        probe.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"prompts.cache: nothing can be written into {folder} ({error}): {_WAYS_OUT}") from error


def cache_of(p: Any, folder: Path, encoders: str, *, sources: bool) -> EmbeddingCache:
    """The cache of a `FamilyPipeline`, of its prompts or of source images that are encoded apart from them. `encoders`
    tells its encoders from others, a digest of their files."""
    options = {name: value for name, value in asdict(p.options).items() if name not in _UNREAD}
    size: tuple[int, ...] = p.image_shape if sources else ()
    if not sources and (p.family.embed_sources is not None or not p.num_sources[1]):  # text alone has no size
        options = {name: value for name, value in options.items() if name not in _OF_IMAGES}
    settings = {
        "encoders": encoders, "family": p.family.name, "stock": type(p.pipe).__name__, "dtype": str(p.dtype),
        "device": p.device.type, "tokens": p.max_sequence_length, "options": options, "sources": sources, "size": size,
    }  # fmt: skip
    return EmbeddingCache(folder=folder, settings=settings)


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingCache:
    """The embeddings of one pipeline in a folder."""

    folder: Path
    """The folder; any number of pipelines and settings may share it."""
    settings: Mapping[str, Any]
    """All that embeddings depend on besides their prompts: files of the encoders, dtype, lengths, sizes."""

    def key(self, prompt: str, images: tuple[str, ...]) -> str:
        """The name of an embedding: a digest of the settings, the libraries' versions, the prompt and its images."""
        about = {"format": _FORMAT, "settings": self.settings, "versions": _versions(), "prompt": prompt}
        text = json.dumps(about | {"images": images}, sort_keys=True, default=str)
        return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()

    def path(self, key: str) -> Path:
        """The file of an embedding."""
        return self.folder / key[:2] / f"{key}.safetensors"

    def has(self, key: str) -> bool:
        """Whether an embedding is there and whole; reads only the head of its file."""
        path = self.path(key)
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                if not 0 < size <= path.stat().st_size - 8:
                    raise ValueError("it is cut short")
                head = json.loads(file.read(size))
            _refuse_foreign(head.get("__metadata__", {}), key)
            end = max(tensor["data_offsets"][1] for name, tensor in head.items() if name != "__metadata__")
            if path.stat().st_size != 8 + size + end:
                raise ValueError("it is cut short, or longer than it says")
        except FileNotFoundError:
            return False
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _say_damaged(path, error)
            return False
        return True

    def read(self, key: str) -> Conditioning | None:
        """An embedding, one row on the host; None if it is missing, or damaged, with a note."""
        path = self.path(key)
        try:
            data = path.read_bytes()
            tensors = load(data)
            found = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
            _refuse_foreign(found, key)
            if found["content"] != _content(tensors):
                raise ValueError("its numbers are not those that were written")
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever is in a foreign file: the library has errors of its own
            _say_damaged(path, error)
            return None
        return Conditioning(tensors)

    def write(self, key: str, row: Conditioning) -> None:
        """Keeps an embedding. Raises ValueError: it cannot be written, for instance on a full disk."""
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in row.tensors.items()}
        metadata = {"format": _FORMAT, "key": key, "content": _content(tensors)}
        try:
            with replacing(self.path(key), durable=False) as stream:
                stream.write(save(tensors, metadata))
        except OSError as error:
            raise ValueError(
                f"prompts.cache: an embedding could not be written into {self.folder} ({error}): make room, or "
                f"{_WAYS_OUT}"
            ) from error


@cache
def _versions() -> dict[str, str]:
    """Versions of the libraries that embed, without their last part: others may round differently."""
    return {name: ".".join(version(name).split(".")[:2]) for name in ("torch", "transformers", "diffusers")}


def _refuse_foreign(metadata: Mapping[str, str], key: str) -> None:
    if metadata.get("format") != _FORMAT or metadata.get("key") != key:
        raise ValueError("it is something else")


def _content(tensors: Mapping[str, Tensor]) -> str:
    """A digest of names, kinds, shapes and numbers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _say_damaged(path: Path, error: Exception) -> None:
    print(f"Note: {path} cannot be used as an embedding ({error}), so it is left out.", flush=True)
