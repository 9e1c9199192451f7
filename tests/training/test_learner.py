"""Parts of a learner: gradients added up, means that do not wait, float16's loss scale, updates left out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from counted_operations import CountedOperations
from pretend_gpu import pretend_gpu
from tiny_runs import differences, metrics, state
from toy_pipeline import QuickRun, write_toy

from flowrl.cli import main
from flowrl.pipelines import PIPELINES
from flowrl.training import learner
from flowrl.training.learner import GradientSum, Statistics


def test_means_are_those_of_live_rows_and_wait_once(tmp_path: Path) -> None:
    with pretend_gpu("cuda") as findings:
        stats, run = Statistics("kl"), QuickRun(tmp_path)
        keep = torch.tensor([True, False, True])
        for shift in (0.0, 10.0):
            values = torch.tensor([1.0, 100.0, 3.0]).to("cuda", non_blocking=True) + shift
            stats.mean(keep, loss=values, kl=values > 5)
            stats.largest(keep, deviation=values)
        assert not findings.waits
        row = stats.row(run)  # type: ignore[arg-type]
        assert len(findings.waits) == 2  # numbers, and truth values
    assert row == {"loss": 7.0, "kl": 0.5, "deviation": 13.0}
    with pytest.raises(KeyError, match="no mean was announced of margin"):
        stats.mean(None, margin=torch.ones(2))


def _sum_of(parameters: list[torch.Tensor], *, scale_loss: bool) -> GradientSum:
    named = {str(number): parameter for number, parameter in enumerate(parameters)}
    policy = SimpleNamespace(parameters=named, trained=parameters, split=None, sum_dtype=lambda device: torch.float64)
    return GradientSum(policy, {}, scale_loss=scale_loss)  # type: ignore[arg-type]


@pytest.mark.parametrize("scale_loss", [False, True])
@pytest.mark.parametrize("used", [19, 18])
def test_gradients_are_added_exactly_and_in_few_operations(scale_loss: bool, used: int) -> None:
    """Two, however many tensors; a sum of two dtypes in `_foreach_add_` is a launch each on CUDA, for a rare case."""
    parameters = [torch.zeros(3, size, requires_grad=True) for size in range(1, 20)]
    given = [[torch.randn(3, size) for size in range(1, used + 1)] for _ in range(3)]
    total = _sum_of(parameters, scale_loss=scale_loss)
    for gradients in given:
        loss = torch.stack([(p * g).sum() for p, g in zip(parameters, gradients, strict=False)]).sum()
        with CountedOperations() as alone:
            torch.autograd.grad(loss * 2 if scale_loss else loss, parameters, allow_unused=True, retain_graph=True)
        with CountedOperations() as asked:
            total.add(loss)
        assert asked.counts - alone.counts == ({"cat": 1, "add_": 1} if used == 19 else {"_foreach_add_": 1})
    for place, found in enumerate(total.total):
        own = [gradients[place].double().numpy() for gradients in given if place < len(gradients)]
        expected = own[0] + own[1] + own[2] if own else 0.0 * found.numpy()
        assert (found.numpy() == expected).all()


def test_rows_cost_no_operation_before_they_are_read() -> None:
    stats, values, keep = Statistics("kl"), torch.arange(4.0), torch.tensor([True, False, True, True])
    with CountedOperations() as asked:
        stats.mean(keep, loss=values, kl=values)
        stats.largest(keep, deviation=values)
    assert not asked.counts - Counter(detach=3)


# ---- float16 ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(PIPELINES, "sd3", "toy_pipeline")
    half = {"name": "sd3", "model": "toy", "dtype": "float16", "device": "cpu"}
    return write_toy(tmp_path, num_iterations=4, pipeline=half, policy={"lora_rank": 2, "ema_decay": 0.9})


def _overflow_at(update: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants an infinite gradient on one process in one update, counted from 0."""
    seen, add = list[GradientSum](), GradientSum.add

    def planted(self: GradientSum, loss: torch.Tensor) -> None:
        add(self, loss)
        if self not in seen:
            seen.append(self)
        if len(seen) == update + 1:
            self.total[0][0, 0] = torch.inf

    monkeypatch.setattr(GradientSum, "add", planted)


def _moving(run: Path, done: int) -> dict[str, Any]:
    """What an update moves, after so many iterations."""
    found = state(run, done)
    return {
        "updates": found["counters"]["updates"], "policy": found["policy"], "slots": found["slots"],
        "optimizer": found["optimizer"]["state"],
    }  # fmt: skip


NFT = ("recipe=forward", "sampler.kernel=ode", "times.count=3", "objective.name=nft")


@pytest.mark.parametrize("settings", [(), NFT], ids=["grpo", "nft"])
def test_an_update_that_overflows_moves_nothing(
    toy: Path, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...]
) -> None:
    _overflow_at(1, monkeypatch)
    run = toy.parent / "run"
    assert main(["train", str(toy), f"out={run}", *settings]) == 0
    assert differences(_moving(run, 1), _moving(run, 2)) == 0
    assert differences(_moving(run, 2), _moving(run, 3)) > 0
    assert [row["loss_scale"] for row in metrics(run)] == [2.0**14, 2.0**13, 2.0**13, 2.0**13]
    assert ["grad_norm" in row for row in metrics(run)] == [True, False, True, True]


def test_the_loss_scale_rises_again_also_after_a_resume(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "_SCALE_RISES_AFTER", 2)
    _overflow_at(0, monkeypatch)
    run = toy.parent / "run"
    assert main(["train", str(toy), f"out={run}", "num_iterations=2"]) == 0
    assert main(["train", f"resume={run}", "num_iterations=5"]) == 0
    assert [row["loss_scale"] for row in metrics(run)] == [2.0**13, 2.0**13, 2.0**14, 2.0**14, 2.0**15]
