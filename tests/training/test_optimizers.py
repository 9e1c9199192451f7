"""Rates against closed forms, steps on the host against those on the device, whole runs of each optimizer, refusals."""

from __future__ import annotations

import importlib.util
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend_gpu import pretend_gpu
from tiny_runs import TinyRuns, differences, lasting, lora, metrics, state
from torch import nn
from toy_pipeline import toy_runs

from flowrl.cli import main
from flowrl.config.sections import OptimConfig
from flowrl.config.train import load_config
from flowrl.training.optimizers import HostAdamW, check_optimizer, rate_of

LR, WARMUP, UPDATES = 0.3, 3, 11


def _progress(n: int) -> float:
    return (n - WARMUP) / (UPDATES - WARMUP)


CLOSED: dict[str, Callable[[int], float]] = {
    "constant": lambda n: LR,
    "linear": lambda n: LR * (1 - _progress(n)),
    "cosine": lambda n: LR * (1 + math.cos(math.pi * _progress(n))) / 2,
    "polynomial": lambda n: 1e-7 + (LR - 1e-7) * (1 - _progress(n)),
    "inverse_sqrt": lambda n: LR * math.sqrt(WARMUP / n),
}


@pytest.mark.parametrize("schedule", CLOSED)
def test_rates_are_closed_forms_in_any_order(schedule: str) -> None:
    rate = rate_of(OptimConfig(schedule=schedule, lr=LR, warmup=WARMUP), UPDATES)  # type: ignore[arg-type]
    for n in reversed(range(UPDATES)):
        expected = LR * n / WARMUP if n < WARMUP else CLOSED[schedule](n)
        assert rate(n) == pytest.approx(expected, rel=1e-12)
    assert 0 <= rate(UPDATES + 5) <= LR  # more updates than were planned


def test_without_a_warmup_the_first_update_has_the_highest_rate() -> None:
    for schedule in CLOSED:
        assert rate_of(OptimConfig(schedule=schedule, lr=LR), UPDATES)(0) == pytest.approx(LR)  # type: ignore[arg-type]
    assert rate_of(OptimConfig(lr=0.1 + 0.2), UPDATES)(7) == 0.1 + 0.2  # not a bit of a constant rate is lost


# ---- steps on the host -----------------------------------------------------------------------------------------------


def test_steps_on_the_host_are_those_of_a_cpu() -> None:
    """Weights on a device, moments on the host; the numbers of torch's fused AdamW, bit for bit, and no fault. Not
    fused, as in runs on a CPU, those of its default; the two differ by rounding."""
    start = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    gradients = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1))
    settings: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.01}
    plain, other, fused = (nn.Parameter(start.clone()) for _ in range(3))
    exact = nn.Parameter(start.double())
    pairs = [
        (weight, torch.optim.AdamW([weight], fused=weight is fused, **settings)) for weight in (plain, fused, exact)
    ]
    pairs.append((other, HostAdamW([other], fused=False, **settings)))
    for gradient in gradients:
        for weight, optimizer in pairs:
            weight.grad = gradient.to(weight.dtype, copy=True)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            assert weight.grad is None
    assert torch.equal(plain, other)
    for weight in (plain, fused):
        torch.testing.assert_close(weight.double(), exact, rtol=0, atol=5e-7)  # roundings of three steps
    with pretend_gpu("cuda") as findings:
        device = torch.device("cuda")
        weight = nn.Parameter(start.to(device))
        made = HostAdamW([weight], fused=True, **settings)
        for gradient in gradients:
            weight.grad = gradient.to(device)
            made.step()
            made.zero_grad()
        assert weight.device.type == "cuda"
        moments = [entry["exp_avg"] for entry in made.state.values()]
        assert [moment.device.type for moment in moments] == ["cpu"]
        found = weight.detach().cpu()
        again = HostAdamW([nn.Parameter(start.to(device))], fused=True, **settings)
        again.load_state_dict(made.state_dict())
        assert torch.equal(next(iter(again.state.values()))["exp_avg"], moments[0])
    assert not findings.faults
    assert torch.equal(found, fused.detach())


