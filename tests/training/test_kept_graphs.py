"""Updates from the rollout's own graphs: the numbers of replayed ones bit for bit, and no second evaluation.

And from the gradients of each image, which are those numbers up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from pretend_gpu import Pretended, pretend_gpu
from torch import Tensor, nn
from toy_pipeline import quick_run, reward_list, toy_config, toy_in_place

from flowrl.config.base import find_config
from flowrl.config.train import TrainConfig, load_config
from flowrl.objectives.policy_gradient import Clip
from flowrl.pipelines.arithmetic.lora_linear import add_lora
from flowrl.pipelines.arithmetic.sample_gradients import SampleGradients
from flowrl.planning.cost import graph_rows, of_run
from flowrl.planning.throughput import Pace
from flowrl.runtime.randomness import counter_normal
from flowrl.samplers import KERNELS, build_schedule, rollout
from flowrl.training import kept_graphs
from flowrl.training.kept_graphs import KeptGradients, KeptGraphs, kl_of
from flowrl.training.learner import GradientSum, NetworkCounter
from flowrl.trajectory import Conditioning, Rows

BATCHES = ("micro_batch_size=4", "rollout_batch_size=4", "num_iterations=2")
"""Two batches of an iteration, and a second iteration, which must find nothing of the first."""
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
        ("kl_coef=0.1", "kl_type=velocity"), ("policy.ema_decay=0.9",), ("best_of=2",),
    ],
    ids=" ".join,
)  # fmt: skip
def test_kept_graphs_give_the_numbers_of_replayed_ones(toy: Path, overrides: tuple[str, ...]) -> None:
    replayed = quick_run(toy_config(toy, *BATCHES, *overrides, "keep_graphs=false"), toy.parent)
    kept = of_graphs(toy, overrides)[0]
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
    assert len(made) == 1
    assert not made[0]._kept
    low, high = config.sampler.stochastic_range
    assert len(walked) == 2 * (high - low) * config.num_images // 8  # of four images each, two prompts of four
    assert last["nfe/backward"] == quick_run(toy_config(toy, *half), toy.parent)[-1]["nfe/backward"]


@pytest.mark.parametrize(
    ("name", "level", "exact"),
    [
        ("flow_sde", 0.7, 0.003756438138),
        ("dance_sde", 0.3, 0.053971957465),
        ("cps", 0.8, 0.005838072716),
        ("dpm_sde", 1.0, 0.005805555556),
        ("wan_sde", 1.0, 0.009454052961),
    ],
)
def test_a_kl_of_velocities_is_their_squared_distance_whatever_the_kernel(
    name: str, level: float, exact: float
) -> None:
    kernel = replace(KERNELS[name], noise_level=level, sigma_max=0.95)
    x, v, other = torch.tensor(
        [[[0.3, -0.2, 0.5, 1.0]], [[0.1, 0.4, -0.6, 0.2]], [[0.0, 0.5, -0.5, 0.6]]], dtype=torch.float64
    )
    v.requires_grad_()
    levels = torch.tensor(0.8, dtype=torch.float64), torch.tensor(0.6, dtype=torch.float64)
    given = kernel, kernel(x, v, *levels), kernel(x, other, *levels), *levels
    for log_ratio in ("mean", "sum"):
        settings: Any = SimpleNamespace(kl_type="velocity", log_ratio=log_ratio)
        distance = kl_of(settings, *given)
        assert float(distance.detach()) == pytest.approx(0.0475, rel=1e-12)
        (slope,) = torch.autograd.grad(distance.sum(), v, retain_graph=True)
        torch.testing.assert_close(slope, 2 * (v - other).detach() / 4)
    settings = SimpleNamespace(kl_type="exact", log_ratio="mean")
    assert float(kl_of(settings, *given).detach()) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("negative", ["true", "false", "recompute"])
def test_the_plan_foretells_its_counts(toy: Path, negative: str) -> None:
    more = (*BATCHES, GUIDED, f"sampler.train_negative={negative}")
    config = toy_config(toy, *more, "keep_graphs=true")
    last, foretold = quick_run(config, toy.parent)[-1], of_run(config, passes, 1, 0).total
    assert (last["nfe/rollout"], last["nfe/backward"]) == (foretold.rollout, foretold.backward)
    assert foretold.update == 0
    low, high = config.sampler.stochastic_range
    assert graph_rows(config, passes) == graph_rows(toy_config(toy, *more), passes) * (high - low)


@pytest.mark.parametrize("keep", ["true", "gradients"])
def test_updates_of_other_batches_are_refused(toy: Path, keep: str) -> None:
    with pytest.raises(ValueError, match="micro_batch_size is 2 and rollout_batch_size 4"):
        quick_run(toy_config(toy, *BATCHES, f"keep_graphs={keep}", "micro_batch_size=2"), toy.parent)


@pytest.mark.parametrize("method", ["branch_grpo", "tree_grpo"])
def test_shared_latents_are_refused(toy: Path, method: str) -> None:
    more = ("credit.splits=[0, 1]",) if method == "branch_grpo" else ()
    with pytest.raises(ValueError, match="keep_graphs is set to True"):
        quick_run(toy_config(toy, "keep_graphs=true", f"credit.method={method}", *more), toy.parent)


# ---- gradients in place of graphs ------------------------------------------------------------------------------------

GRADIENTS, PACE = "keep_graphs=gradients", Pace(range=None, told="")


def learned(config: TrainConfig, folder: Path) -> tuple[list[dict[str, Any]], list[Tensor], list[Tensor]]:
    """Rows of a run; the gradient of each update, and the weights after it."""
    gradients, weights = list[Tensor](), list[Tensor]()
    apply = GradientSum.apply

    def noted(self: GradientSum, *arguments: Any) -> Tensor | None:
        gradients.append(torch.cat([total.flatten() for total in self.total]))
        norm = apply(self, *arguments)
        weights.append(torch.cat([one.detach().double().flatten() for one in self.trained]))
        return norm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientSum, "apply", noted)
        return quick_run(config, folder), gradients, weights


@cache
def of_graphs(toy: Path, overrides: tuple[str, ...]) -> tuple[list[dict[str, Any]], list[Tensor], list[Tensor]]:
    """`learned` by kept graphs, which two tests compare with."""
    return learned(toy_config(toy, *BATCHES, *overrides, "keep_graphs=true"), toy.parent)


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def same(found: Any, wanted: Any, *, gradient: float, later: float) -> None:
    """Losses to 1e-6, and of the norms of gradients and weights so much; entries near 0, whose steps Adam makes as long
    as others', then multiply what rounding made of them."""
    assert len(found[1]) == len(wanted[1]) == len(found[0])
    for mine, theirs in zip(found[0], wanted[0], strict=True):
        assert mine.keys() == theirs.keys()
        for key in ("loss", "policy_loss", "kl", "ratio_mean", "ratio_first_deviation", "clip_fraction", "live_rows"):
            assert mine.get(key, 0.0) == pytest.approx(theirs.get(key, 0.0), abs=1e-6), key
    assert apart(found[1][0], wanted[1][0]) < gradient
    assert all(apart(*pair) < later for pair in zip(found[1], wanted[1], strict=True))
    assert all(apart(*pair) < 2e-6 for pair in zip(found[2], wanted[2], strict=True))


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (GUIDED,),
        (GUIDED, "sampler.train_negative=false"),
        (GUIDED, "sampler.train_negative=recompute"),
        (GUIDED, "sampler.train_negative=recompute", "kl_coef=0.1"),
        ("credit.method=tp_grpo", GUIDED),
        ("credit.method=dense_grpo", "kl_coef=0.1", "loss_aggregation=samples"),
        ("best_of=2",),
        ("policy.lora_variant=dora", GUIDED),
        ("policy.lora_variant=rslora",),
        ("objective.name=guard",),
        ("objective.name=dppo",),
        ("objective.name=reinforce", "loss_aggregation=balanced"),
        ("micro_batch_size=1", "rollout_batch_size=1"),
        ("kl_coef=0.1", "kl_reference=ema", "policy.ema_decay=0.9"),
    ],
    ids=" ".join,
)
def test_gradients_of_images_give_the_updates_of_kept_graphs(toy: Path, overrides: tuple[str, ...]) -> None:
    found = learned(toy_config(toy, *BATCHES, *overrides, GRADIENTS), toy.parent)
    same(found, of_graphs(toy, overrides), gradient=1e-6, later=1e-5)
    assert found[0][-1]["ratio_first_deviation"] == 0.0
    assert "nfe/update" not in found[0][-1]


