"""GPUs that nobody would know are left out: named, refused, and the group that processes on GPUs form."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from flowrl.config.sections import PipelineConfig
from flowrl.runtime.gpus import gpu_facts, loaded_driver
from flowrl.session.preflight import look
from flowrl.training.processes import devices
from flowrl.training.processes.devices import PATIENCE, accelerator_of, device_words, refuse_unused_gpu
from flowrl.training.processes.launched import Launched
from flowrl.training.processes.mesh import Layout, device_mesh

MODEL = "black-forest-labs/FLUX.1-dev"
VERSION = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.90.07  Release Build  (archive)\n"


@pytest.fixture
def old_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose driver is too old for torch's CUDA, as nvidia-smi says."""
    path = tmp_path / "nvidia-smi"
    path.write_text("#!/bin/sh\necho '550.90.07, NVIDIA H100 80GB HBM3'\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("torch.version.cuda", "13.2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return path


@pytest.mark.usefixtures("old_driver")
def test_a_published_model_does_not_train_on_the_cpu_beside_a_gpu_without_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="is the CPU here, although NVIDIA H100 80GB HBM3 is in this machine") as told:
        refuse_unused_gpu("auto", MODEL)
    said = str(told.value)
    assert "driver 550.90.07 is too old" in said
    assert "is built for CUDA 13.2, which needs 580 or newer. Update the driver to 580 or newer" in said
    assert f"or set pipeline.device=cpu to train {MODEL} on the CPU" in said
    assert said in look({"pipeline": PipelineConfig(model=MODEL, name="flux")}).faults
    refuse_unused_gpu("auto", "asset:tiny-sd3")
    refuse_unused_gpu("cpu", MODEL)
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        refuse_unused_gpu("auto", MODEL)


def test_tools_of_a_driver_without_a_gpu_refuse_nothing(old_driver: Path) -> None:
    old_driver.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed: no devices were found'; exit 6\n")
    assert "no devices" in gpu_facts().complaint
    refuse_unused_gpu("auto", MODEL)


def test_the_kernel_knows_a_driver_that_an_image_has_no_tools_of(tmp_path: Path) -> None:
    assert loaded_driver(tmp_path) == (None, (), "")
    (tmp_path / "version").write_text(VERSION)
    for number, card in enumerate(("NVIDIA H100", "NVIDIA L40S")):
        (tmp_path / "gpus" / str(number)).mkdir(parents=True)
        (tmp_path / "gpus" / str(number) / "information").write_text(f"Model: \t\t {card}\nIRQ:   1\n")
    assert loaded_driver(tmp_path) == ("550.90.07", ("NVIDIA H100", "NVIDIA L40S"), "")
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue Jul 13\n")
    assert loaded_driver(tmp_path)[0] == "470.57.02"


def test_devices_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    assert device_words(torch.device("cpu")) == "the CPU (1 thread)"
    assert device_words(torch.device("cpu"), 2) == "the CPU (2 x 1 thread)"
    assert device_words(torch.device("cuda", 0), 8) == "8 x NVIDIA H100"
    assert device_words(torch.device("mps")) == "Apple's GPU"


@pytest.mark.parametrize(
    ("cuda", "world", "backend"), [(True, 2, "cuda:nccl,cpu:gloo"), (False, 2, "gloo"), (True, 1, None)]
)
def test_processes_on_gpus_talk_by_gloo_too_and_wait_for_hours(
    cuda: bool, world: int, backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    class Accelerator:
        num_processes = world

        def __init__(self, **settings: Any) -> None:
            given.update(settings)

    monkeypatch.setattr(accelerate, "Accelerator", Accelerator)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(devices, "num_launched", lambda: world)
    accelerator_of("auto")
    assert given["cpu"] is not cuda
    found = [(one.backend, one.timeout) for one in given["kwargs_handlers"]]
    assert found == ([] if backend is None else [(backend, timedelta(hours=2))])


def test_groups_of_a_mesh_wait_as_long_as_all() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        device_mesh.cache_clear()
        mesh = device_mesh(Layout(), "cpu")
        assert mesh.mesh_dim_names == ("replicate", "shard", "context")
        for name in mesh.mesh_dim_names:
            group = mesh[name].get_group()
            assert dist.get_process_group_ranks(group) == [0]
            assert group._get_backend(torch.device("cpu")).options._timeout == PATIENCE
    finally:
        device_mesh.cache_clear()
        dist.destroy_process_group()


@pytest.mark.parametrize(("local", "fails"), [("0", False), ("0", True), ("1", True)])
def test_one_process_of_a_machine_downloads_before_they_form_a_group(
    local: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flowrl.pipelines.weights import stock_loading

    fetched, met = list[tuple[str, str | None]](), list[tuple[dict[str, str], float]]()

    def fetch(model: str, variant: str | None) -> None:
        fetched.append((model, variant))
        if fails:
            raise ValueError("could not download it")

    monkeypatch.setattr(stock_loading, "fetch", fetch)
    monkeypatch.setattr(devices, "meet", lambda said, judge, *, patience: met.append((said, patience)))
    settings = PipelineConfig(model=MODEL, variant="bf16")
    monkeypatch.setattr(devices, "launched", lambda: None)
    devices.fetch_first(settings, MODEL)
    assert not met
    monkeypatch.setattr(devices, "launched", lambda: Launched(rank=3, world=4, address="here", port=1))
    monkeypatch.setenv("LOCAL_RANK", local)
    devices.fetch_first(PipelineConfig(model="asset:tiny-sd3"), "assets/tiny-sd3")
    assert not met
    devices.fetch_first(settings, MODEL)
    assert fetched == ([(MODEL, "bf16")] if local == "0" else [])
    assert met == [({}, 7200.0)]  # what cannot be had is refused when it loads, in its own words


def test_what_is_downloaded_is_what_will_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers import DiffusionPipeline

    from flowrl.pipelines.weights.stock_loading import fetch

    asked: list[Any] = []
    monkeypatch.setattr(DiffusionPipeline, "download", lambda *given, **settings: asked.append((given, settings)))
    fetch(str(tmp_path), None)
    fetch(f"{MODEL}@main", "fp16")
    assert asked == [((MODEL,), {"revision": "main", "variant": "fp16"})]

    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("no route to the hub\nand more")

    monkeypatch.setattr(DiffusionPipeline, "download", unreachable)
    with pytest.raises(ValueError, match=r"could not download .*FLUX.* \(.*no route to the hub\): give a folder"):
        fetch(MODEL, None)
