"""Every tiny configuration on a pretend GPU: nothing mixes devices, a micro-batch waits for its device twice at most.

On the toy pipeline where it is of the toy's family, on the embedded model where it has a family or rewards of its own.
`python tests/trials/pretend_gpu_runs.py` takes all of them through the embedded models.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from pretend_gpu import Pretended, pretend_gpu
from pretend_runs import OTHERS, said, toy_run, watched_run

from flowrl.config.base import config_files

UNWRITTEN = "tiny_sd3_full"
"""Ships whole weights, which stock code writes by their storage: a pretended tensor has none."""
TINY = sorted({name for name in config_files() if name.startswith("tiny_")} - {UNWRITTEN})
ON_MPS = ("tiny_dance_grpo", "tiny_dgpo", "tiny_dhpo", "tiny_dpo", "tiny_nft", "tiny_opd", "tiny_refl")
"""One configuration for each kind of arithmetic, so that float64 on the device is found."""
MOST_WAITS = 2  # for the device, of a micro-batch
STAGES = {
    "tiny_grpo_geneval": {"": 2, "reward": 5, "update": 6},
    "tiny_g2rpo": {"": 3, "reward": 5, "update": 6},
    "tiny_nft": {"": 6, "reward": 5, "update": 3},
    "tiny_dpo": {"": 7, "reward": 5, "update": 3},
    "tiny_draft": {"reward": 4, "update": 4},
}
"""Waits of an iteration by stage, however many micro-batches it has: no rollout waits."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TINY if name not in OTHERS])
def test_no_configuration_mixes_devices_or_waits(name: str, tmp_path: Path) -> None:
    watched = toy_run(name, tmp_path, "cuda")
    assert not watched.findings.faults, said(name, watched)
    assert max(watched.waits, default=0) <= MOST_WAITS, watched.places
    assert name not in STAGES or dict(watched.stages) == STAGES[name], Counter(watched.findings.waits)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_MPS)
def test_nothing_is_float64_where_there_is_none(name: str, tmp_path: Path) -> None:
    watched = toy_run(name, tmp_path, "mps")
    assert not watched.findings.faults, said(name, watched)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_families_and_rewards(name: str, tmp_path: Path) -> None:
    watched = watched_run(name, tmp_path, "cuda", *OTHERS[name])
    assert not watched.findings.faults, said(name, watched)
    assert max(watched.waits, default=0) <= MOST_WAITS, watched.places


# ---- the pretence itself ---------------------------------------------------------------------------------------------


def test_mixed_devices_are_found() -> None:
    with pretend_gpu("cuda") as findings:
        x = torch.ones(3, device="cuda")
        assert isinstance(x, Pretended)
        assert x.device == torch.device("cuda:0")
        assert float(x.cpu().sum()) == 3
        _ = x * 2 + torch.tensor(1.0)  # a number of the host may take part
        assert not findings.faults
        _ = x + torch.ones(3)
        torch.zeros(3).index_fill_(0, torch.zeros(1, dtype=torch.long, device="cuda"), 1.0)
    assert len(findings.faults) == 2


def test_the_backward_pass_is_judged() -> None:
    with pretend_gpu("cuda") as findings:
        x = torch.arange(4.0).to("cuda").requires_grad_(True)
        first = (x * x).chunk(2)[0]  # the other half has a gradient of zeros, which the library makes
        (gradient,) = torch.autograd.grad(first.sum(), [x])
        assert isinstance(gradient, Pretended)
        assert gradient.tolist() == [0.0, 2.0, 0.0, 0.0]
    assert not findings.faults


def test_waits_are_counted() -> None:
    with pretend_gpu("cuda") as findings:
        x = torch.arange(4.0).to("cuda", non_blocking=True)
        assert not findings.waits
        for wait in (lambda: x.sum().item(), lambda: x[x > 1], lambda: x.cpu(), lambda: torch.ones(2).to("cuda")):
            before = len(findings.waits)
            wait()
            assert len(findings.waits) > before
        before = len(findings.waits)
        _ = x[torch.tensor([0, 2])]  # an index of the host travels first
        assert len(findings.waits) == before + 1


@pytest.mark.parametrize(("kind", "faults"), [("cuda", 0), ("mps", 1)])
def test_float64_is_a_fault_on_mps_alone(kind: str, faults: int) -> None:
    with pretend_gpu(kind) as findings:  # type: ignore[arg-type]
        torch.ones(2).to(kind).double()
    assert len(findings.faults) == faults