def test_gradients_of_groups_that_teach_nothing_are_left_out(toy: Path) -> None:
    more = (*BATCHES, "prompts_per_step=4", reward_list(toy.parent, "half_fail"), "loss_denominator=all")
    found, wanted = (
        learned(toy_config(toy, *more, f"keep_graphs={keep}"), toy.parent) for keep in ("gradients", "true")
    )
    same(found, wanted, gradient=1e-6, later=1e-5)
    # Nobody knows of an image that is drawn what its group will teach.
    assert found[0][-1]["nfe/backward"] == 2 * wanted[0][-1]["nfe/backward"]


@pytest.mark.parametrize("overrides", [(), ("kl_coef=0.1",), ("credit.method=tp_grpo",)], ids=" ".join)
@pytest.mark.slow
def test_gradients_of_images_on_the_embedded_model(tmp_path: Path, toy: Path, overrides: tuple[str, ...]) -> None:
    """A backward pass whose loss is scaled by 0.7 or 3, and its gradient back, is 1.4e-6 from the one that is not: the
    gradient of an image is that of another scale."""
    sizes = (
        "prompts_per_step=3",
        "group_size=4",
        "micro_batch_size=4",
        "rollout_batch_size=4",
        "num_iterations=2",
        "eval_every=0",
        "progress=false",
        "threads=1",
        reward_list(toy.parent, "redness"),
        *overrides,
    )
    found, wanted = (
        learned(load_config(find_config("tiny_grpo_geneval"), [*sizes, f"keep_graphs={keep}"]), tmp_path)
        for keep in ("gradients", "true")
    )
    same(found, wanted, gradient=3e-6, later=5e-5)


