"""Which kernel computes attention: our words, what each needs and refuses, and what "auto" is.

`pipeline.attention` is one of `KERNELS` or "auto"; `attention.py` sets it on a network. Rollout and
update run the same code, so the importance ratio stays 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from flowrl.config.options import build_options, entry_of
from flowrl.config.strict_yaml import read_mapping
from flowrl.runtime.capabilities import Machine, at_least_version

Mask = Literal["none", "keys", "bias"]

_LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionKernel:
    """What a kernel is called in diffusers' dispatcher, and what it needs."""

    backend: str
    """Name of the dispatcher; "native" is torch's own choice among its kernels."""
    torchs: bool = True
    """Whether it is torch's own attention, which casts as autocast says."""
    casts: bool = False
    """Whether it gets queries, keys and values as float32."""
    gpu: bool = True
    """Whether it needs CUDA."""
    capability: tuple[tuple[int, int], tuple[int, int]] | None = None
    """Least and most compute capability of the GPU."""
    package: tuple[str, str, str] | None = None
    """The package it needs, with its least version and how to install it."""
    low: bool = False
    """Whether it takes only bfloat16 and float16."""
    largest: int | None = None
    """Most numbers of a head."""
    multiple: int = 1
    """The numbers of a head are a multiple of this."""
    mask: Mask = "bias"
    """Either "none", "keys" (true where a key is read) or "bias" (any mask, added numbers too)."""


_HOPPER, _NEWEST = (9, 0), (99, 0)
_TABLES = read_mapping(Path(__file__).with_suffix(".yaml"))

KERNELS: Mapping[str, AttentionKernel] = {
    word: build_options(AttentionKernel, row, owner=f"attention {word}") for word, row in _TABLES["kernels"].items()
}
"""Word of `pipeline.attention` -> kernel; all have a backward pass."""

_REFUSED: Mapping[str, Sequence[str]] = _TABLES["refused"]
"""What diffusers has beside them -> why it is refused, and what to take."""

_THEIRS = {kernel.backend: word for word, kernel in KERNELS.items() if not kernel.casts}


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """How a checkpoint attends: sizes of its heads, empty if unknown, and the family's mask."""

    head_sizes: tuple[int, ...] = ()
    mask: Mask = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Attends:
    """How a family attends."""

    head_sizes: Callable[[Any], tuple[int, ...]] = lambda config: (config.attention_head_dim,)
    """Numbers of a head of every attention that has a kernel to choose, of the denoiser's configuration."""
    mask: Mask = "none"
    """The mask that its attention may get in a batch of different prompts."""

    def known(self, network: Any) -> Known:
        """From a denoiser's configuration; None if it is unknown."""
        sizes = () if network is None else self.head_sizes(network)
        return Known(head_sizes=sizes, mask=self.mask)


UNMASKED = Attends()
"""Heads of `attention_head_dim` numbers, and no mask: most families."""


def check_word(word: str, dtype: torch.dtype, known: Known) -> None:
    """Refuses what no machine could do: a word without a backward pass, a wrong dtype, unfit heads or masks."""
    if word == "auto":
        return
    if word in _REFUSED:
        why, instead = _REFUSED[word]
        raise ValueError(f"pipeline.attention={word} {why}: choose {instead}")
    if word in _THEIRS and word not in KERNELS:
        ours = _THEIRS[word]
        raise ValueError(f"pipeline.attention={word} is diffusers' name of what is called {ours} here: write {ours}")
    kernel = entry_of(KERNELS, word, "pipeline.attention")
    if fault := _misfit(kernel, dtype, known):
        fitting = [name for name, other in KERNELS.items() if not _misfit(other, dtype, known)]
        raise ValueError(f"pipeline.attention={word} {fault}: choose among {', '.join(fitting)}")


def check_here(word: str, machine: Machine) -> None:
    """Refuses a kernel that a machine does not have."""
    if word != "auto" and (fault := _lack(KERNELS[word], machine)):
        there = [name for name, kernel in KERNELS.items() if not _lack(kernel, machine)]
        raise ValueError(f"pipeline.attention={word} {fault}; or choose among auto, {', '.join(there)}")


