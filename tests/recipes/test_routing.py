"""Rewards of parts of a state: an advantage, a loss and a ratio for each part (OmniNFT, arXiv 2605.12480)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_gradients import recorded_gradients
from torch import Tensor
from toy_pipeline import PARTS, QuickRun, on_threads, toy_config, toy_in_place

from flowrl.advantages import routing
from flowrl.advantages.normalise import aggregate
from flowrl.advantages.routing import Routes, by_part, mean_of_parts, regions_of
from flowrl.config.rewards import RewardConfig
from flowrl.config.train import TrainConfig
from flowrl.objectives.forward_losses import Awm, Matched, Nft, Rwr
from flowrl.objectives.policy_gradient import Clip, Guard, Scored
from flowrl.objectives.terms import clipped_surrogate, optimality
from flowrl.runs.metric_names import meaning_of
from flowrl.samplers import Transition, gaussian_log_prob
from flowrl.session.preflight import recipe_of, resolve
from flowrl.training.parts import read_run_prompts
from flowrl.training.reward_watch import RewardWatch
from flowrl.training.scoring import check_rewards, check_routes

OPPOSED = Routes(parts={"video": (..., slice(None, 2)), "sound": (..., slice(2, None))}, speaks_PK=torch.eye(2) > 0)
OF_HALVES = """
def left(images, prompts, metadata):
    return images[..., :1].mean((1, 2, 3))

def right(images, prompts, metadata):
    return -images[..., 1:].mean((1, 2, 3))

def opposite(images, prompts, metadata):
    return -images[..., :1].mean((1, 2, 3))
"""
ODE = ("recipe=forward", "sampler.kernel=ode", "sampler.noise_level=null")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The toy's configuration, with the toy in the place of a model family, and rewards of its halves beside it."""
    for path in toy_in_place(tmp_path_factory.mktemp("routing")):
        (path.parent / "halves.py").write_text(OF_HALVES)
        yield path


def rewards(toy: Path, **routes: str) -> str:
    """The override that takes these functions with these routes, "" for none."""
    entries = [f"{{file: {toy.parent}/halves.py, function: {name}, routes: [{own}]}}" for name, own in routes.items()]
    return f"rewards=[{', '.join(entries)}]"


def trained(config: TrainConfig, folder: Path, run: Any = None) -> list[dict[str, Any]]:
    """The rows of a run, checked and trained as the command does, without a run folder."""
    run, recipe = run or QuickRun(folder), recipe_of(config)
    recipe.check(config)
    assert recipe.main(resolve(config, read_run_prompts(config.prompts)), run)
    return run.logged  # type: ignore[no-any-return]


def double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ---- closed forms ----------------------------------------------------------------------------------------------------


def test_a_part_has_the_advantages_of_the_rewards_that_speak_of_it() -> None:
    reward_KB = double([[1.0, 0.0, 3.0, 1.0], [0.0, 1.0, 2.0, 4.0], [5.0, 5.0, 0.0, 2.0]])
    group, weights = torch.tensor([0, 0, 1, 1]), double([1.0, 1.5, 0.5])
    routes = Routes.of([["video"], ["sound"], []], OPPOSED.parts)
    assert routes is not None
    assert routes.speaks_PK.tolist() == [[True, False, True], [False, True, True]]
    found = by_part(routes, reward_KB, weights, lambda own: aggregate(reward_KB, group, own, "each", eps=0.0))
    # z-scores of pairs are +-1: (1, -1, 1, -1), (-1, 1, -1, 1), and (0, 0, -1, 1) of the reward of both.
    assert found.tolist() == [[1.0, -1.0, 0.5, -0.5], [-1.5, 1.5, -2.0, 2.0]]
    silent = by_part(routes, reward_KB, double([0.0, 1.0, 0.0]), lambda own: aggregate(reward_KB, group, own, "each"))
    assert silent[0].tolist() == [0.0] * 4  # its rewards have weight 0 in this iteration


