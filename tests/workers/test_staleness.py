"""Rollouts that older weights drew: what is in flight comes back, and what it counts. Workers live in this process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kept_workers import Inside
from tiny_runs import TinyRuns, differences, lasting, lora, metrics, state
from toy_pipeline import toy_config, toy_in_place, write_toy

from flowrl.cli import main
from flowrl.objectives.terms import truncated_weight
from flowrl.recipes import grpo
from flowrl.training.record import Recording
from flowrl.workers import rollouts

pytestmark = pytest.mark.usefixtures("numbers_alone")


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TinyRuns]:
    monkeypatch.setattr(rollouts, "RayBackend", Inside)
    monkeypatch.setattr(rollouts, "join_cluster", lambda config, run: "here")
    Inside.asked, Inside.drew = [], set()
    for config in toy_in_place(tmp_path):
        yield TinyRuns(folder=tmp_path, config=config)


def rows(run: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if not key.startswith("workers/")} for row in metrics(run)]


def test_a_run_that_stopped_with_several_iterations_in_flight_equals_one_that_never_did(toy: TinyRuns) -> None:
    settings = ("workers.rollouts=2", "workers.staleness=3", "updates_per_rollout=2", "checkpoint_every=2")
    whole = toy.train("whole", "num_iterations=5", *settings)
    assert Inside.asked[:4] == [(0, 1), (1, 1), (2, 1), (3, 1)]  # all four with the weights that the run began with
    assert sorted(state(whole)["memory"]["ahead"]) == [2, 3, 4]

    parts = toy.train("parts", "num_iterations=3", *settings)
    assert main(["train", f"resume={parts}", "num_iterations=5"]) == 0
    assert rows(whole) == rows(parts)
    assert lora(whole) == lora(parts)
    assert differences(lasting(whole), lasting(parts)) == 0


def test_workers_that_die_come_and_go_change_no_bit(
    toy: TinyRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("num_iterations=3", "rollout_batch_size=1")
    here = toy.train("here", *sizes)
    there, row = toy.folder / "there", rollouts.Rollouts.row
    asked = iter(["3", "0000000000200000", "1"])

    def written(self: rollouts.Rollouts) -> dict[str, float]:
        (there / rollouts.ASKED).write_text(next(asked))
        self._looked = -math.inf  # else it looks once a second
        return row(self)

    monkeypatch.setattr(rollouts.Rollouts, "row", written)
    monkeypatch.setattr(Inside, "dies_at", 3)
    toy.train("there", *sizes, "workers.rollouts=1")
    assert rows(here) == rows(there)
    assert lora(here) == lora(there)
    said = capsys.readouterr().err
    assert "Rollout worker 0 was lost (its process ended)" in said
    assert "The run goes on with 3 rollout workers, as" in said
    assert "says '0000000000200000', and a number of workers is from 1 to 100,000: the run keeps those it has" in said
    assert Inside.drew == {0, 1, 2}


def test_stale_transitions_are_weighed(toy: TinyRuns) -> None:
    settings = (
        "num_iterations=3",
        "workers.rollouts=1",
        "updates_per_rollout=2",
        "log_ratio=sum",
        "checkpoint_every=3",
    )
    found = {}
    for name, more in {
        "one": ("workers.staleness=1",),
        "none": ("workers.staleness=2", "workers.importance_cap=0"),
        "usual": ("workers.staleness=2",),
        "free": ("workers.staleness=2", "workers.importance_cap=1e9"),
    }.items():
        found[name] = rows(toy.train(name, *settings, *more))
        assert [row["ratio_first_deviation"] == 0 for row in found[name]] == [True, False, False]
    assert not any("stale_weight" in row for name in ("one", "none") for row in found[name])
    usual, free = ([row["stale_weight"] for row in found[name]] for name in ("usual", "free"))
    assert usual[0] == free[0] == 1  # the weights that drew are those of before the update
    assert all(0 < weight < 1 for weight in usual[1:])
    assert free[1] > usual[1]
    assert found["usual"][0] == found["none"][0] | {"stale_weight": 1.0}
    assert [row["reward"] for row in found["usual"][:2]] == [row["reward"] for row in found["none"][:2]]
    assert found["usual"][1]["grad_norm"] != found["none"][1]["grad_norm"]


def test_parts_of_a_state_are_weighed_alike(toy: TinyRuns) -> None:
    """Workers send the means by which each part has a ratio; a row's weight is one of its parts' losses too."""
    (toy.folder / "halves.py").write_text(
        "def left(images, prompts, metadata):\n    return images[..., :1].mean((1, 2, 3))\n\n"
        "def right(images, prompts, metadata):\n    return -images[..., 1:].mean((1, 2, 3))\n"
    )
    both = [f"{{file: {toy.folder}/halves.py, function: {name}, routes: [{name}]}}" for name in ("left", "right")]
    how = (f"rewards=[{', '.join(both)}]", "reward_aggregation=each", "updates_per_rollout=2")
    plain, drawn = toy.train("plain", *how), toy.train("drawn", *how, "workers.rollouts=1")
    assert lora(plain) == lora(drawn)
    stale = ("num_iterations=2", "workers.rollouts=1", "workers.staleness=2", "log_ratio=sum")
    row = rows(toy.train("stale", *how, *stale))[-1]
    assert 0 < row["stale_weight"] < 0.99
    assert row["policy_loss"] == pytest.approx(
        (row["part/left/policy_loss"] + row["part/right/policy_loss"]) / 2, rel=1e-5
    )


def test_a_truncated_weight_turns_means_under_one_policy_into_those_of_another() -> None:
    """Gaussians mu = N(0, 1) and pi = N(0.3, 1), integrated: E_mu[w x] is E_pi[x] without a cap that cuts; with cap 1
    the mass is that of min(mu, pi), 2 Phi(-0.15)."""
    x = torch.linspace(-12, 12, 48001, dtype=torch.float64)
    mu, pi = (torch.exp(-((x - mean) ** 2) / 2) / math.sqrt(2 * math.pi) for mean in (0.0, 0.3))
    step = float(x[1] - x[0])
    free, cut = (truncated_weight((pi / mu).log(), cap) for cap in (1e9, 1.0))
    assert float((mu * free * x).sum()) * step == pytest.approx(0.3, abs=1e-9)
    assert float((mu * cut).sum()) * step == pytest.approx(
        math.erfc(0.15 / math.sqrt(2)), abs=1e-7
    )  # a kink within a step
    assert float(cut.max()) == 1
    assert float(truncated_weight(torch.tensor([900.0]), 2.0)) == pytest.approx(2)


def test_the_weight_is_of_the_policy_before_the_update_whichever_update_asks() -> None:
    """Three rows whose log-densities under the weights that drew, before the update and now are known; 4 dimensions."""
    drew, before, now = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 1.0, 3.0]), torch.tensor([9.0, 9.0, 9.0])
    workers = SimpleNamespace(weight_cap=1.5)
    loop: Any = SimpleNamespace(config=SimpleNamespace(workers=workers, log_ratio="mean"), device=torch.device("cpu"))
    sampled: Any = SimpleNamespace(log_prob=drew, states=torch.zeros(2, 4))
    record = Recording(loop, *[None, sampled, None, None])  # type: ignore[arg-type]
    index, wanted = torch.tensor([2, 0, 1]), torch.tensor([1.0, 1.5, math.exp(-0.25)])

    def weight(old: torch.Tensor, new: torch.Tensor, *, anchored: bool) -> torch.Tensor | None:
        rows, scored = (SimpleNamespace(old_log_prob=old[index]), SimpleNamespace(log_ratio=(new - old)[index] / 4))
        return record.stale_weight(rows, index, scored, anchored=anchored)  # type: ignore[arg-type]

    torch.testing.assert_close(weight(drew, before, anchored=True), wanted)
    torch.testing.assert_close(weight(before, now, anchored=False), wanted)
    workers.weight_cap = 0
    assert weight(drew, before, anchored=True) is None


FORWARD = ("workers.staleness=2", "recipe=forward", "objective.name=awm", "sampler.kernel=ode")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["workers.importance_cap=1"], r"workers\.importance_cap is 1.*, but workers\.staleness is 0"),
        (["workers.staleness=1", "workers.importance_cap=-1"], r"workers\.importance_cap must be at least 0"),
        (["workers.staleness=101"], r"workers\.staleness must be at most 100"),
        (["workers.staleness=2", "ratio=sequence", "loss_aggregation=samples"], r"set ratio=step, or workers"),
        ([*FORWARD, "workers.importance_cap=1"], r"workers\.importance_cap is set to 1\.0, but .* does not read it"),
    ],
)
def test_weights_that_make_no_sense_are_refused(tmp_path: Path, settings: list[str], words: str) -> None:
    from flowrl.session.preflight import recipe_of

    with pytest.raises(ValueError, match=words):
        recipe_of(config := toy_config(write_toy(tmp_path), "workers.rollouts=1", *settings)).check(config)


def test_whole_trajectories_may_be_stale_without_a_weight(tmp_path: Path) -> None:
    settings = ("workers.rollouts=1", "ratio=sequence", "loss_aggregation=samples")
    grpo.check(toy_config(write_toy(tmp_path), *settings, "workers.staleness=1"))
    grpo.check(toy_config(write_toy(tmp_path), *settings, "workers.staleness=3", "workers.importance_cap=0"))