def usable(machine: Machine, dtype: torch.dtype, known: Known) -> list[str]:
    """Words that a machine has and that suit a checkpoint in a dtype; without float32 if that is the dtype."""
    words = [word for word, kernel in KERNELS.items() if not (kernel.casts and dtype == torch.float32)]
    return [w for w in words if not _lack(KERNELS[w], machine) and not _misfit(KERNELS[w], dtype, known)]


def choose(word: str, machine: Machine, dtype: torch.dtype, known: Known) -> str:
    """What a word means on a machine: "auto" is its fastest kernel that needs no extra package.

    On a CPU in 16 bits that is float32: torch's backward pass is 3 to 8 times slower in bfloat16 and float16 there
    (24 x 96 tokens, 4 heads of 32, forward and backward: 54 ms, in float32 16 ms; 1024 tokens of 64: 2.2 s and 0.28 s).
    On Hopper it is cuDNN's, which reaches FlashAttention 3; with a mask it is torch's own choice, as everywhere else.
    """
    if word != "auto":
        return word
    if machine.device == "cpu" and dtype in _LOW:
        return "float32"
    hopper = machine.capability is not None and machine.capability[0] == _HOPPER[0]
    if hopper and known.mask == "none" and known.head_sizes and "cudnn" in usable(machine, dtype, known):
        return "cudnn"
    return "native"


def _misfit(kernel: AttentionKernel, dtype: torch.dtype, known: Known) -> str:
    """Why a kernel does not suit dtype, heads or masks; empty if it does."""
    if kernel.low and dtype not in _LOW:
        return f"takes bfloat16 and float16, and pipeline.dtype is {str(dtype).removeprefix('torch.')}"
    largest = max(known.head_sizes, default=0)
    if kernel.largest is not None and largest > kernel.largest:
        return f"takes heads of at most {kernel.largest} numbers, and this model has heads of {largest}"
    if odd := [size for size in known.head_sizes if size % kernel.multiple]:
        return f"takes heads of a multiple of {kernel.multiple} numbers, and this model has heads of {odd[0]}"
    if known.mask != "none" and kernel.mask == "none":
        return "takes no mask, and attention of this family has one, at least where prompts of a batch differ in length"
    if known.mask == "bias" and kernel.mask == "keys":
        return "takes masks of keys alone, and attention of this family has a causal one, or one of added numbers"
    return ""


def _lack(kernel: AttentionKernel, machine: Machine) -> str:
    """What a machine lacks for a kernel, and what to do; empty if nothing."""
    if kernel.gpu and machine.device != "cuda":
        return f"runs on CUDA devices, and the device is {machine.device}: set pipeline.device=cuda where there is one"
    if kernel.capability is not None and machine.capability is not None:
        least, most = kernel.capability
        if not least <= machine.capability <= (most[0], 9):
            wanted = f"{least[0]}.{least[1]} and later" if most == _NEWEST else f"{least[0]}.x (Hopper)"
            own = ".".join(map(str, machine.capability))
            return f"needs a GPU of compute capability {wanted}, and this one has {own}: choose another kernel"
    if kernel.package is None:
        return ""
    name, least_version, install = kernel.package
    if name in machine.faults:
        return f"needs {name}, which is {machine.faults[name]}: {install}"
    version = machine.packages.get(name)
    if version is None:
        return f"needs {name} {least_version} or newer, which is not installed: {install}"
    if not at_least_version(version, least_version):
        return f"needs {name} {least_version} or newer, and {version} is installed: {install}"
    return ""


def kernels_line(word: str, machine: Machine, dtype: torch.dtype, known: Known) -> str:
    """What a word means on a machine, and what else there is, for `flowrl plan`."""
    found = choose(word, machine, dtype, known)
    arrow = f"{word} -> {found}" if found != word else word
    return f"{arrow} on this machine (usable: {', '.join(usable(machine, dtype, known))})"
