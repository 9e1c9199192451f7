"""Runs that train all weights and let workers draw: the bits of no workers. Workers live in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from kept_workers import Inside
from tiny_runs import TinyRuns, differences, lasting, metrics, model_tensors, state, tiny_runs
from torch import Tensor
from toy_pipeline import write_pairs

from flowrl.cli import main
from flowrl.workers import parcels, rollouts
from flowrl.workers.parcels import Shard, SharedBytes

pytestmark = pytest.mark.usefixtures("numbers_alone")

SENT = list[tuple[int, int, SharedBytes | None]]()
"""Of each version the bytes of its tensors, its bundles, and the memory that it lies in."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_sd3_folder: Path) -> Iterator[TinyRuns]:
    folder = tmp_path_factory.mktemp("all")
    settings: dict[str, Any] = {"policy": {"train": "full", "ema_decay": 0.5}, "optim": {"lr": 1e-3}, "threads": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollouts, "RayBackend", Inside)
        patch.setattr(rollouts, "join_cluster", lambda config, run: "here")
        patch.setattr(parcels, "BUNDLE", 2**15)  # of some hundred thousand bytes

        def counted(weights: Mapping[str, Any], *more: Any) -> tuple[Shard, SharedBytes | None]:
            part, memory = parcels.lay_down(weights, *more)
            bytes_of = sum(one.values.numel() * one.dtype.itemsize for one in weights.values())
            SENT.append((bytes_of, len(part.bundles), memory))
            return part, memory

        patch.setattr(rollouts, "lay_down", counted)
        made = tiny_runs(folder, tiny_sd3_folder, **settings)
        (folder / "held_out.txt").write_text("two red circles\na blue star\n")
        yield made


def rows(run: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if not key.startswith("workers/")} for row in metrics(run)]


def assert_same(run: Path, other: Path) -> None:
    assert rows(run) == rows(other)
    assert differences(model_tensors(run), model_tensors(other)) == 0


def numel(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors.values())


@pytest.mark.slow
def test_a_run_of_all_weights_is_that_without_workers(
    runs: TinyRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker dies, the run stops and goes on, and evaluations draw under the average."""
    sizes = ["pipeline.dtype=bfloat16", "num_iterations=3", "rollout_batch_size=4"]
    sizes += [f"prompts.eval={runs.folder / 'held_out.txt'}", "eval_every=1", "checkpoint_every=2"]
    here = runs.train("here", *sizes)
    SENT.clear()
    monkeypatch.setattr(Inside, "dies_at", 2)
    there = runs.train("there", *sizes, "num_iterations=2", "workers.rollouts=2")
    assert "was lost (its process ended)" in capsys.readouterr().err
    trained = numel(state(here)["policy"])
    _, *versions = SENT  # the first asks whether memory is reached
    assert [size for size, _, _ in versions] == [2 * trained] * 5  # three evaluations and two iterations, in 16 bits
    assert min(bundles for _, bundles, _ in versions) > 2
    assert len({id(memory) for _, _, memory in versions}) == 1  # laid down one after another in the same place

    assert main(["train", f"resume={there}", "num_iterations=3"]) == 0
    assert_same(here, there)


@pytest.mark.slow
def test_a_run_ahead_of_its_weights_goes_on_to_the_bit(runs: TinyRuns) -> None:
    more = ("workers.rollouts=1", "workers.staleness=2")
    whole = runs.train("whole", "num_iterations=3", *more)
    assert [row["ratio_first_deviation"] > 0 for row in rows(whole)] == [False, True, True]
    parts = runs.train("parts", "num_iterations=2", *more)
    assert main(["train", f"resume={parts}", "num_iterations=3"]) == 0
    assert_same(whole, parts)
    assert differences(lasting(whole), lasting(parts)) == 0


@pytest.mark.slow
def test_layers_alone_and_other_recipes(runs: TinyRuns) -> None:
    for name, more in {
        "layers": ("policy.target_modules=[attn]",),
        "nft": ("recipe=forward", "sampler.kernel=ode", "objective.name=nft", "times.count=2"),
        "branches": ("credit.method=g2rpo", "sampler.kernel=cps", "prompts_per_step=2"),
    }.items():
        more = (*more, "checkpoint_every=2")
        assert_same(runs.train(f"{name} here", *more), runs.train(f"{name} there", *more, "workers.rollouts=1"))


@pytest.mark.slow
def test_a_run_on_images_of_files_is_evaluated_elsewhere(runs: TinyRuns) -> None:
    write_pairs(shown := runs.folder / "shown", size=16)
    more = [
        "recipe=forward",
        "sampler.kernel=ode",
        "objective.name=sft",
        "times.count=2",
        f"objective.options.images={shown}",
    ]
    more += [f"prompts.eval={runs.folder / 'held_out.txt'}", "eval_every=2", "eval.initial=false"]
    Inside.asked.clear()
    assert_same(runs.train("shown here", *more), runs.train("shown there", *more, "workers.rollouts=1"))
    assert {iteration for iteration, _ in Inside.asked} == {-1}