def test_without_routes_or_with_all_of_them_everywhere_a_state_is_whole() -> None:
    assert Routes.of([[], ["sound", "video"]], OPPOSED.parts) is None
    assert regions_of(None) == ((...,),)
    value, x = double([[1.0, 2.0]]), double([3.0, 4.0])
    assert by_part(None, value, double([2.0]), lambda own: own * value[0]).tolist() == [[2.0, 4.0]]
    assert mean_of_parts([x]) is x


def matched_parts(velocity: Tensor, old: Tensor, clean: Tensor, advantage: list[float]) -> list[Matched]:
    """One clip of states `[tokens, 2]` at sigma 1/2, by part; velocities that give these clean predictions."""
    sigma, noise = double([0.5]), torch.zeros_like(clean)
    x = 0.5 * clean

    def of(prediction: Tensor) -> Tensor:
        return (x - prediction) / 0.5

    whole = {"clean": clean, "noise": noise, "velocity": of(velocity), "old": of(old)}
    return [
        Matched(
            **{name: value[..., rows, :] for name, value in whole.items()},
            sigma=sigma,
            advantage=double([one]),
            reward=double([0.0]),
            group=torch.tensor([0]),
        )
        for rows, one in zip((slice(None, 2), slice(2, None)), advantage, strict=True)
    ]


CLEAN = double([[[0.2, -0.1], [0.4, 0.3], [0.6, -0.4]]])
NEW = double([[[0.3, 0.1], [0.2, 0.5], [0.5, -0.1]]])
OLD = double([[[0.25, 0.0], [0.3, 0.4], [0.45, -0.2]]])


def test_parts_count_alike_whatever_their_elements() -> None:
    """Of nft; 4 numbers of video and 2 of sound."""
    both = matched_parts(NEW, OLD, CLEAN, [1.0, -1.0])
    assert optimality(double([1.0, -1.0])).tolist() == pytest.approx([0.6, 0.4])
    losses = [Nft()(one)[0] for one in both]
    assert [float(one) for one in losses] == pytest.approx([0.557142857143, 1.0], abs=1e-10)
    assert float(mean_of_parts(losses)) == pytest.approx(0.778571428571, abs=1e-10)


@pytest.mark.parametrize("adaptive", [True, False])
def test_each_part_is_pulled_by_its_own_advantage(adaptive: bool) -> None:
    """On policy the gradient of a part is that of `A mean(d^2)`, over its mean error if adaptive; of a sum of both
    advantages, 0 here, there is none."""
    loss = Nft(adaptive=adaptive)

    def gradient(advantage: list[float]) -> Tensor:
        given = NEW.clone().requires_grad_()
        parts = matched_parts(given, NEW, CLEAN, advantage)
        (found,) = torch.autograd.grad(mean_of_parts([loss(one)[0] for one in parts]).sum(), given)
        return found

    error = NEW - CLEAN
    wanted = torch.cat([sign * error[:, rows] / (2 * 2) for sign, rows in ((1, slice(2)), (-1, slice(2, 3)))], 1)
    wanted[:, 2:] *= 2  # of fewer elements
    if adaptive:
        wanted[:, :2] /= error[:, :2].abs().mean()
        wanted[:, 2:] /= error[:, 2:].abs().mean()
    torch.testing.assert_close(gradient([1.0, -1.0]), wanted, rtol=0, atol=1e-12)
    assert float(gradient([0.0, 0.0]).abs().max()) < 1e-15


def test_the_other_losses_take_parts_too() -> None:
    both = matched_parts(NEW, OLD, CLEAN, [1.0, -1.0])
    errors = [float((one.velocity - one.target).square().mean()) for one in both]
    awm = [Awm(weighting="uniform", advantage_max=5.0)(one)[0] for one in both]
    assert [float(one) for one in awm] == [-1.0, 1.0]  # -A, whose gradient is that of A times the part's error
    rwr = [Rwr(weights="raw")(replace(one, reward=double([w])))[0] for one, w in zip(both, (0.5, 2.0), strict=True)]
    assert [float(one) for one in rwr] == pytest.approx([0.5 * errors[0], 2.0 * errors[1]])