@pytest.mark.parametrize(
    "overrides",
    [(GUIDED, "kl_coef=0.1"), ("policy.lora_variant=dora",)],
    ids=" ".join,
)
def test_the_plan_foretells_the_passes_of_gradients(toy: Path, overrides: tuple[str, ...]) -> None:
    config = toy_config(toy, *BATCHES, *overrides, GRADIENTS)
    last, foretold = quick_run(config, toy.parent)[-1], of_run(config, passes, 1, 0).total
    assert {kind: last.get(f"nfe/{kind}", 0) for kind in ("rollout", "reference", "update", "backward")} == {
        "rollout": foretold.rollout,
        "reference": foretold.reference,
        "update": 0,
        "backward": foretold.backward,
    }
    rows = config.num_images * config.num_iterations * (config.sampler.num_steps - 1)
    assert foretold.backward == rows * 4  # both halves, and once more for the KL; or a walk for each of four images
    assert graph_rows(config, passes) == graph_rows(toy_config(toy, *BATCHES, *overrides), passes)


class Policy(nn.Module):
    """tanh(W x), W a layer with a LoRA in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5, bias=False).double().requires_grad_(False)
        self.layer.weight.copy_(counter_normal((5, 5), "policy"))
        add_lora(self, LoraConfig(r=2, target_modules=["layer"]), "default")
        for place, weight in enumerate(self.trained):
            weight.data = counter_normal(weight.shape, "lora", place).double()

    @property
    def trained(self) -> list[Tensor]:
        """A and B."""
        return [weight for weight in self.parameters() if weight.requires_grad]

    def sum_dtype(self, device: torch.device) -> torch.dtype:
        return torch.float64

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


@pytest.mark.parametrize("by_step", [False, True])
def test_weighted_gradients_are_autograds_of_the_surrogate(toy: Path, by_step: bool) -> None:
    """Four images and three steps; where steps are credited apart, the second counts twice and the third not."""
    policy, schedule = Policy(), build_schedule({"shift": 2.0}, 4, grid="linspace")
    kernel = replace(KERNELS["flow_sde"], sigma_max=schedule.sigma_max, noise_level=0.7)
    method = ("credit.method=tp_grpo",) if by_step else ()
    config = toy_config(toy, GRADIENTS, *method)
    network = NetworkCounter(lambda x, timestep, cond: policy(x), {})
    kept = KeptGradients(config, network, SampleGradients(policy, policy.trained), Clip(), lambda *given: given[1])
    cond = Conditioning({"none": torch.zeros(4)})
    noise, steps = counter_normal((3, 4, 5), "noise").double(), (0, 1, 2)
    given = (lambda x, sigma, timestep: network(x, timestep, cond), lambda step: noise[step], 0)
    velocity, drawn = kept.recording(*given, schedule, kernel, steps)
    with torch.no_grad():
        path = rollout(velocity, counter_normal((4, 5), "x").double(), schedule, kernel, drawn, stochastic=steps)

    advantage = torch.tensor([1.2, -0.3, -0.9, 0.0]).double()
    share = torch.tensor([1.0, 2.0, 0.0]).double() if by_step else torch.ones(3).double()
    surrogate = torch.zeros(()).double()
    gradient = GradientSum(policy, {}, scale_loss=False)  # type: ignore[arg-type]
    for step in steps:
        x, produced = path.states[:, step], path.states[:, step + 1]
        new = kernel(x, policy(x), schedule.sigma[step], schedule.sigma[step + 1])
        log_prob = kernel.log_prob(produced, new) / 5
        surrogate = surrogate - (share[step] / 12 * advantage * (log_prob - path.log_prob[:, step] / 5).exp()).sum()
        none, number = torch.zeros(4, dtype=torch.long), torch.arange(4)
        rows = Rows(
            source=number,
            produced=number,
            step=none + step,
            sample=number,
            group=none,
            keep=none == 0,
            old_log_prob=path.log_prob[:, step],
            advantage=advantage,
            weight=advantage,
            clip_low=advantage,
            clip_high=advantage,
        )
        kept.weigh(rows, rows.keep, share[step].expand(4) / 12, torch.zeros(4))
        assert torch.equal(kept.take(rows), policy(x).detach())
    kept.add_to(gradient)
    wanted = torch.autograd.grad(surrogate, policy.trained)
    assert sum(float(one.abs().sum()) for one in wanted) > 1e-3
    for found, right in zip(gradient.total, wanted, strict=True):
        assert (found - right).abs().max() < 1e-12


def test_what_is_kept_of_a_device_lies_on_the_host() -> None:
    with pretend_gpu("cuda") as findings:
        on_device = torch.arange(6.0).view(2, 3).to("cuda")
        kept = kept_graphs._on_host(on_device)
        assert isinstance(on_device, Pretended)
        assert not isinstance(kept, Pretended)
        assert kept.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert not findings.faults
