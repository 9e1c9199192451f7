"""The machine: driver, products, compiler, kernels; what makes all other checks worth reading."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from gpu_place import Figures, Place
from torch.nn import functional as F

from flowrl.health.machine_checks import (
    disk_check,
    driver_check,
    kernel_check,
    processes_check,
    shared_memory_check,
    version_checks,
)
from flowrl.runs.run_folder import RUNS
from flowrl.runtime.gpus import gpu_facts


def check_driver(place: Place, figures: Figures) -> None:
    """The driver is new enough for the CUDA that torch was built for."""
    found = driver_check(gpu_facts())
    figures |= {"state": found.state, "found": found.found}
    assert found.state != "fault", f"{found.found}: {found.cure}"
    assert not place.on_card or found.state == "ok"


def check_product_on_each_card(place: Place, figures: Figures) -> None:
    """Torch has kernels for every card, and a product of two small matrices comes back from each."""
    facts = gpu_facts()
    found = kernel_check(facts)
    figures |= {"cards": len(facts.names), "compiled for": ",".join(facts.compiled), "found": found.found}
    assert found.state == "ok", f"{found.found}: {found.cure}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def check_product_dtypes(place: Place, figures: Figures, dtype: torch.dtype) -> None:
    """A product is right in every dtype that runs take, and float32 is not TF32 unless it is asked for."""
    size = place.pick(1024, 192)
    a, b = (torch.randn(size, size, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    found = (a.to(place.device, dtype) @ b.to(place.device, dtype)).cpu().double()
    exact = a.to(dtype).double() @ b.to(dtype).double()
    figures["off"] = off = float((found - exact).abs().max() / exact.std())
    assert off < {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-4}[dtype]


def check_compiler(place: Place, figures: Figures) -> None:
    """A C compiler is there, which Triton needs for its first kernel."""
    found = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    figures["compiler"] = found or "none"
    if found is None and not place.on_card:
        pytest.skip("no C compiler here, which a run on a CPU does not need")
    assert found is not None, "Triton finds no C compiler at its first kernel: install gcc (Debian: apt install gcc)"


@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
def check_default_attention(place: Place, figures: Figures, masked: bool) -> None:
    """Which kernel torch's own choice is, what `native` means here."""
    shape = (2, 4, 128, 64)
    query, key, value = (torch.ones(shape, device=place.device, dtype=place.dtype) for _ in range(3))
    mask = torch.ones(2, 1, 1, 128, dtype=torch.bool, device=place.device) if masked else None
    choice = int(torch._fused_sdp_choice(query, key, value, attn_mask=mask))
    known: Any = torch.nn.attention.SDPBackend
    names = {int(kernel): name for name, kernel in known.__members__.items()}
    figures["native is"] = names.get(choice, str(choice))
    assert choice >= 0
    answer = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    assert torch.equal(answer, torch.ones_like(answer))  # of equal values


def check_doctor(place: Place, figures: Figures) -> None:
    """There is room for files and shared memory, and processes find each other. Versions are figures: a kit lacks some
    packages, and what needs one says so itself."""
    needed = (disk_check(RUNS), shared_memory_check(), processes_check("gloo", 1))
    figures |= {one.name: one.state for one in needed}
    figures |= {one.name: f"{one.state}: {one.found}" for one in version_checks()}
    assert not (faults := [f"{one.name}: {one.found}" for one in needed if one.state == "fault"]), faults


def check_card_is_free(place: Place, figures: Figures) -> None:
    """Nobody else has memory of the card, so that speed and peaks are this suite's own."""
    place.needs_card("free memory of a card")
    free, whole = torch.cuda.mem_get_info(place.device)
    figures |= {"free GiB": free / 2**30, "whole GiB": whole / 2**30}
    assert free > 0.9 * whole, "another process holds memory of this card: see nvidia-smi"
