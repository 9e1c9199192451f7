"""Objective art of recipe visited end to end: directions by all of a prompt's rewards, halves of groups, what is left
out, and states that workers send."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_pipeline
from recorded_gradients import recorded_gradients
from tiny_runs import TinyRuns, differences, lasting, lora, metrics, tiny_runs
from torch import Tensor
from toy_pipeline import QuickRun, Toy, reward_list, toy_config, toy_runs, write_toy
from two_processes import close, train_on_two

from flowrl.cli import main
from flowrl.pipelines import PIPELINES
from flowrl.pipelines.weights.trained_weights import Held
from flowrl.recipes import visited
from flowrl.session.preflight import resolve
from flowrl.training.draws import Drawn, Request
from flowrl.training.parts import read_run_prompts
from flowrl.training.paths import draw_request

pytestmark = pytest.mark.usefixtures("numbers_alone")

ART: dict[str, Any] = {
    "recipe": "visited",
    "sampler": {"kernel": "ode", "num_steps": 3},
    "objective": {"name": "art", "options": {"threshold": None}},
}
STILL = "optim.lr=1e-30"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PIPELINES, "sd3", "toy_pipeline")
        yield write_toy(tmp_path_factory.mktemp("art"), **ART)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRuns]:
    """Of the toy at guidance 1, with run folders."""
    folder = tmp_path_factory.mktemp("runs")
    write_toy(folder)
    rewards = [{"file": str(folder / "toy_rewards.py"), "function": "brightness"}]
    yield from toy_runs(folder, **ART, num_iterations=2, group_size=4, rewards=rewards)


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The gradient of every optimizer update, as one vector."""
    return recorded_gradients(monkeypatch)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of every update: the loop, what was visited, turns, and how many states they are."""
    found, descend = list[Any](), visited.descend

    def noted(*arguments: Any) -> None:
        found.append(arguments)
        descend(*arguments)

    monkeypatch.setattr(visited, "descend", noted)
    return found


def quick(toy: Path, *overrides: str, rollouts: Any = None) -> list[dict[str, Any]]:
    """The rows of a run without a run folder, but for times and workers."""
    config, run = toy_config(toy, *overrides), QuickRun(toy.parent)
    run.rollouts = rollouts
    visited.check(config)
    assert visited.main(resolve(config, read_run_prompts(config.prompts)), run)  # type: ignore[arg-type]
    told = ("seconds", "workers/")
    return [{key: value for key, value in row.items() if not key.startswith(told)} for row in run.logged]


# ---- what is learned -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("high_noise", [None, 2])
@pytest.mark.parametrize("space", ["clean", "velocity", "sigma_velocity"])
def test_the_first_gradient_is_that_along_the_covariance_of_rewards_and_latents(
    toy: Path, gradients: list[Tensor], seen: list[Any], space: str, high_noise: int | None
) -> None:
    """`w 2 (m / sigma) mean_D (G dv)` of every state, from finished latents and their own brightness."""
    given = f"objective.options={{space: {space}, magnitude: 0.3, high_noise: {high_noise or 'null'}}}"
    (row,) = quick(toy, given, STILL)
    loop, found, *_ = seen[0]
    path, sigma, total = found.path, found.schedule.sigma, torch.zeros(())
    steps = 3 if high_noise is None else high_noise
    assert path.kept == tuple(range(steps + 1))
    clean = path.final.view(2, 4, 12)
    reward = torch.sigmoid(clean).mean(2)
    covariance = torch.einsum("pk,pkd->pd", reward - reward.mean(1, keepdim=True), clean - clean.mean(1, keepdim=True))
    direction = covariance / covariance.square().mean(1, keepdim=True).sqrt()
    for step in range(steps):
        x, level = path.states[:, step], sigma[step].expand(8)
        velocity = loop.velocity(found.batch.asked.cond_of(found.batch.group))(x, level, 1000 * level).flatten(1)
        weight = {"clean": level**2, "velocity": level**0, "sigma_velocity": level}[space]
        pull = direction.repeat_interleave(4, 0) * velocity
        total = total + (weight * 2 * 0.3 / level * pull.mean(1)).sum() / (8 * steps)
    worked = torch.cat([one.flatten() for one in torch.autograd.grad(total, loop.policy.trained)])
    torch.testing.assert_close(gradients[0].to(worked), worked, rtol=1e-4, atol=1e-6)
    assert row["live_rows"] == 8 * steps
    assert row["old_kl"] < 1e-9
    assert row["masked_fraction"] == 0


def test_rewards_rise(toy: Path) -> None:
    for more in (("objective.options.high_noise=1",), ("group_size=2", "prompts_per_step=4")):
        rows = quick(toy, "num_iterations=10", "updates_per_rollout=2", "optim.lr=0.03", *more)
        assert sum(row["reward"] for row in rows[-3:]) / 3 > sum(row["reward"] for row in rows[:2]) / 2 + 0.05, more


def test_updates_have_disjoint_halves_of_every_prompt_and_directions_of_whole_ones(
    toy: Path, gradients: list[Tensor], seen: list[Any]
) -> None:
    quick(toy, STILL)
    quick(toy, STILL, "updates_per_rollout=2", "micro_batch_size=2")
    whole, first, second = (torch.cat([index for _, index in turns]) for _, _, turns, *_ in seen)
    images = [
        set(found.image[index].tolist()) for (_, found, *_), index in zip(seen, (whole, first, second), strict=True)
    ]
    assert images[1] | images[2] == images[0] == set(range(8))
    assert not images[1] & images[2]
    assert [sum(image < 4 for image in half) for half in images[1:]] == [2, 2]
    assert torch.equal(seen[0][1].direction, seen[1][1].direction)
    torch.testing.assert_close((gradients[1] + gradients[2]) / 2, gradients[0], rtol=1e-4, atol=1e-7)


def test_a_second_update_holds_on_to_the_rollout_and_the_mask_to_its_neighbourhood(toy: Path) -> None:
    given = ("updates_per_rollout=2", "optim.lr=0.1", "num_iterations=3")
    free = quick(toy, *given)
    assert all(row["old_kl"] > 1e-6 and row["masked_fraction"] == 0 for row in free)
    held = quick(toy, *given, "objective.options.threshold=1e-9")
    assert all(0 < row["masked_fraction"] <= 0.5 for row in held)  # never in the first update
    assert quick(toy, *given, "objective.options.threshold=100") == free


def test_prompts_of_equal_rewards_and_images_that_failed_are_left_out(
    toy: Path, gradients: list[Tensor], seen: list[Any]
) -> None:
    (row,) = quick(toy, reward_list(toy.parent, "half_fail"), "prompts_per_step=4", STILL)
    assert (row["zero_std_ratio"], row["live_rows"]) == (0.5, 2 * 4 * 3)
    assert float(gradients[0].abs().max()) > 0
    rows = quick(toy, reward_list(toy.parent, "broken"), STILL)
    assert rows[0]["invalid_ratio"] > 0
    assert rows[0]["live_rows"] == round((1 - rows[0]["invalid_ratio"]) * 8) * 3
    turns = torch.cat([index for _, index in seen[1][2]])
    assert len(set(seen[1][1].image[turns].tolist())) == rows[0]["live_rows"] // 3
    nothing = quick(toy, "adv_min_std=100")[0]
    assert (nothing["zero_std_ratio"], nothing["live_rows"]) == (1, 0)
    assert len(gradients) == 2
    assert "loss" not in nothing


def test_sizes_of_batches_do_not_change_the_result(toy: Path, gradients: list[Tensor]) -> None:
    rows = [
        quick(toy, "sampler.guidance_scale=2", *more)[0]
        for more in ((), ("micro_batch_size=1", "rollout_batch_size=2"))
    ]
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-5)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-7)


def test_evaluations_are_as_many_as_were_counted(toy: Path) -> None:
    for given in ((), ("objective.options.high_noise=2", "sampler.guidance_scale=2", "updates_per_rollout=2")):
        config = toy_config(toy, *given)
        found = visited.counts(config).of_iteration(0, Toy().passes, config.resolve_batch(1))
        (row,) = quick(toy, *given)
        kinds = ("rollout", "update", "backward")
        assert {kind: row[f"nfe/{kind}"] for kind in kinds} == {kind: getattr(found, kind) for kind in kinds}
        assert row["images"] == found.images == 8
        assert "nfe/reference" not in row
        assert found.reference == 0


class Elsewhere:
    """A worker that holds the learner's own loop, and draws what it is asked for by the requests alone."""

    lines = None

    def __init__(self) -> None:
        self.layout = dict[str, Any]()
        self.loop: Any = None
        self.asked: list[Request] = []

    def send(self, weights: Mapping[str, Held], split: None) -> None:
        assert weights

    def submit(self, requests: Sequence[Request], version: None) -> list[int]:
        self.asked += requests
        return list(range(len(self.asked) - len(requests), len(self.asked)))

    def row(self) -> dict[str, float]:
        return {"alive": 1, "restarts": 0, "wait_seconds": 0}

    def collect(self, tickets: Sequence[int]) -> Iterator[Drawn]:
        for ticket in tickets:
            yield Drawn(found=draw_request(self.loop, self.asked[ticket]), evaluations={})


