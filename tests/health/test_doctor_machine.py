"""`flowrl doctor` on planted faults of a machine: each is named, with what to change."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from collections import namedtuple
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests

from flowrl.cli import main
from flowrl.health import machine_checks
from flowrl.health.diagnosis import Check, Diagnosis, Examination, as_data, as_text, last_words
from flowrl.health.machine_checks import (
    GIB,
    disk_check,
    driver_check,
    has_kernels,
    hub_check,
    kernel_check,
    processes_check,
    requirements,
    shared_memory_check,
    unmet,
    version_checks,
)
from flowrl.rendering.terminal_text import COLUMNS
from flowrl.runtime.gpus import GpuFacts, gpu_facts

H100 = GpuFacts(
    driver="580.95.05", named=("NVIDIA H100",), build="13.2", names=("NVIDIA H100",), capabilities=((9, 0),),
    compiled=("sm_80", "sm_90", "compute_90"),
)  # fmt: skip
Usage = namedtuple("Usage", "total used free")


def has_free(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, int(gib * GIB)))


def smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Puts another nvidia-smi first."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


# ---- planted faults --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "said", "cure"),
    [
        ("echo 'none, NVIDIA H100'", "driver's version, which is not one", "install NVIDIA's driver again"),
        ("echo '470.57.02, NVIDIA H100'", "driver 470.57.02 is too old: torch", "update the driver to 580 or newer"),
        ("echo 'Driver/library version mismatch'; exit 18", "mismatch", "restart the machine"),
    ],
)
def test_a_wrong_driver_is_named(
    script: str, said: str, cure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(tmp_path, monkeypatch, script)
    monkeypatch.setattr("torch.version.cuda", "13.2")
    found = driver_check(gpu_facts())
    assert found.state == "fault"
    assert said in found.found
    assert cure in found.cure


def test_torch_without_kernels_for_the_gpu_is_named() -> None:
    new = GpuFacts(
        driver="580.1", build="12.6", names=("NVIDIA B200",), capabilities=((10, 0),), compiled=("sm_80", "sm_90"),
    )  # fmt: skip
    found = kernel_check(new)
    assert found.state == "fault"
    assert "no kernels for NVIDIA B200 (compute capability 10.0): it was built for sm_80, sm_90" in found.found
    assert "lists sm_100" in found.cure
    assert kernel_check(H100).state == "ok"


@pytest.mark.parametrize(
    ("capability", "compiled", "runs"),
    [
        ((8, 6), ["sm_80"], True), ((8, 0), ["sm_86"], False), ((9, 0), ["sm_80", "sm_86"], False),
        ((9, 0), ["sm_90a"], True), ((12, 0), ["sm_90", "compute_90"], True), ((7, 5), ["compute_80"], False),
        ((12, 1), ["sm_120"], True), ((12, 0), ["sm_100"], False),
    ],
)  # fmt: skip
def test_binaries_run_within_a_major_version_and_ptx_on_all_later_ones(
    capability: tuple[int, int], compiled: list[str], runs: bool
) -> None:
    assert has_kernels(capability, compiled) is runs


def test_other_states_of_driver_and_torch() -> None:
    assert driver_check(GpuFacts()).state == "note"
    assert driver_check(H100).state == "ok"
    cpu = driver_check(GpuFacts(driver="580.1", named=("H100",)))
    assert (cpu.state, "built without CUDA" in cpu.found) == ("fault", True)
    hidden = driver_check(GpuFacts(driver="580.1", named=("H100",), build="13.0", refused="no CUDA-capable device"))
    assert "torch sees none: no CUDA-capable device" in hidden.found
    assert "CUDA_VISIBLE_DEVICES" in hidden.cure


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disk_check(tmp_path / "runs" / "later").state in ("ok", "warning")
    assert not list(tmp_path.iterdir())
    has_free(monkeypatch, 5)
    assert disk_check(tmp_path).state == "warning"
    has_free(monkeypatch, 0.2)
    found = disk_check(tmp_path)
    assert found.state == "fault"
    assert found.found.startswith("0.2 GiB free in ")
    assert "out=FOLDER" in found.cure

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left", "x")

    has_free(monkeypatch, 50)
    monkeypatch.setattr("os.fsync", full)
    found = disk_check(tmp_path)
    assert found.state == "fault"
    assert "no space is left on the disk" in found.found


# ---- the rest of a machine -------------------------------------------------------------------------------------------


def test_little_shared_memory_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared_memory_check(tmp_path / "none").state == "note"
    has_free(monkeypatch, 1 / 16)
    found = shared_memory_check(tmp_path)
    assert (found.state, "--ipc=host" in found.cure) == ("warning", True)


def test_bounds_of_the_package_are_read_and_held() -> None:
    declared = [
        "torch<3,>=2.15", "pillow>=13.0", 'xformers>=0.0.34; extra == "gpu"', 'flowrl-toolkit[ocr]; extra == "dev"',
    ]  # fmt: skip
    required, extras = requirements(declared)
    assert required == {"torch": "<3,>=2.15", "pillow": ">=13.0"}
    assert extras == {"gpu": {"xformers": ">=0.0.34"}}
    assert unmet("torch", "<3,>=2.15", "2.15.1+cu132") == ""
    assert unmet("torch", "<3,>=2.15", "2.14.0") == "torch 2.14.0 is installed, and flowrl needs <3,>=2.15"
    assert unmet("torch", "<3,>=2.15", "3.0") != ""
    assert unmet("torch", "<3,>=2.15", None) == "torch is not installed"


def test_a_missing_library_is_a_fault_and_an_untested_one_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda package: ["not-there-at-all>=2"])
    found = version_checks()[0]
    assert (found.state, found.found) == ("fault", "not-there-at-all is not installed")
    assert found.cure == "pip install 'not-there-at-all>=2'"
    monkeypatch.setattr(metadata, "requires", lambda package: None)
    monkeypatch.setattr(machine_checks, "versions", lambda: {"torch": "2.99.0"})
    found = version_checks()[0]
    assert (found.state, "2.99.0 is installed, and" in found.found) == ("warning", True)


def test_processes_that_do_not_meet_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert processes_check("nccl", 1).state == "note"

    def ends(command: list[str], **options: object) -> subprocess.Popen[str]:
        return subprocess.Popen(["sh", "-c", "echo no route to host; exit 1"], **options)  # type: ignore[call-overload, no-any-return]

    fake = SimpleNamespace(
        Popen=ends, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT, TimeoutExpired=subprocess.TimeoutExpired
    )
    monkeypatch.setattr(machine_checks, "subprocess", fake)
    found = processes_check("gloo", 0)
    assert (found.state, "no route to host" in found.found) == ("fault", True)
    assert "GLOO_SOCKET_IFNAME" in found.cure


@pytest.mark.slow
def test_two_processes_meet(warm_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", warm_python)
    found = processes_check("gloo", 0)
    assert found.state == "ok", found


@pytest.mark.parametrize(
    ("status", "token", "state", "said"),
    [
        (None, None, "warning", "does not answer"), (401, "secret-word", "warning", "refuses the token"),
        (200, "secret-word", "ok", "the token is valid"), (401, None, "ok", "no token is set"),
    ],
)  # fmt: skip
def test_the_hub_and_the_token(
    status: int | None, token: str | None, state: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token)

    def get(page: str, *, headers: dict[str, str], timeout: float) -> SimpleNamespace:
        assert headers == ({"Authorization": f"Bearer {token}"} if token else {})
        if status is None:
            raise requests.ConnectionError
        return SimpleNamespace(status_code=status)

    monkeypatch.setattr("requests.get", get)
    found = hub_check()
    assert (found.state, said in found.found) == (state, True)
    assert "secret-word" not in found.found + found.cure
    assert hub_check(offline=True).state == "note"
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: True)
    assert "HF_HUB_OFFLINE is set" in hub_check().found


# ---- what is shown ---------------------------------------------------------------------------------------------------

LONG = Examination(
    about="This machine",
    checks=(
        Check(name="disk", state="fault", found="0.2 GiB free in " + "word " * 30, cure="make " * 30),
        Check(name="shared memory", state="ok", found="enough"),
        Check(name="hub", state="warning", found="silent"),
    ),
)


def test_lines_fit_80_columns_and_name_what_to_change_below() -> None:
    lines = as_text(LONG).splitlines()
    assert max(map(len, lines)) <= COLUMNS
    assert lines[2].startswith("  ✗ disk           0.2 GiB free")
    assert any(line.startswith(" " * 19 + "→ make make") for line in lines)
    assert as_text(LONG, "ascii").isascii()
    assert last_words(LONG.checks) == "1 fault to fix first; 1 warning."
    assert last_words(LONG.checks[1:2]) == "Nothing here would stop a run."
    assert as_data(Diagnosis(examinations=(LONG,)))["stops"] is True
    assert LONG.code == 1


def test_the_command_gives_json_and_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine_checks, "processes_check", lambda name, gpus: Check(name=name, state="ok", found="met"))
    smi(tmp_path, monkeypatch, "echo 'fifteen, NVIDIA H100'")
    assert main(["doctor", "--offline", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    states = {check["name"]: check["state"] for check in said["diagnoses"][0]["checks"]}
    assert said["stops"] is True
    assert states["driver"] == "fault"
    assert {"torch", "kernels", "attention", "versions", "extras", "disk", "gloo", "nccl", "hub"} <= states.keys()
    assert main(["doctor", "group_size=4"]) == 1
    assert "name that first" in capsys.readouterr().err
