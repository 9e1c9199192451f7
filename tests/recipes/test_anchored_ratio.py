"""The ratio of an iteration's first update is 1 by construction, whatever computes the update, and it is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import TinyRuns, metrics, tiny_runs
from torch import Tensor
from torch.nn import functional as F
from toy_pipeline import toy_runs

from flowrl.objectives.policy_gradient import Scored
from flowrl.runs.vital_signs import ALIKE, FAULT
from flowrl.samplers import Transition
from flowrl.training.learner import GradientSum
from flowrl.training.record import Recording

pytestmark = pytest.mark.usefixtures("numbers_alone")

ONE = ("num_iterations=1", "checkpoint_every=9")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_sd3_folder: Path) -> TinyRuns:
    return tiny_runs(tmp_path_factory.mktemp("anchored"), tiny_sd3_folder)


@pytest.fixture
def toys(tmp_path: Path) -> Iterator[TinyRuns]:
    """Of the toy, for what is not about a network of attention."""
    yield from toy_runs(tmp_path)


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The gradient of every update, flat."""
    seen, apply = list[Tensor](), GradientSum.apply

    def record(self: GradientSum, *arguments: Any) -> Tensor | None:
        seen.append(torch.cat([total.flatten() for total in self.total]))
        return apply(self, *arguments)

    monkeypatch.setattr(GradientSum, "apply", record)
    return seen


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def foreign_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention in bfloat16 wherever a graph is built, which is in the update alone."""
    exact: Callable[..., Tensor] = F.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return exact(query, key, value, *args, **kwargs)
        coarse = (x.to(torch.bfloat16) for x in (query, key, value))
        return exact(*coarse, *args, **kwargs).to(value.dtype)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)


def shift(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """The update's means are off by a share of the standard deviation, in every dimension."""
    replay = Recording.replay

    def shifted(self: Recording, *arguments: Any) -> Transition:
        found = replay(self, *arguments)
        moved: Transition = type(found)(mean=found.mean + share * found.std, std=found.std)
        return moved

    monkeypatch.setattr(Recording, "replay", shifted)


def test_anchored_rows_have_ratio_one_and_the_gradient_of_the_log_density() -> None:
    log_prob = torch.tensor([0.3, -0.2], requires_grad=True)
    mean = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ones = torch.ones(2)
    scored = Scored(
        log_ratio=log_prob * 2,
        advantage=ones,
        clip_low=ones,
        clip_high=ones,
        new=Transition(mean=mean, std=ones),
        old_mean=torch.zeros(2, 3),
        produced=torch.zeros(2, 3),
        step_size=0.1,
        sensitivity=1.0,
    )
    found = scored.anchored()
    assert found.log_ratio.tolist() == [0.0, 0.0]
    assert torch.autograd.grad(found.log_ratio.exp().sum(), log_prob)[0].tolist() == [2.0, 2.0]
    assert found.old_mean is not None
    assert torch.equal(found.old_mean, mean)
    assert not found.old_mean.requires_grad


@pytest.mark.parametrize("objective", ["clip", "guard"])
def test_another_kernel_in_the_update_trains_and_is_told(
    runs: TinyRuns, gradients: list[Tensor], monkeypatch: pytest.MonkeyPatch, objective: str
) -> None:
    how = (*ONE, f"objective.name={objective}", "updates_per_rollout=2", "optim.lr=0.001")
    runs.train(f"one-{objective}", *how)
    foreign_attention(monkeypatch)
    row = metrics(runs.train(f"two-{objective}", *how))[0]
    assert 0 < row["ratio_first_deviation"] < ALIKE
    assert "warnings" not in row
    for wanted, found in zip(gradients[:2], gradients[2:], strict=True):
        assert 0 < off(found, wanted) < 0.01


def test_weights_that_do_not_move_keep_every_ratio_at_one(runs: TinyRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another kernel and other batches than the rollout's: the second update's old log-densities are of its own."""
    foreign_attention(monkeypatch)
    sizes = ("micro_batch_size=2", "rollout_batch_size=4", "updates_per_rollout=2", "optim.lr=1e-30")
    row = metrics(runs.train("resting", *ONE, *sizes))[0]
    assert 0 < row["ratio_first_deviation"] < ALIKE
    assert row["ratio_max_deviation"] == 0
    assert row["ratio_mean"] == 1


def test_one_update_is_not_scored_twice_whatever_its_batches(toys: TinyRuns) -> None:
    whole = metrics(toys.train("whole", *ONE))[0]
    parts = metrics(toys.train("parts", *ONE, "micro_batch_size=2", "rollout_batch_size=4"))[0]
    assert parts["nfe/update"] == whole["nfe/update"]


@pytest.mark.parametrize(("share", "warns"), [(0.002, False), (0.1, True)])
def test_what_differs_by_more_than_rounding_is_warned_of(
    toys: TinyRuns, monkeypatch: pytest.MonkeyPatch, share: float, warns: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """|log p(x; m + s std) - log p(x; m)| / D = |s mean(z) - s^2 / 2|, with z of mean about 0."""
    shift(monkeypatch, share)
    row = metrics(toys.train(f"shifted-{share}", *ONE))[0]
    assert ("ratio_deviation" in row.get("warnings", {})) == warns
    assert ("pipeline.attention" in capsys.readouterr().err) == warns
    assert row["ratio_mean"] == 1


def test_another_policy_in_the_update_ends_the_run(
    toys: TinyRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shift(monkeypatch, 1.0)
    with pytest.raises(AssertionError):
        toys.train("fault", *ONE)
    said = " ".join(capsys.readouterr().err.split())
    assert f"rounding gives less than {FAULT:g}" in said
    assert "do not compute the same policy" in said
    assert "pipeline.attention" in said
