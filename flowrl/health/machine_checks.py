"""Checks this machine: libraries, disk, shared memory, processes that reach each other, the hub, driver and kernels."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import torch

from flowrl.health.diagnosis import Check, Examination
from flowrl.pipelines.arithmetic.attention_words import Known, choose, usable
from flowrl.pipelines.places.hub_files import TIMEOUT
from flowrl.runs.run_folder import RUNS
from flowrl.runtime.capabilities import this_machine
from flowrl.runtime.failures import explain
from flowrl.runtime.files import free_bytes, nearest_folder
from flowrl.runtime.gpus import GpuFacts, driver_fault, gpu_facts
from flowrl.runtime.versions import numbers, untested, version_of, versions
from flowrl.training.processes.devices import device_kind

PACKAGE = "flowrl-toolkit"
GIB = 2**30
NO_ROOM, LITTLE_ROOM = 1.0, 20.0  # GiB: not even samples and a LoRA's checkpoints fit; a model's download does not
SHARED = 1.0  # GiB of shared memory; containers have 64 MiB unless told otherwise
_TRIED = 2**20  # bytes that are written to see whether a disk takes them
_PROBE_SECONDS = 120.0

_ENTRY = re.compile(
    r"""(?P<name>[\w.-]+)(\[[^\]]*\])?\s*(?P<bounds>[^;]*)(;.*?extra\s*==\s*['"](?P<extra>[\w-]+)['"])?"""
)


def diagnose_machine(*, offline: bool) -> Examination:
    """All checks of this machine; `offline` does not ask the hub."""
    facts = gpu_facts()
    cuda = "a CPU build" if facts.build is None else f"built for CUDA {facts.build}"
    checks: tuple[Check, ...] = (
        driver_check(facts),
        Check("torch", "ok", f"{torch.__version__}, {cuda}"),
        kernel_check(facts),
        attention_check(),
        *version_checks(),
        disk_check(RUNS),
        shared_memory_check(),
        processes_check("gloo", len(facts.names)),
        processes_check("nccl", len(facts.names)),
        hub_check(offline=offline),
    )
    return Examination(about=f"This machine ({platform.node()}, Python {platform.python_version()})", checks=checks)


def version_checks() -> list[Check]:
    """Compares libraries with the bounds of the package's metadata, and with the tested versions."""
    try:
        declared = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:  # a checkout that is run without being installed
        declared = []
    required, extras = requirements(declared)
    installed = {name: version_of(name) for name in required}
    wrong = {name: text for name, bounds in required.items() if (text := unmet(name, bounds, installed[name]))}
    if wrong:
        cure = f"pip install {' '.join(repr(name + required[name]) for name in wrong)}"
        found = Check("versions", "fault", "; ".join(wrong.values()), cure)
        return [found, *_extra_checks(extras)]
    tested = versions()
    shown = ", ".join(f"{name.removesuffix('-toolkit')} {number or 'not installed'}" for name, number in tested.items())
    if odd := untested(tested):
        return [
            Check(
                "versions",
                "warning",
                "; ".join(odd.values()),
                "numbers may differ: install tested versions where they matter (docs/versions.md)",
            ),
            *_extra_checks(extras),
        ]
    return [Check("versions", "ok", f"{shown}: all tested"), *_extra_checks(extras)]


def requirements(declared: Sequence[str]) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Bounds by package, `{"torch": ">=2.15,<3"}`, of what is always needed, and the same of every extra."""
    required, extras = dict[str, str](), dict[str, dict[str, str]]()
    for text in declared:
        found = _ENTRY.match(text)
        if found is None:
            continue
        into = required if found["extra"] is None else extras.setdefault(found["extra"], {})
        into[found["name"]] = found["bounds"].strip().strip("()").replace(" ", "")
    return required, {name: packages for name, packages in extras.items() if name != "dev"}


def unmet(name: str, bounds: str, installed: str | None) -> str:
    """Why an installed version does not meet bounds such as ">=2.15,<3"; empty if it does."""
    if installed is None:
        return f"{name} is not installed"
    own = numbers(installed)
    for bound in filter(None, bounds.split(",")):
        least, limit = bound.startswith(">="), numbers(bound.lstrip("<>=!~"))
        if (least and own < limit) or (bound.startswith("<") and own >= limit):
            return f"{name} {installed} is installed, and flowrl needs {bounds}"
    return ""


def _extra_checks(extras: Mapping[str, Mapping[str, str]]) -> list[Check]:
    there, lacking = list[str](), list[str]()
    for extra, packages in extras.items():
        missing = [name for name, bounds in packages.items() if unmet(name, bounds, version_of(name))]
        if missing:
            lacking.append(f"{extra} ({', '.join(missing)})")
        else:
            there.append(extra)
    if not lacking:
        return [Check("extras", "ok", ", ".join(there) or "none are known: flowrl is not installed")]
    found = f"{', '.join(there) or 'none'} installed; without {', '.join(lacking)}"
    return [Check("extras", "note", found, "if you need one: in flowrl's folder, pip install -e '.[EXTRA]'")]


def disk_check(folder: Path, *, name: str = "disk") -> Check:
    """Free space for runs, and whether a file can be written there."""
    place, free = nearest_folder(folder), free_bytes(folder) / GIB
    cure = "make room there, or write runs elsewhere with out=FOLDER"
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".flowrl-doctor-") as stream:
            stream.write(b"\0" * _TRIED)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        return Check(name, "fault", f"nothing can be written into {place}: {explain(error)}", cure)
    found = f"{free:.1f} GiB free in {place}"
    if free < NO_ROOM:
        cure += ", or keep fewer checkpoints (keep_checkpoints)"
        return Check(name, "fault", f"{found}, too little for the checkpoints of a run", cure)
    if free < LITTLE_ROOM:
        return Check(
            name, "warning", found, "enough for a LoRA, not for downloading a large model: HF_HOME moves the cache"
        )
    return Check(name, "ok", found)


def shared_memory_check(place: Path = Path("/dev/shm")) -> Check:
    """Shared memory, through which the GPUs and processes of a machine exchange data."""
    if not place.is_dir():
        return Check("shared memory", "note", f"there is no {place}; one process needs none")
    free = free_bytes(place) / GIB
    if free < SHARED:
        return Check(
            "shared memory",
            "warning",
            f"{free:.2f} GiB at {place}: several processes may end with a bus error",
            "start the container with --ipc=host, or with --shm-size=8g",
        )
    return Check("shared memory", "ok", f"{free:.1f} GiB at {place}")


def processes_check(backend: str, gpus: int) -> Check:
    """Starts two processes that add numbers over "gloo" or "nccl" of torch.distributed; NCCL needs a GPU for each."""
    if backend == "nccl" and gpus < 2:
        return Check(backend, "note", "not tried: it needs two GPUs in this machine")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="flowrl-doctor-") as folder:
        command = [sys.executable, "-m", "flowrl.health.process_probe", backend, f"{folder}/meet"]
        started = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for rank in range(2)
        ]
        said, late = list[str](), False
        for one in started:
            try:
                said.append(one.communicate(timeout=max(0.1, begun + _PROBE_SECONDS - time.monotonic()))[0])
            except subprocess.TimeoutExpired:
                late = True
                one.kill()
                said.append(one.communicate()[0])
    if not late and all(one.returncode == 0 for one in started):
        milliseconds = float(said[0].split()[-1])
        return Check(backend, "ok", f"two processes reach each other, {milliseconds:.2g} ms an exchange")
    last = "" if late else next((line for text in said for line in reversed(text.splitlines()) if line.strip()), "")
    variable = "GLOO_SOCKET_IFNAME" if backend == "gloo" else "NCCL_SOCKET_IFNAME"
    return Check(
        backend,
        "fault",
        f"two processes do not reach each other: {last or f'no answer in {_PROBE_SECONDS:g} s'}",
        f"one process trains anyway; for several set {variable} to the network interface they share (ip "
        f"addr lists them){', and see NCCL_DEBUG=INFO' if backend == 'nccl' else ''}",
    )


def hub_check(*, offline: bool = False) -> Check:
    """Checks access to the hub as a run needs it; asks nothing if `offline`."""
    from huggingface_hub import constants, get_token

    place = constants.ENDPOINT
    token = get_token()
    said = "a token is set" if token else "no token is set: gated models (FLUX, SD3.5) need HF_TOKEN"
    cached = f"models come from folders and the cache, {constants.HF_HUB_CACHE}"
    if constants.is_offline_mode():
        return Check(
            "hub",
            "note",
            f"HF_HUB_OFFLINE is set, so {cached}",
            "unset HF_HUB_OFFLINE before you download something",
        )
    if offline:
        return Check("hub", "note", f"not asked (`offline`); {said}")
    import requests

    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:  # the page that names the owner of a token
        status = requests.get(f"{place}/api/whoami-v2", headers=headers, timeout=TIMEOUT).status_code
    except requests.RequestException:
        return Check(
            "hub",
            "warning",
            f"{place} does not answer within {TIMEOUT:g} s: {cached}",
            "set HF_ENDPOINT to a mirror that you reach, or HTTPS_PROXY; without a network set "
            "HF_HUB_OFFLINE=1, so nothing waits for it",
        )
    if token and status in (401, 403):
        return Check(
            "hub",
            "warning",
            f"{place} answers, and refuses the token ({status})",
            "set HF_TOKEN to one that is valid (https://huggingface.co/settings/tokens)",
        )
    return Check("hub", "ok", f"{place} answers; {'the token is valid' if token and status == 200 else said}")


def driver_check(facts: GpuFacts) -> Check:
    """Whether there is a driver that answers and is new enough for torch's CUDA."""
    if facts.driver is None and not facts.names:
        return Check("driver", "note", "no NVIDIA driver here: runs use the CPU, enough for the embedded models")
    if (fault := driver_fault(facts)) is not None:
        return Check("driver", "fault", *fault)
    shown = f"{facts.driver or 'unknown'}, for torch's CUDA {facts.build}; {len(facts.names)} x {facts.names[0]}"
    return Check("driver", "ok", shown)


def kernel_check(facts: GpuFacts) -> Check:
    """Whether torch was compiled for each GPU, and computes on it."""
    name = "kernels"
    if not facts.names:
        return Check(name, "ok", "torch's CPU kernels")
    for gpu, capability in zip(facts.names, facts.capabilities, strict=True):
        if facts.compiled and not has_kernels(capability, facts.compiled):
            own = ".".join(map(str, capability))
            return Check(
                name,
                "fault",
                f"torch {facts.torch} has no kernels for {gpu} (compute capability {own}): it was built for "
                f"{', '.join(facts.compiled)}",
                f"install a build of torch that lists sm_{capability[0]}{capability[1]}, usually the one for the "
                "newest CUDA: https://pytorch.org/get-started",
            )
    if facts.refused:
        return Check(
            name,
            "fault",
            f"a product of two small matrices failed on the GPU: {facts.refused}",
            "see with nvidia-smi whether another process holds the GPU or its memory, then restart the machine",
        )
    shown = ", ".join(sorted({".".join(map(str, capability)) for capability in facts.capabilities}))
    return Check(name, "ok", f"torch has kernels for compute capability {shown}, and they answer")


def has_kernels(capability: tuple[int, int], compiled: Sequence[str]) -> bool:
    """Whether code runs on a GPU: binaries of its major version up to its minor one, or PTX of any older one."""
    for word in compiled:
        if (found := re.match(r"(sm|compute)_(\d+)(\d)", word)) is None:
            continue
        of = int(found[2]), int(found[3])
        if (found[1] == "compute" and of <= capability) or (of[0] == capability[0] and of[1] <= capability[1]):
            return True
    return False


def attention_check() -> Check:
    """Which kernels of attention this machine has, in the precision that GPUs train in."""
    kind = device_kind("auto")
    machine, dtype = this_machine(kind), torch.float32 if kind == "cpu" else torch.bfloat16
    words = usable(machine, dtype, Known())
    auto = choose("auto", machine, dtype, Known())
    faults = "; ".join(f"{package} is {why}" for package, why in machine.faults.items())
    return Check(
        "attention",
        "ok",
        f"pipeline.attention=auto is {auto}; usable: {', '.join(words)}{f' ({faults})' if faults else ''}",
    )
