"""Compiling the blocks that a denoiser repeats (`pipeline.compile: blocks`).

Each block is compiled in place and alone, so one compiled graph serves all blocks of a kind, whatever their number, and
names of weights stay. What depends on prompt or family stays outside. A LoRA may be added before the first call.

A rollout runs without gradient and an update with it: two graphs of the same formula. By default the compiler keeps
intermediate results in float32 if a graph allows it. Then the two would differ by the rounding of bfloat16, and the
importance ratio would not start at 1. So it is set to round where eager code does. Sizes are free in the graphs: other
batch sizes, such as an evaluation's last one, compile nothing. A call with a single row has its own graphs, made once.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flowrl.config.strict_yaml import read_mapping
from flowrl.runtime.private_names import repeated_classes, rounding_options
from flowrl.runtime.progress import clock
from flowrl.runtime.scrubbing import say as print

_UNNAMED: Mapping[str, Sequence[str]] = read_mapping(Path(__file__).with_suffix(".yaml"))
"""Classes of repeated blocks by class of network, for those that diffusers names none of."""

_MOST_GRAPHS = 128
"""Of one class of blocks: 12 kinds of ResnetBlock2D in a UNet, each with gradient and without, LoRA on and off, and of
one row or more, are 96."""


def experts_of(denoiser: nn.Module | None) -> list[nn.Module]:
    """The networks that denoise: one, several, or none."""
    if isinstance(denoiser, nn.ModuleDict):
        return list(denoiser.values())
    return [] if denoiser is None else [denoiser]


def first_expert(denoiser: nn.Module) -> nn.Module:
    """The network that one evaluation calls: the denoiser, or one of its experts, which are alike."""
    return experts_of(denoiser)[0]


def repeated_blocks(network: nn.Module) -> list[nn.Module]:
    """The blocks of a denoiser to compile, in order; of all experts, if there are several."""
    one: Any = first_expert(network)
    own = _class_name(one)
    names = _UNNAMED[own] if own in _UNNAMED else repeated_classes(one)
    return [module for module in network.modules() if _class_name(module) in names]


def _class_name(module: nn.Module) -> str:
    """The name of a module's class, also if `fully_shard` has put its own before it."""
    return type(module).__name__.removeprefix("FSDP")


def check_compile(compile: str, device: torch.device | str | None) -> None:
    """Refuses compiling that cannot work, before weights load. Raises ValueError: no such choice; on MPS; on a CPU
    without a C++ compiler; on a GPU without Triton, or without the C compiler that Triton builds its launchers with.
    None is an unknown device."""
    if compile == "none" or device is None:
        return
    if compile != "blocks":
        raise ValueError(f"pipeline.compile must be none or blocks, got {compile!r}")
    kind = torch.device(device).type
    advice = "set pipeline.compile=none"
    if kind == "mps":
        raise ValueError(f"pipeline.compile=blocks is for CUDA and CPU devices, and pipeline.device is mps: {advice}")
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if kind == "cpu" and shutil.which(compiler.split()[0]) is None:
        raise ValueError(
            f"pipeline.compile=blocks on a CPU needs a C++ compiler, and {compiler} was not found: install it (Debian: "
            f"apt install g++), name another by the variable CXX, or {advice}"
        )
    if kind == "cuda" and importlib.util.find_spec("triton") is None:
        raise ValueError(f"pipeline.compile=blocks on a GPU needs the package triton, which is not installed: {advice}")
    if kind != "cuda" or ("CC" not in os.environ and (shutil.which("gcc") or shutil.which("clang"))):
        return
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler) is None:
        raise ValueError(
            f"pipeline.compile=blocks on a GPU needs a C compiler for Triton, and neither {compiler} nor gcc nor clang "
            f"was found: install one (Debian: apt install gcc), name it by the variable CC, or {advice}"
        )
    os.environ["CC"] = compiler  # Triton by itself looks for gcc and clang alone


@cache
def _announce() -> None:
    """From now on in this process, notes on standard error when time goes into compiling."""
    from flowrl.runtime.private_names import callback_handler  # seconds to import

    spent = _Clock()
    callback_handler.register_start_callback(spent.begin)
    callback_handler.register_end_callback(spent.end)


class _Clock:
    """Counts graphs and seconds of compiling, and says both whenever three more seconds are spent."""

    def __init__(self) -> None:
        self.graphs, self.seconds, self.said, self.begun = 0, 0.0, 0.0, 0.0

    def begin(self, _: object) -> None:
        self.begun = time.monotonic()

    def end(self, _: object) -> None:
        self.graphs += 1
        self.seconds += time.monotonic() - self.begun
        if self.seconds - self.said >= 3:
            self.said = self.seconds
            print(f"compiling blocks ... {self.graphs} graphs, {clock(self.seconds)}", file=sys.stderr, flush=True)


def compile_blocks(network: nn.Module, *, backend: str = "inductor") -> None:
    """Compiles the repeated blocks of a denoiser (or a ModuleDict of experts) in place, each kind at its first call;
    the `backend` of torch.compile "aot_eager" traces without generating code, for tests."""
    _announce()
    options: dict[str, Any] = rounding_options() if backend == "inductor" else {}
    traced: dict[str, Any] = {"fullgraph": True, "dynamic": True, "recompile_limit": _MOST_GRAPHS}
    for block in repeated_blocks(network):
        # Not `block.compile`, which would take the gathering of split weights, a hook of the block, into the graph.
        block.forward = torch.compile(block.forward, backend=backend, options=options or None, **traced)
