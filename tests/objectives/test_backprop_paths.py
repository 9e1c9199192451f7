"""Reward back-propagation through the sampler: which calls keep a gradient, and which gradient comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl.objectives.gradient_paths import PATHS, AlignProp, Draft, DrTune, Path, Refl, RewardLoss, backprop_sample
from flowrl.samplers import KERNELS, rollout
from flowrl.trajectory import Schedule

SIGMA = torch.tensor([1.0, 0.8, 0.5, 0.0])  # steps of -.2, -.3, -.5
SCHEDULE = Schedule(sigma=SIGMA, timestep=SIGMA[:-1] * 1000)
START = torch.full((1, 1), 2.0, dtype=torch.float64)


def linear(theta: Tensor, seen: list[bool] | None = None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """v(x) = theta x; notes whether gradient was on at each call."""

    def velocity(x: Tensor, sigma: Tensor, timestep: Tensor) -> Tensor:
        if seen is not None:
            seen.append(torch.is_grad_enabled())
        return theta * x

    return velocity


def slope(**options: Any) -> float:
    """Gradient of the end by theta = .3."""
    theta = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    end = backprop_sample(linear(theta), START, SCHEDULE, **options)
    (result,) = torch.autograd.grad(end.sum(), theta)
    return float(result)


def end_of_chain(theta: float, trained: float, steps: set[int]) -> float:
    """The end in plain numbers, with another theta at the trained steps and constant outputs elsewhere."""
    x = y = 2.0
    for k, h in enumerate((-0.2, -0.3, -0.5)):
        y = y + h * (trained * y if k in steps else theta * x)
        x = x + h * theta * x
    return y


def test_worked_gradients() -> None:
    everything = range(3)
    assert slope(train_steps=everything, stop_input=True) == pytest.approx(-1.8194, abs=1e-6)
    assert slope(train_steps=everything) == pytest.approx(-1.6442, abs=1e-6)


@pytest.mark.parametrize("steps", [{0}, {1}, {2}, {0, 1}, {0, 2}, {1, 2}, {0, 1, 2}])
def test_gradients_of_every_choice_of_steps(steps: set[int]) -> None:
    full = (end_of_chain(0.3, 0.3 + 1e-6, steps) - end_of_chain(0.3, 0.3 - 1e-6, steps)) / 2e-6
    assert slope(train_steps=steps) == pytest.approx(full, abs=1e-6)
    stopped = sum({0: -0.2 * 2, 1: -0.3 * 1.88, 2: -0.5 * 1.7108}[k] for k in steps)
    assert slope(train_steps=steps, stop_input=True) == pytest.approx(stopped, abs=1e-6)


def test_gradients_of_a_nonlinear_network_against_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    weight = torch.randn(3, 3, generator=generator, dtype=torch.float64)

    def end(w: Tensor, checkpoint: bool = False) -> Tensor:
        velocity: Any = lambda x, sigma, timestep: torch.tanh(x @ w) * (1 + sigma)  # noqa: E731
        return backprop_sample(velocity, x, SCHEDULE, train_steps=range(3), checkpoint=checkpoint).square().sum()

    assert torch.autograd.gradcheck(end, (weight.requires_grad_(),))
    gradients = [torch.autograd.grad(end(weight, checkpoint), weight)[0] for checkpoint in (False, True)]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("steps", [(0,), (2,), (0, 2)])
@pytest.mark.parametrize("stop_input", [True, False])
def test_the_network_runs_without_gradient_elsewhere(steps: tuple[int, ...], stop_input: bool) -> None:
    seen: list[bool] = []
    theta = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    backprop_sample(linear(theta, seen), START, SCHEDULE, train_steps=steps, stop_input=stop_input)
    assert seen == [k in steps for k in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_end_is_that_of_a_rollout(dtype: torch.dtype) -> None:
    theta = torch.tensor(0.3, dtype=dtype, requires_grad=True)
    x = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    kernel = KERNELS["ode"]
    velocity = linear(theta)
    with torch.no_grad():
        final = rollout(velocity, x, SCHEDULE, kernel, lambda step: x, stochastic=()).final
    for options in ({"train_steps": range(3)}, {"train_steps": (1,), "stop_input": True}):
        end = backprop_sample(velocity, x, SCHEDULE, **options)  # type: ignore[arg-type]
        assert torch.equal(end.detach(), final)
        assert end.requires_grad
        assert end.dtype == dtype


def test_refl_ends_with_the_clean_estimate_of_its_step() -> None:
    seen: list[bool] = []
    theta = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    end = backprop_sample(linear(theta, seen), START, SCHEDULE, train_steps=(1,), last_step=1)
    assert seen == [False, True]
    assert float(end.detach()) == pytest.approx(1.88 * (1 - 0.8 * 0.3), abs=1e-6)
    (result,) = torch.autograd.grad(end.sum(), theta)
    assert float(result) == pytest.approx(-0.8 * 1.88, abs=1e-6)


def test_refl_loss() -> None:
    reward = torch.tensor([0.7, 2.0, 3.5], dtype=torch.float64, requires_grad=True)
    loss = RewardLoss(loss="hinge", scale=1e-3)(reward)
    assert loss.tolist() == pytest.approx([0.0013, 0.0, 0.0], abs=1e-15)
    loss.sum().backward()
    assert reward.grad is not None
    assert reward.grad[0] == -1e-3
    assert reward.grad[2] == 0
    assert RewardLoss(loss="hinge", target=1.0)(reward.detach()).tolist() == pytest.approx([0.3, 0.0, 0.0])


def test_refl_steps_are_the_last_quarter() -> None:
    paths = [Refl()(40, seed=0, iteration=i) for i in range(300)]
    assert {path.last_step for path in paths} == set(range(30, 40))
    assert all(path.train_steps == (path.last_step,) and not path.stop_input for path in paths)
    assert {Refl(first=2, last=4)(40, seed=0, iteration=i).last_step for i in range(60)} == {2, 3, 4}
    assert Refl()(1, seed=0, iteration=0) == Path(train_steps=(0,), last_step=0)


def test_draft_trains_the_last_steps() -> None:
    assert Draft()(10, seed=0, iteration=0) == Path(train_steps=(9,), last_step=9)
    assert Draft(count=3)(10, seed=5, iteration=7).train_steps == (7, 8, 9)


def test_alignprop_keeps_late_steps_more_often() -> None:
    assert AlignProp(truncation="none")(50, seed=0, iteration=0).train_steps == tuple(range(50))
    draws, num_steps = 2000, 5
    kept = torch.zeros(num_steps)
    for i in range(draws):
        path = AlignProp()(num_steps, seed=1, iteration=i)
        assert path.last_step == 4
        assert not path.stop_input
        kept[list(path.train_steps)] += 1
    expected = torch.arange(1, 6) / 6
    # Keeping none falls to the last step; that has probability 5! / 6^5.
    expected[4] += 120 / 6**5
    assert float((kept / draws - expected).abs().max()) < 4 * (0.25 / draws) ** 0.5


def test_alignprop_keeps_the_last_step_where_a_draw_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrl.objectives.gradient_paths.counter_integers", lambda low, high, *parts: high - 1)
    assert AlignProp()(5, seed=0, iteration=0).train_steps == (4,)


def test_drtune_steps_are_evenly_spaced_and_reach_everything() -> None:
    paths = [DrTune(count=4)(20, seed=0, iteration=i) for i in range(100)]
    assert {path.train_steps for path in paths} == {tuple(range(o, 20, 5)) for o in range(5)}
    assert all(path.stop_input and path.last_step == 19 for path in paths)
    early = [DrTune(count=3, early_stop=4)(20, seed=0, iteration=i) for i in range(200)]
    assert {path.last_step for path in early} == {15, 16, 17, 18, 19}
    for path in early:
        assert len(set(path.train_steps)) == 3
        assert max(path.train_steps) <= path.last_step


@pytest.mark.parametrize("name", sorted(PATHS))
@pytest.mark.parametrize("num_steps", [1, 2, 7])
def test_every_path_can_be_sampled_and_drawn_again(name: str, num_steps: int) -> None:
    sigma = torch.linspace(1, 0, num_steps + 1)
    grid = Schedule(sigma=sigma, timestep=sigma[:-1] * 1000)
    for iteration in range(5):
        path = PATHS[name]()(num_steps, seed=3, iteration=iteration)
        assert path == PATHS[name]()(num_steps, seed=3, iteration=iteration)
        theta = torch.tensor(0.3, requires_grad=True)
        end = backprop_sample(
            linear(theta), torch.ones(2, 3), grid, train_steps=path.train_steps, last_step=path.last_step,
            stop_input=path.stop_input,
        )  # fmt: skip
        end.sum().backward()
        assert theta.grad is not None
        assert float(theta.grad) < 0


def test_paths_refuse_what_does_not_fit() -> None:
    velocity = linear(torch.tensor(0.3))
    for options, word in (
        ({"train_steps": ()}, "train_steps"),
        ({"train_steps": (3,)}, "train_steps"),
        ({"train_steps": (2,), "last_step": 1}, "train_steps"),
        ({"train_steps": (0,), "last_step": 3}, "last_step"),
    ):
        with pytest.raises(ValueError, match=word):
            backprop_sample(velocity, START, SCHEDULE, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scale"):
        RewardLoss(scale=0.0)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("refl", {"first": 5, "last": 4}), ("refl", {"last": 10}), ("draft", {"count": 11}), ("draft", {"count": 0}),
        ("drtune", {"early_stop": -1}),
        ("drtune", {"count": 8, "early_stop": 3}),
    ]  # fmt: skip
    for name, wrong in cases:
        with pytest.raises(ValueError, match=name):
            PATHS[name](**wrong)(10, seed=0, iteration=0)