@pytest.mark.parametrize(
    "given",
    [
        ("objective.options.high_noise=2",),
        ("objective={name: opd}", "policy.teachers=[{guidance_scale: 3}]"),
        ("objective={name: opd}", "policy.teachers=[{guidance_scale: 3}]", "sampler.kernel=flow_sde", "rewards=[]"),
    ],
    ids=["art", "opd", "opd with noise"],
)
def test_workers_send_the_states_that_are_trained(
    toy: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...]
) -> None:
    elsewhere, iterate = Elsewhere(), visited.iterate

    def with_loop(loop: Any, iteration: int) -> None:
        elsewhere.loop = loop
        iterate(loop, iteration)

    more = ("num_iterations=2", "rollout_batch_size=4", *given)
    here = quick(toy, *more)
    monkeypatch.setattr(visited, "iterate", with_loop)
    assert quick(toy, *more, "workers.rollouts=1", rollouts=elsewhere) == here
    assert len(elsewhere.asked) == 4


# ---- whole runs ------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_to_the_bit(runs: TinyRuns, tmp_path: Path) -> None:
    given = ("updates_per_rollout=2", "policy.ema_decay=0.9", "objective.options.threshold=1e-6")
    whole = runs.train(str(tmp_path / "whole"), "num_iterations=4", *given)
    run = runs.train(str(tmp_path / "run"), *given)
    assert main(["train", f"resume={run}", "num_iterations=4"]) == 0
    assert metrics(run) == metrics(whole)
    assert lora(run) == lora(whole)
    assert differences(lasting(run), lasting(whole)) == 0


