"""What tiny configurations set, on a pretend GPU: nothing mixes devices, and a micro-batch waits for it twice at most.

On the toy pipeline where it is of the toy's family, on the embedded model where it has a family or rewards of its own.
Settings that do not exclude each other share a run; each family trains once, by one recipe or the other.
`python tests/trials/pretend_gpu_runs.py` takes each configuration by itself through the embedded models.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from pretend_gpu import Pretended, pretend_gpu
from pretend_runs import OTHERS, differences, said, toy_run, watched_run, with_rewards_of

from flowrl.config.base import config_files, find_config
from flowrl.config.train import load_config

UNWRITTEN = "tiny_sd3_full"
"""Ships whole weights, which stock code writes by their storage: a pretended tensor has none."""
TINY = sorted({name for name in config_files() if name.startswith("tiny_")} - {UNWRITTEN})
WITH: dict[str, tuple[str, ...]] = {
    "tiny_cps": ("tiny_real",),
    "tiny_dcpo": ("tiny_gdpo",),
    "tiny_grpo_48px": ("tiny_a_grae", "tiny_fg_expo"),
    "tiny_ngrpo": ("tiny_best_of_n",),
    "tiny_prompt_replay": ("tiny_dapo", "tiny_dr_grpo"),
    "tiny_tp_grpo": ("tiny_paco",),
    "tiny_unigrpo": ("tiny_adversarial_style",),
}
"""Configurations whose settings, but for their rewards, are taken into the run of another one."""
WITHIN = {
    "tiny_autorubric": "tiny_grpo_geneval",
    "tiny_branch_grpo": "tiny_branch_grpo_pruned",
    "tiny_dance_grpo": "tiny_balanced",
    "tiny_flow_grpo": "tiny_flow_grpo_fast",
    "tiny_mixgrpo": "tiny_mixgrpo_flash",
    "tiny_nft_reused": "tiny_recommended",
    "tiny_opd": "tiny_opd_off_policy",
    "tiny_summed": "tiny_routes",
    "tiny_votes": "tiny_grpo_geneval",
}
"""Configurations that, but for their rewards, set nothing that another one does not set too."""
FAMILIES = {
    "tiny_kontext_recommended": "tiny_edit_r1",
    "tiny_sd15_recommended": "tiny_sd15_grpo",
    "tiny_wan_grpo": "tiny_wan_recommended",
}
"""Configurations whose recipe is trained on the toy pipeline, and whose family by another one."""
REWARDS: dict[str, tuple[str, ...]] = {
    "tiny_edit_r1": ("tiny_kontext_grpo",),
    "tiny_pairwise": ("tiny_adversarial_fixed", "tiny_pointwise_noisy", "tiny_pref_grpo_flex"),
}
"""Configurations that set rewards alone, which the run of another one asks too."""
ALONE = sorted({*TINY} - {*OTHERS, *WITHIN, *sum(WITH.values(), ())})
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
@pytest.mark.parametrize("name", ALONE)
def test_no_configuration_mixes_devices_or_waits(name: str, tmp_path: Path) -> None:
    watched = toy_run(name, tmp_path, "cuda", *WITH.get(name, ()))
    assert not watched.findings.faults, said(name, watched)
    assert max(watched.waits, default=0) <= MOST_WAITS, watched.places
    assert name not in STAGES or dict(watched.stages) == STAGES[name], Counter(watched.findings.waits)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_MPS)
def test_nothing_is_float64_where_there_is_none(name: str, tmp_path: Path) -> None:
    watched = toy_run(name, tmp_path, "mps")
    assert not watched.findings.faults, said(name, watched)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OTHERS if name not in {*FAMILIES, *sum(REWARDS.values(), ())}])
def test_other_families_and_rewards(name: str, tmp_path: Path) -> None:
    more = OTHERS[name]
    if name in REWARDS:
        more += (with_rewards_of(name, *REWARDS[name]),)
    if name == "tiny_pairwise":
        more += ("rewards.2.options.pretrain_steps=1",)  # those of the first one that it shares its run with
    watched = watched_run(name, tmp_path, "cuda", *more)
    assert not watched.findings.faults, said(name, watched)
    assert max(watched.waits, default=0) <= MOST_WAITS, watched.places


def test_what_has_no_run_of_its_own_is_set_by_another() -> None:
    for name, other in WITHIN.items():
        covered, of_other = differences(name), differences(other)
        assert all(key in of_other and of_other[key] == value for key, value in covered.items()), (name, other)
    for name, other in FAMILIES.items():
        assert len({load_config(find_config(one)).pipeline.name for one in (name, other)}) == 1


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
