"""Updates from the rollout's own graphs: the numbers of replayed ones bit for bit, and no second evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from toy_pipeline import quick_run, reward_list, toy_config, toy_in_place

from flowrl.planning.counts import graph_rows, of_run
from flowrl.training.kept_graphs import KeptGraphs
from flowrl.training.learner import GradientSum, NetworkCounter

BATCHES = ("micro_batch_size=2", "rollout_batch_size=2", "num_iterations=3")
GUIDED = "sampler.guidance_scale=3"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The toy's configuration, with the toy in the place of a model family."""
    yield from toy_in_place(tmp_path_factory.mktemp("graphs"))


def passes(scale: float) -> int:
    return 1 if scale == 1 else 2


def numbers(row: dict[str, Any]) -> dict[str, Any]:
    """Without times and counts."""
    return {key: value for key, value in row.items() if not key.startswith(("seconds", "nfe/", "budget"))}


@pytest.mark.parametrize(
    "overrides",
    [
        (), (GUIDED,), (GUIDED, "sampler.train_negative=false"), (GUIDED, "sampler.train_negative=recompute"),
        (GUIDED, "kl_coef=0.1"), ("ratio=sequence", "loss_aggregation=samples"), ("credit.method=tp_grpo",),
        ("policy.ema_decay=0.9",), ("best_of=2",),
    ],
    ids=" ".join,
)  # fmt: skip
def test_kept_graphs_give_the_numbers_of_replayed_ones(toy: Path, overrides: tuple[str, ...]) -> None:
    replayed, kept = (
        quick_run(toy_config(toy, *BATCHES, *overrides, f"keep_graphs={keep}"), toy.parent)
        for keep in ("false", "true")
    )
    assert [numbers(row) for row in kept] == [numbers(row) for row in replayed]
    assert kept[-1]["ratio_first_deviation"] == 0.0
    assert kept[-1]["grad_norm"] > 0
    assert replayed[-1]["nfe/update"] > 0
    assert "nfe/update" not in kept[-1]
    for kind in ("rollout", "backward"):
        assert kept[-1][f"nfe/{kind}"] == replayed[-1][f"nfe/{kind}"]


def test_graphs_of_groups_that_teach_nothing_are_freed(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches of equal rewards are not walked back, and their graphs do not stay until the next rollout."""
    made, walked = list[KeptGraphs](), list[None]()
    init, add = KeptGraphs.__init__, GradientSum.add

    def noted(self: KeptGraphs, network: NetworkCounter) -> None:
        init(self, network)
        made.append(self)

    def counted(self: GradientSum, loss: Any) -> None:
        walked.append(None)
        add(self, loss)

    monkeypatch.setattr(KeptGraphs, "__init__", noted)
    monkeypatch.setattr(GradientSum, "add", counted)
    half = (*BATCHES, "prompts_per_step=4", reward_list(toy.parent, "half_fail"))
    config = toy_config(toy, *half, "keep_graphs=true")
    last = quick_run(config, toy.parent)[-1]
    assert len(made) == 3
    assert all(not graphs._kept for graphs in made)
    low, high = config.sampler.stochastic_range
    assert len(walked) == 3 * (high - low) * config.num_images // 4  # of two images each, two prompts of four
    assert last["nfe/backward"] == quick_run(toy_config(toy, *half), toy.parent)[-1]["nfe/backward"]


@pytest.mark.parametrize("negative", ["true", "false", "recompute"])
def test_the_plan_foretells_its_counts(toy: Path, negative: str) -> None:
    more = (*BATCHES, GUIDED, f"sampler.train_negative={negative}")
    config = toy_config(toy, *more, "keep_graphs=true")
    last, foretold = quick_run(config, toy.parent)[-1], of_run(config, passes, 1, 0).total
    assert (last["nfe/rollout"], last["nfe/backward"]) == (foretold.rollout, foretold.backward)
    assert foretold.update == 0
    low, high = config.sampler.stochastic_range
    assert graph_rows(config, passes) == graph_rows(toy_config(toy, *more), passes) * (high - low)


@pytest.mark.parametrize(
    "overrides",
    [
        ("updates_per_rollout=2",), ("micro_batch_size=4",), ("curriculum.max_rounds=2",),
        ("sampler.trained_fraction=0.5",),
    ],
    ids=" ".join,
)  # fmt: skip
def test_updates_of_other_batches_are_refused(toy: Path, overrides: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="keep_graphs"):
        quick_run(toy_config(toy, *BATCHES, "keep_graphs=true", *overrides), toy.parent)


@pytest.mark.parametrize("method", ["branch_grpo", "tree_grpo"])
def test_shared_latents_are_refused(toy: Path, method: str) -> None:
    more = ("credit.splits=[0, 1]",) if method == "branch_grpo" else ()
    with pytest.raises(ValueError, match="keep_graphs is set to True"):
        quick_run(toy_config(toy, "keep_graphs=true", f"credit.method={method}", *more), toy.parent)
