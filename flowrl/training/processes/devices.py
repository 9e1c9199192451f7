"""The device of a run, as its configuration names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from flowrl.runtime.failures import explain
from flowrl.training.processes.launched import num_launched

if TYPE_CHECKING:  # its import takes a third of a second, and a plan starts no processes
    from accelerate import Accelerator

T = TypeVar("T")


def check_device(device: str, key: str = "pipeline.device=") -> None:
    """Refuses a device that this machine does not have, and one GPU by number for several processes.

    `key` is what the device was given as, for the message.

    Raises:
        ValueError: names those there are.
    """
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


def device_kind(device: str) -> str:
    """The kind of device that a word means here: "cpu", "cuda" or "mps"; the CPU where it means a GPU that is not."""
    gpu = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    kind = device.partition(":")[0]
    return gpu if kind in ("auto", gpu) else "cpu"


def wait_for(device: torch.device) -> None:
    """Returns when a GPU has done all that was asked of it; at once on the CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def accelerator_of(device: str) -> Accelerator:
    """The processes of a run on a device.

    Raises:
        ValueError: the device is not there, or not all that were launched are found.
    """
    from accelerate import Accelerator

    check_device(device)
    world = num_launched()
    kind, _, number = device.partition(":")
    if number:
        torch.cuda.set_device(int(number))  # accelerate's "cuda" is the current device
    accelerator = Accelerator(cpu=kind == "cpu")
    if kind not in ("auto", "cpu") and accelerator.device.type != kind:
        raise ValueError(
            f"pipeline.device={device}, but accelerate chose {accelerator.device}: check ACCELERATE_USE_CPU"
        )
    if accelerator.num_processes != world:  # a launcher that sets variables of its own, or half of the usual ones
        raise ValueError(
            f"accelerate found {accelerator.num_processes} processes of this run, and WORLD_SIZE in the environment is "
            f"{world}: start it with torchrun or 'accelerate launch', or set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR "
            "and MASTER_PORT for every process"
        )
    return accelerator


def on_main(function: Callable[[], T]) -> T:
    """Calls a function on the main process alone; every process gets what it returns.

    Raises:
        ValueError: on every process where the function raised one, or an OSError, on the main one.
    """
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