def test_a_density_is_the_product_of_those_of_its_parts() -> None:
    draw = torch.Generator().manual_seed(0)
    old, new, produced = (torch.randn(3, 2, 3, dtype=torch.float64, generator=draw) for _ in range(3))
    std, left, right = double(0.7), (..., slice(None, 1)), (..., slice(1, None))
    scored = Scored(
        log_ratio=gaussian_log_prob(produced, Transition(new, std)) - gaussian_log_prob(produced, Transition(old, std)),
        advantage=torch.zeros(3, dtype=torch.float64),
        clip_low=double([0.2] * 3),
        clip_high=double([0.3] * 3),
        new=Transition(new, std),
        old_mean=old,
        produced=produced,
        step_size=0.1,
        sensitivity=-0.1,
    )
    advantage = double([1.0, -1.0, 2.0])
    parts = [
        scored.part(region, sign * advantage, gaussian_log_prob, lambda latent: 1)
        for region, sign in ((left, 1), (right, -1))
    ]
    torch.testing.assert_close(parts[0].log_ratio + parts[1].log_ratio, scored.log_ratio, rtol=0, atol=1e-12)
    for one, region, sign in zip(parts, (left, right), (1, -1), strict=True):
        square = [(produced - mean)[region].square().flatten(1).sum(1) for mean in (old, new)]
        ratio = (square[0] - square[1]) / (2 * 0.7**2)
        torch.testing.assert_close(one.log_ratio, ratio, rtol=0, atol=1e-12)
        wanted = clipped_surrogate(ratio, sign * advantage, clip_low=0.2, clip_high=0.3)
        torch.testing.assert_close(Clip()(one), wanted, rtol=0, atol=1e-12)
        unbiased = ((new - old) * (produced - old) / 0.7)[region].flatten(1).mean(1)
        guarded = clipped_surrogate(unbiased, sign * advantage, clip_low=0.2, clip_high=0.3)
        torch.testing.assert_close(Guard(delta="none")(one), guarded, rtol=0, atol=1e-12)
    anchored = scored.anchored().part(left, advantage, gaussian_log_prob, lambda latent: 1)
    assert anchored.log_ratio.tolist() == [0.0] * 3


# ---- runs ------------------------------------------------------------------------------------------------------------

METHODS = {
    "grpo": (),
    "grpo kl": ("kl_coef=0.1", "updates_per_rollout=2", "micro_batch_size=2"),
    "nft": (*ODE, "kl_coef=0.1"),
    "awm": (*ODE, "objective.name=awm"),
}


@pytest.mark.parametrize("method", METHODS)
def test_rewards_of_all_parts_are_trained_as_without_routes(toy: Path, method: str) -> None:
    """Bit for bit: the state is not split."""
    how, clocks = ("reward_aggregation=each", *METHODS[method]), ("seconds", "memory")
    rows = [
        trained(toy_config(toy, rewards(toy, left=names, right=names), *how), toy.parent)
        for names in ("", "left, right")
    ]
    plain, routed = ([{k: v for k, v in row.items() if not k.startswith(clocks)} for row in run] for run in rows)
    assert plain == routed


