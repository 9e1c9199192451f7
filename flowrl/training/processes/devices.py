"""The device of a run, as its configuration names it, and the group of its processes.

Processes on GPUs use NCCL for what is on a GPU (gradients, weights) and gloo for what is on the host (agreements,
objects, barriers). So one that waits for another's work on disks or in the network, such as a checkpoint of all
weights, holds no kernel on its GPU meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from flowrl.config.locations import is_path
from flowrl.config.sections import PipelineConfig
from flowrl.rendering.markup import plural
from flowrl.runtime.failures import explain
from flowrl.runtime.gpus import driver_fault, gpu_facts
from flowrl.training.processes.launched import launched, num_launched
from flowrl.training.processes.meeting import meet

if TYPE_CHECKING:  # its import takes a third of a second, and a plan starts no processes
    from accelerate import Accelerator


T = TypeVar("T")

PATIENCE = timedelta(hours=2)
"""How long processes of a run wait for each other. Torch ends all of them after ten minutes by itself, in which one
process need not have written 130 GB of weights, or read as many."""


def check_device(device: str, key: str = "pipeline.device=", model: str = "asset:") -> None:
    """Refuses a device that this machine does not have, one GPU by number for several processes, and what
    `refuse_unused_gpu` refuses. `key` names the device's setting, for the message."""
    refuse_unused_gpu(device, model)
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    usable = ["auto", "cpu", *(["cuda", *gpus] if gpus else [])]
    usable += ["mps"] if torch.backends.mps.is_available() else []
    if device not in usable:
        raise ValueError(f"{key}{device} is not available on this machine: choose {', '.join(usable)}")
    if device in gpus and num_launched() > 1:
        raise ValueError(
            f"pipeline.device={device} names one GPU, but several processes were launched and each takes its own: "
            "set pipeline.device=cuda, and choose GPUs with CUDA_VISIBLE_DEVICES"
        )


def refuse_unused_gpu(device: str, model: str) -> None:
    """Refuses `auto` if it would silently mean the CPU beside an NVIDIA GPU that torch cannot use. The embedded models
    may still train there: they take minutes on a CPU. So may anything if CUDA_VISIBLE_DEVICES hides all GPUs."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    if device != "auto" or device_kind(device) != "cpu" or model.startswith("asset:") or hidden:
        return
    facts = gpu_facts()
    if facts.named and (fault := driver_fault(facts)) is not None:
        raise ValueError(
            f"pipeline.device=auto is the CPU here, although {facts.named[0]} is in this machine: {fault[0]}. "
            f"{fault[1][0].upper()}{fault[1][1:]}; or set pipeline.device=cpu to train {model} on the CPU"
        )


def device_words(device: torch.device, processes: int = 1) -> str:
    """Names the device of a run, for its first line: "8 x NVIDIA H100 80GB HBM3", "the CPU (2 x 8 threads)"."""
    several = f"{processes} x " if processes > 1 else ""
    if device.type == "cuda":
        return f"{several}{torch.cuda.get_device_name(device)}"
    return "Apple's GPU" if device.type == "mps" else f"the CPU ({several}{plural(torch.get_num_threads(), 'thread')})"


def device_kind(device: str) -> str:
    """The kind of device that a word means here: "cpu", "cuda" or "mps"; the CPU for a GPU that is missing."""
    gpu = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    kind = device.partition(":")[0]
    return gpu if kind in ("auto", gpu) else "cpu"


def backend_of(kind: str) -> str:
    """The backends of a group of processes on a kind of device, as torch.distributed names them."""
    return "cuda:nccl,cpu:gloo" if kind == "cuda" else "gloo"


def wait_for(device: torch.device) -> None:
    """Returns when a GPU has done all its work; at once on the CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def accelerator_of(device: str) -> Accelerator:
    """The processes of a run on a device. Raises ValueError: the device or some launched processes are missing."""
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    check_device(device)
    world = num_launched()
    kind, _, number = device.partition(":")
    if number:
        torch.cuda.set_device(int(number))  # accelerate's "cuda" is the current device
    found = device_kind(device)
    group = (
        [InitProcessGroupKwargs(backend=backend_of(found), timeout=PATIENCE)] if world > 1 and found != "mps" else []
    )
    accelerator = Accelerator(cpu=found == "cpu", kwargs_handlers=group)
    if kind not in ("auto", "cpu") and accelerator.device.type != kind:
        raise ValueError(f"pipeline.device={device}, accelerate chose {accelerator.device}: check ACCELERATE_USE_CPU")
    if accelerator.num_processes != world:  # a launcher with its own variables, or only half of the usual ones
        raise ValueError(
            f"accelerate found {accelerator.num_processes} processes of this run, and WORLD_SIZE in the environment is "
            f"{world}: start it with torchrun or 'accelerate launch', or set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR "
            "and MASTER_PORT for every process"
        )
    return accelerator


def wait_for_everyone() -> None:
    """Returns when all processes of the run have called it; by gloo, which leaves their GPUs alone."""
    from accelerate import PartialState

    if PartialState().num_processes > 1:
        torch.distributed.barrier()


def on_main(function: Callable[[], T]) -> T:
    """Calls a function only on the main process; every process gets its result. Raises ValueError: on every process, if
    the function raised one, or an OSError, on the main one."""
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    state = PartialState()
    if state.num_processes == 1:
        return function()
    answer: list[Any] = [None, None]
    failed: Exception | None = None
    if state.is_main_process:
        try:
            answer[0] = function()
        except (ValueError, OSError) as error:
            failed, answer[1] = error, explain(error)
    broadcast_object_list(answer)
    if answer[1] is not None:
        raise failed or ValueError(answer[1])
    result: T = answer[0]
    return result


def fetch_first(settings: PipelineConfig, location: str) -> None:
    """Returns when the model is on this machine's disk; does nothing for a single process, which downloads while it
    loads. The settings that name the model are the same in every process. Loading refuses a bad `location`."""
    if launched() is None or is_path(settings.model):
        return
    if int(os.environ.get("LOCAL_RANK") or 0) == 0:
        from flowrl.pipelines.weights.stock_loading import fetch  # diffusers takes seconds to import

        with suppress(ValueError):
            fetch(location, settings.variant)
    meet({}, lambda _: "", patience=PATIENCE.total_seconds())