def test_fused_steps_take_the_cores_of_their_process_and_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun leaves a process one thread; odd sizes end within what threads and vector registers divide by."""
    before, found = torch.get_num_threads(), list[torch.Tensor]()
    asked: list[int] = []
    take = torch.set_num_threads

    def set_threads(number: int) -> None:
        asked.append(number)
        take(number)

    monkeypatch.setattr(torch, "set_num_threads", set_threads)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8), raising=False)
    for local in (8, 2):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
        weight = nn.Parameter(torch.linspace(-1, 1, 70_003))
        optimizer = HostAdamW([weight], fused=True, lr=0.1)
        for _ in range(2):
            weight.grad = weight.detach().sin()
            optimizer.step()
        found.append(weight.detach())
    assert asked == [1, before, 1, before, 4, before, 4, before]
    assert torch.get_num_threads() == before
    assert torch.equal(*found)


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRuns]:
    yield from toy_runs(
        tmp_path_factory.mktemp("optimizers"),
        policy={"lora_rank": 2}, updates_per_rollout=2, sampler={"kernel": "flow_sde", "num_steps": 2},
    )  # fmt: skip


def _same(a: Path, b: Path) -> None:
    assert metrics(a) == metrics(b)
    assert lora(a) == lora(b)
    assert differences(lasting(a), lasting(b)) == 0


@pytest.mark.slow
def test_a_schedule_goes_on_where_it_was(runs: TinyRuns) -> None:
    """Two updates an iteration; the log has the rate of the last. Continued, a run has the rates of its new length."""
    cosine = ("optim.schedule=cosine", "optim.warmup=1", "optim.lr=0.01")
    whole = runs.train("whole", *cosine, "num_iterations=3")
    assert [row["lr"] for row in metrics(whole)] == pytest.approx(
        [0.01 * (1 + math.cos(math.pi * (n - 1) / 5)) / 2 for n in (1, 3, 5)], rel=1e-9
    )
    shorter = runs.train("shorter", *cosine, "num_iterations=2")
    assert metrics(shorter)[1]["lr"] == pytest.approx(0.01 * (1 + math.cos(math.pi * 2 / 3)) / 2, rel=1e-9)
    assert main(["train", f"resume={shorter}", "num_iterations=3"]) == 0
    assert metrics(shorter)[2]["lr"] == metrics(whole)[2]["lr"]
    assert state(shorter)["optimizer"]["param_groups"][0]["lr"] == metrics(whole)[2]["lr"]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [
    ("optim.schedule=linear",), ("optim.offload=true",), ("optim.name=adamw_8bit", "optim.schedule=constant"),
], ids=lambda settings: settings[0])  # fmt: skip
def test_a_stopped_run_goes_on_bit_for_bit(runs: TinyRuns, settings: tuple[str, ...]) -> None:
    if "8bit" in settings[0]:
        pytest.importorskip("bitsandbytes")
    name = settings[0].replace("=", "_")
    whole = runs.train(f"{name}_whole", *settings, "num_iterations=2")
    halves = runs.train(f"{name}_halves", *settings, "num_iterations=2", "checkpoint_every=1")
    shutil.rmtree(halves / "checkpoints" / "000002")  # as if it had been stopped after one iteration
    (halves / "summary.json").unlink()
    assert main(["train", f"resume={halves}"]) == 0
    _same(halves, whole)
    if "8bit" in settings[0]:  # tensors of this model are small, and those of less than 4096 numbers stay float32
        assert {t.dtype for t in _moments(whole)} == {torch.float32}


def _moments(run: Path) -> list[torch.Tensor]:
    entries = state(run)["optimizer"]["state"].values()
    return [entry["__bnb_optimizer_quant_state__"]["state1"] for entry in entries]


@pytest.mark.slow
def test_offload_is_no_change_of_numbers_on_a_cpu_and_may_change_within_a_run(runs: TinyRuns) -> None:
    plain = runs.train("plain")
    host = runs.train("host", "optim.offload=true", "num_iterations=1")
    assert main(["train", f"resume={host}", "optim.offload=false", "num_iterations=2"]) == 0
    _same(host, plain)


@pytest.mark.slow
def test_another_optimizer_within_a_run_is_refused(runs: TinyRuns, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("bitsandbytes")
    run = runs.train("changed", "num_iterations=1")
    more = ("train", f"resume={run}", "num_iterations=2", "optim.name=adamw_8bit")
    assert main([*more]) == 1
    assert "optim.name" in capsys.readouterr().err
    assert main([*more, "resume_changed=true"]) == 1
    assert "its moments are those of adamw: optim.name" in capsys.readouterr().err
    assert len(metrics(run)) == 1


def test_moments_in_8_bits_move_large_weights_as_adamw_does() -> None:
    """Weights of 4096 numbers or more; steps differ by the rounding of the moments, some percent of a step."""
    optim = pytest.importorskip("bitsandbytes").optim
    start = torch.randn(80, 64, generator=torch.Generator().manual_seed(0))
    a, b = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    exact, rounded = torch.optim.AdamW([a], lr=0.01, weight_decay=0.0), optim.AdamW8bit([b], lr=0.01, weight_decay=0.0)
    for number in range(5):
        gradient = torch.randn(80, 64, generator=torch.Generator().manual_seed(number + 1))
        a.grad, b.grad = gradient.clone(), gradient.clone()
        exact.step()
        rounded.step()
    assert rounded.state[b]["state1"].dtype == torch.uint8
    moved, error = (a - start).detach(), (a - b).detach()
    assert 0 < float(error.norm() / moved.norm()) < 0.05


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_settings_that_cannot_work_are_refused(
    runs: TinyRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(runs.config)
    check_optimizer(config, "cpu")
    for changes, kind, message in (
        ({"warmup": 4}, None, r"warmup \(4\) must be below the updates of the run \(4"),
        ({"schedule": "polynomial", "lr": 1e-8}, None, r"falls to 1e-7.*take linear"),
        ({"name": "paged_adamw"}, "cpu", r"pages its moments, which CUDA alone does.*adamw_8bit or adamw"),
        ({"name": "paged_adamw_8bit"}, "mps", r"CUDA alone does.*optim.name=adamw$"),
        ({"name": "adamw_8bit"}, "mps", r"runs on CUDA and CPU devices.*mps"),
    ):
        wrong = replace(config, optim=replace(config.optim, **changes))
        with pytest.raises(ValueError, match=message):
            check_optimizer(wrong, kind)
    check_optimizer(replace(config, optim=replace(config.optim, name="paged_adamw")))  # planned for another machine
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["train", str(runs.config), "optim.name=adamw_8bit"]) == 1
    assert "pip install -e '.[quantize]'" in capsys.readouterr().err