@pytest.mark.parametrize("method", ["grpo", "nft", "awm", "rwr"])
def test_the_gradient_is_the_mean_of_those_of_the_parts(
    toy: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Of a part alone: the other part's loss made 0, by a mean over one part of two."""
    gradients = recorded_gradients(monkeypatch)
    own = (*ODE, "objective.name=rwr") if method == "rwr" else ("reward_aggregation=each", *METHODS[method])
    config = toy_config(toy, rewards(toy, left="left", right="right"), *own)
    (row,) = trained(config, toy.parent)
    for part in PARTS:
        assert {f"part/{part}/policy_loss", f"part/{part}/advantage_abs"} <= row.keys()
    assert row["policy_loss"] == pytest.approx(sum(row[f"part/{part}/policy_loss"] for part in PARTS) / 2, abs=1e-6)
    assert {meaning_of(name) for name in row if name.startswith("part/")}.isdisjoint({None})
    for kept in (0, 1):
        with monkeypatch.context() as patch:

            def only(values: list[Tensor], kept: int = kept) -> Tensor:
                return values[kept] / 2 if len(values) > 1 else values[0]

            patch.setattr(routing, "mean_of_parts", only)
            trained(config, toy.parent)
    whole, *alone = gradients
    assert len(alone) == 2
    assert float(min(one.abs().max() for one in alone)) > 0
    torch.testing.assert_close(whole, alone[0] + alone[1], rtol=0, atol=1e-6 * float(whole.abs().max()))


@pytest.mark.parametrize("method", ["grpo", "nft"])
def test_opposed_rewards_teach_their_parts_and_not_the_whole(
    toy: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Two rewards whose advantages sum to 0: nothing moves the whole, but each part its own, and nothing stops the
    run because the total is the same for all images."""
    gradients = recorded_gradients(monkeypatch)
    how = ("reward_aggregation=each", "num_iterations=4", *METHODS[method])
    rows = trained(toy_config(toy, rewards(toy, left="left", opposite="right"), *how), toy.parent)
    assert len(rows) == len(gradients) == 4
    assert all(row["part/left/advantage_abs"] == row["part/right/advantage_abs"] > 0 for row in rows)
    assert all(row["zero_std_ratio"] == 0 for row in rows)
    assert float(min(one.abs().max() for one in gradients)) > 1e-4
    gradients.clear()
    trained(toy_config(toy, rewards(toy, left="", opposite=""), *how[:1], *METHODS[method]), toy.parent)
    assert all(float(one.abs().max()) < 1e-6 for one in gradients)


def test_further_updates_compare_each_part_with_its_own_rollout(toy: Path) -> None:
    how = ("updates_per_rollout=2", "clip_range=1e-4", "kl_coef=0.1", "objective.name=guard", "reward_aggregation=gdpo")
    (row,) = trained(toy_config(toy, rewards(toy, left="left", right="right"), *how), toy.parent)
    assert row["ratio_first_deviation"] < 1e-6
    for name in ("clip_fraction", "kl", "policy_loss"):
        assert row[name] == pytest.approx(sum(row[f"part/{part}/{name}"] for part in PARTS) / 2, abs=1e-6)
    assert row["kl"] > 0


@pytest.mark.parametrize(
    "credit",
    [
        ("credit.method=dense_grpo",),
        ("credit.method=tempflow",),
        ("credit.method=tree_grpo", "credit.splits=[0, 1]", "loss_aggregation=rows"),
    ],
    ids=" ".join,
)
def test_credit_of_steps_goes_to_parts(toy: Path, credit: tuple[str, ...]) -> None:
    config = toy_config(toy, rewards(toy, left="left", right="right"), "reward_aggregation=each", *credit)
    (row,) = trained(config, toy.parent)
    assert row["part/left/advantage_abs"] != row["part/right/advantage_abs"]
    assert row["grad_norm"] > 0


def test_graphs_that_the_rollout_kept_train_parts_as_replays_do(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = recorded_gradients(monkeypatch)
    how = (rewards(toy, left="left", right="right"), "reward_aggregation=each", "kl_coef=0.1")
    for kept in ("true", "false"):
        trained(toy_config(toy, *how, f"keep_graphs={kept}"), toy.parent)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-6 * float(gradients[1].abs().max()))


@pytest.mark.parametrize("method", ["grpo", "nft"])
def test_two_processes_train_parts_as_one_does(toy: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Threads in their place; gradients are added up where processes add them."""
    config = toy_config(toy, rewards(toy, left="left", right="right"), "reward_aggregation=each", *METHODS[method])
    alone = trained(config, toy.parent)
    both = on_threads(2, toy.parent, lambda run: trained(config, toy.parent, run))
    for rows in both:
        for mine, theirs in zip(alone, rows, strict=True):
            assert mine.keys() == theirs.keys()
            for key in mine:
                if key.startswith(("part/", "advantage_abs", "policy_loss", "zero_std", "live_rows")):
                    assert mine[key] == pytest.approx(theirs[key], abs=1e-6), key


def test_an_image_without_a_reward_is_left_out_of_every_part(toy: Path) -> None:
    broken = f"{{file: {toy.parent}/toy_rewards.py, function: broken, routes: [right]}}"
    left = f"{{file: {toy.parent}/halves.py, function: left, routes: [left]}}"
    config = toy_config(toy, f"rewards=[{left}, {broken}]", "reward_aggregation=each")
    (row,) = trained(config, toy.parent)
    assert 0 < row["invalid_ratio"] < 1
    assert row["live_rows"] < 24


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_an_entry_with_routes_is_trained_on() -> None:
    with pytest.raises(ValueError, match="the routes of hps go with its weight, which is 0"):
        RewardConfig(name="hps", routes=("left",), weight=0.0)
    with pytest.raises(ValueError, match=r"routes is set for eval\.rewards hps"):
        check_rewards((), (RewardConfig(name="hps", routes=("left",)),), "sum", "drop")


def entries(*routes: tuple[str, ...], **more: Any) -> list[RewardConfig]:
    return [RewardConfig(name="hps", label=f"r{i}", routes=own, **more) for i, own in enumerate(routes)]


@pytest.mark.parametrize(
    ("given", "parts", "told"),
    [
        (entries(("sound",), ()), PARTS, "r0 name sound, and a state of family toy has the parts left, right"),
        (entries(("left",), ()), {}, "has no parts"),
        (entries(("left",), ("left",)), PARTS, "none speaks of right"),
        (entries(("left",), ("right",), gate=0.5), PARTS, "the gate of r0 changes the total"),
    ],
)
def test_parts_that_are_not_there_are_refused(given: list[RewardConfig], parts: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_routes(given, "toy", parts)
    check_routes(entries((), ()), "toy", parts)
    check_routes(entries(("left",), ()), "toy", PARTS)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ((), "reward_aggregation=sum makes one number of all rewards before"),
        (("reward_aggregation=log_tame",), "reward_aggregation=log_tame makes one number"),
        (ODE, "reward_aggregation=sum makes one number"),
        ((*ODE, "objective.name=dgpo"), "set objective.name to nft, awm or rwr"),
        ((*ODE, "objective.name=rft"), "objective rft compares whole images"),
    ],
)
def test_methods_that_have_one_number_for_an_image_are_refused(
    toy: Path, overrides: tuple[str, ...], told: str
) -> None:
    config = toy_config(toy, rewards(toy, left="left", right="right"), *overrides)
    with pytest.raises(ValueError, match=told):
        recipe_of(config).check(config)


def test_a_run_stops_where_no_reward_of_a_part_tells_images_apart() -> None:
    counters: dict[str, Any] = {"constant": 0, "failed": []}
    watch = RewardWatch(counters, max_invalid_ratio=1.0)
    total, group = torch.ones(4), torch.tensor([0, 0, 1, 1])
    apart = torch.tensor([[0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]])
    assert [watch.complaint(total, k, {}, compared=(apart, group)) for k in range(4)] == [""] * 4  # type: ignore[arg-type]
    same = torch.ones(2, 4)
    told = [watch.complaint(total, k, {}, compared=(same, group)) for k in range(3)]  # type: ignore[arg-type]
    assert told[:2] == ["", ""]
    assert "the reward was 1 for every image" in told[2]