@pytest.mark.slow
def test_two_processes_train_what_one_does(runs: TinyRuns, tmp_path: Path, warm_python: str) -> None:
    """A process has a prompt of equal rewards, so that it takes idle turns for the other's, and mask and halves."""
    rewards = reward_list(runs.folder, "half_fail")
    given = ("num_iterations=3", "micro_batch_size=2", "updates_per_rollout=2", "prompts_per_step=4")
    given += (rewards, "objective.options={threshold: 1e-6, high_noise: 2}")  # type: ignore[assignment]
    one = runs.train(str(tmp_path / "one"), *given)
    told = [
        (0, True, [str(runs.config), *given, f"out={tmp_path / name}", f"parallel.{name}=2"])
        for name in ("shard", "replicate")
    ]
    train_on_two(tmp_path, told, python=warm_python)
    for name in ("shard", "replicate"):
        close(one, tmp_path / name)


@pytest.mark.slow
def test_weights_themselves_are_trained(tmp_path: Path, tiny_sd3_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PIPELINES, "sd3", "flowrl.pipelines.families.sd3")  # the toy cannot be saved
    full = {**ART, "policy": {"train": "full"}, "updates_per_rollout": 2, "group_size": 4}
    run = tiny_runs(tmp_path, tiny_sd3_folder, **full).train("run", "num_iterations=3", "optim.lr=1e-4")
    assert all(row["old_kl"] > 0 and row["grad_norm"] > 0 for row in metrics(run))


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("objective.options.magnitudes=1",), "unknown key 'magnitudes': did you mean 'magnitude'?"),
        (("objective.options.space=noise",), "clean, velocity, sigma_velocity"),
        (("objective.options.high_noise=4",), "high_noise is 4, and a path has 3: lower it"),
        (("sampler.kernel=cps",), "sampler.kernel is cps: set sampler.kernel=ode"),
        (("same_latent=true",), "by the ODE of objective art images of one start noise are one image"),
        (("group_size=3", "updates_per_rollout=2"), "group_size (3) does not divide by updates_per_rollout (2)"),
        (("policy.teachers=[{guidance_scale: 3}]",), "but objective art of recipe visited does not read it"),
        (("kl_coef=0.1",), "kl_coef is set to 0.1, but objective art of recipe visited does not read it"),
        (("rewards=[]",), "rewards is empty"),
        (("group_size=1",), "group_size must be at least 2"),
    ],
)
def test_what_cannot_work_is_refused_before_a_model_loads(
    runs: TinyRuns,
    overrides: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(toy_pipeline, "load", None)
    assert main(["train", str(runs.config), f"out={runs.folder / 'refused'}", *overrides]) == 1
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (runs.folder / "refused").exists()


def test_prompts_must_be_whole_on_each_process(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visited, "data_ranks", lambda config: 4)
    with pytest.raises(ValueError, match=r"prompts_per_step \(2\) must divide by the 4 processes"):
        visited.check(toy_config(toy))
