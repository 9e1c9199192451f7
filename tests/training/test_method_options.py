"""Options that change what a method does over the course of a run: calibrated noise, a sliding window of depths, DCPO's
clip range; and what several processes make of rewards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_gradients import recorded_gradients
from torch import Tensor
from toy_pipeline import QuickRun, on_threads, quick_run, reward_list, toy_config, toy_in_place

from flowrl.config.train import ConfigError, TrainConfig
from flowrl.credit import CREDIT
from flowrl.recipes import grpo
from flowrl.session.preflight import resolve
from flowrl.training.assignment import advantages, all_ends, best_samples, clip_ranges, credit_of, step_stds
from flowrl.training.loop import Loop
from flowrl.training.parts import read_run_prompts
from flowrl.training.paths import Paths, sample_paths, sampler_at

CALIBRATED = ("credit.method=dense_grpo", "sampler.kernel=dance_sde", "sampler.noise_level=0.7")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The toy's configuration, with the toy in the place of a model family."""
    yield from toy_in_place(tmp_path_factory.mktemp("options"))


def test_calibration_moves_the_noise_of_each_step_before_anything_is_trained(toy: Path) -> None:
    overrides = (*CALIBRATED, "sampler.calibration.iterations=2", "sampler.calibration.step=0.05", "num_iterations=4")
    rows = quick_run(toy_config(toy, *overrides), toy.parent)
    for number, row in enumerate(rows[:2], start=1):
        assert row["live_rows"] == 0
        assert "grad_norm" not in row
        levels = [row[f"noise_level/{step}"] for step in range(3)]
        assert all(round(abs(level - 0.7) / 0.05, 6) in (number - 2, number) for level in levels)
    assert all(row["live_rows"] > 0 and "noise_level/0" not in row for row in rows[2:])
    # A table that was found can be given to another run.
    table = [rows[1][f"noise_level/{step}"] for step in range(3)] + [0.7]
    (row,) = quick_run(
        toy_config(toy, CALIBRATED[0], CALIBRATED[1], f"sampler.noise_levels={table}", "seed=0"), toy.parent
    )
    assert row["live_rows"] > 0


def test_a_kernel_takes_the_level_of_its_step(toy: Path) -> None:
    config = toy_config(toy, "sampler.kernel=dance_sde", "sampler.noise_levels=[0.2, 0.4, 0.6, 0.8]")
    run: Any = QuickRun(toy.parent)
    kernel, schedule, _ = sampler_at(Loop(resolve(config, read_run_prompts(config.prompts)), run), 0)
    zero = torch.zeros(1, 1)
    for step, level in enumerate((0.2, 0.4, 0.6, 0.8)):
        now, after = schedule.sigma[step], schedule.sigma[step + 1]
        assert float(kernel(zero, zero, now, after).std) == pytest.approx(level * float(now - after) ** 0.5, rel=1e-5)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("sampler.noise_levels=[0.5]",), "one number above 0 for each of the 4 steps"),
        (("sampler.noise_levels=[1, 1, 1, 1]", "sampler.noise_level=1"), "in the place of noise_level"),
        (("sampler.calibration.iterations=2",), "starts at a noise level"),
        (("sampler.calibration.step=0",), "above 0"),
    ],
)
def test_noise_levels_that_cannot_be_are_refused(toy: Path, overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        toy_config(toy, *overrides)


def test_calibration_without_values_on_the_way_is_refused(toy: Path) -> None:
    config = toy_config(toy, "sampler.calibration.iterations=2", "sampler.noise_level=0.7")
    with pytest.raises(ValueError, match=r"sampler\.calibration\.iterations is set to 2, but credit method outcome"):
        grpo.check(config)


def test_a_window_of_pruned_depths_slides_over_the_run(toy: Path) -> None:
    window = "credit.options={depth_window: {first: 1, last: 3, size: 1, every: 1}}"
    tree = ("credit.method=branch_grpo", "credit.splits=[0, 1]", "num_iterations=4")
    whole = [row["live_rows"] for row in quick_run(toy_config(toy, *tree), toy.parent)]
    pruned = [row["live_rows"] for row in quick_run(toy_config(toy, *tree, window), toy.parent)]
    # Two trees have 2 transitions at depth 1, 4 at depth 2 and 4 at depth 3 each.
    assert [before - after for before, after in zip(whole, pruned, strict=True)] == [4, 8, 8, 8]
    with pytest.raises(ValueError, match=r"credit 'branch_grpo'.*depth window"):
        grpo.check(toy_config(toy, *tree, "credit.options={depth_window: {first: 0, last: 3}}"))


def test_dcpos_clip_range_is_wide_for_rare_draws(toy: Path) -> None:
    config = toy_config(toy, "shaping.name=dcpo", "shaping.options={clip: dynamic}", "clip_range=1e-3")
    run: Any = QuickRun(toy.parent)
    loop = Loop(resolve(config, read_run_prompts(config.prompts)), run)
    batch, (kernel, schedule, steps) = loop.batch(0), sampler_at(loop, 0)
    with torch.no_grad():
        scoring = loop.scorer.start(batch)
        how = Paths(kernel=kernel, schedule=schedule, steps=steps, keep_means=True)
        sampled = sample_paths(loop, batch, CREDIT["outcome"], how, scoring)
    low, high = clip_ranges(loop, sampled, kernel, schedule)
    assert sampled.mean is not None
    drawn = torch.stack([
        (sampled.states[sampled.produced[row]] - sampled.mean[row])
        / kernel(torch.zeros(1, 1), torch.zeros(1, 1), schedule.sigma[step], schedule.sigma[step + 1]).std.reshape(())
        for row, step in enumerate(sampled.step.tolist())
    ])  # fmt: skip
    share = (-drawn.flatten(1).square().mean(1) / 2).exp()
    torch.testing.assert_close(high, 0.5 + 0.5 * (1 + 4e-3 / share).sqrt() - 1, atol=2e-5, rtol=1e-3)
    torch.testing.assert_close(low, 0.5 - 0.5 * (1 - 4e-3 / share).sqrt(), atol=2e-5, rtol=1e-3)
    # A draw at its mean has the highest density, and by rounding a little more.
    highest = -step_stds(kernel, schedule).log()[sampled.step] - 0.5 * torch.tensor(2 * torch.pi).log()
    sampled.log_prob.copy_(sampled.states[0].numel() * (highest + 1e-5))
    low, high = clip_ranges(loop, sampled, kernel, schedule)
    assert low.tolist() == pytest.approx([0.5 - 0.5 * (1 - 4e-3) ** 0.5] * len(low), rel=1e-3)
    assert high.tolist() == pytest.approx([0.5 * (1 + 4e-3) ** 0.5 - 0.5] * len(high), rel=1e-3)
    overrides = ("num_iterations=2", "updates_per_rollout=2", "clip_range=1e-3", "shaping.name=dcpo")
    rows = quick_run(toy_config(toy, *overrides, "shaping.options={clip: dynamic}"), toy.parent)
    assert all(row["live_rows"] > 0 for row in rows)


@pytest.mark.parametrize("how", ["sum", "each", "gdpo"])
def test_groups_of_equal_rewards_are_counted_and_dropped_however_rewards_are_merged(toy: Path, how: str) -> None:
    """Two of four prompts give equal rewards: half of the sets are dead, and 2 x 4 images x 3 steps are trained."""
    (toy.parent / "half_red.py").write_text(
        "def half_red(images, prompts, metadata):\n"
        "    live = [prompt in ('a green star', 'three yellow triangles') for prompt in prompts]\n"
        "    return [float(red) * on for red, on in zip(images[:, 0].mean((1, 2)), live)]\n"
    )
    rewards = reward_list(toy.parent, "half_fail")[:-1] + f", {{file: {toy.parent}/half_red.py, function: half_red}}]"
    (row,) = quick_run(toy_config(toy, rewards, f"reward_aggregation={how}", "prompts_per_step=4"), toy.parent)
    assert (row["zero_std_ratio"], row["live_rows"]) == (0.5, 24)


def test_rewards_that_differ_by_less_than_adv_min_std_teach_nothing(toy: Path) -> None:
    tree = ("credit.method=branch_grpo", "credit.splits=[0, 1]", "adv_eps=1e-8", "adv_correction=1")
    (row,) = quick_run(toy_config(toy, *tree), toy.parent)
    assert (row["zero_std_ratio"], row["live_rows"]) == (0, 20)
    (row,) = quick_run(toy_config(toy, *tree, "adv_min_std=1"), toy.parent)  # rewards lie in [0, 1]
    assert (row["zero_std_ratio"], row["live_rows"]) == (1, 0)
    with pytest.raises(ConfigError, match="adv_min_std must be at least 0"):
        toy_config(toy, "adv_min_std=-1")


@pytest.mark.parametrize("average", ["rows", "samples", "balanced"])
@pytest.mark.parametrize(
    "steps", [(), ("sampler.trained_fraction=0.67", "sampler.trained_steps=random")], ids=["every", "random"]
)
def test_groups_of_equal_rewards_can_count_in_the_mean(
    toy: Path, average: str, steps: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the rows are dead: with them the gradient is half as large, and they are trained neither way.

    DanceGRPO and others average over all images, those of equal rewards with advantage 0.
    """
    gradients = recorded_gradients(monkeypatch)
    settings = (reward_list(toy.parent, "half_fail"), "prompts_per_step=4", f"loss_aggregation={average}", *steps)
    (live,) = quick_run(toy_config(toy, *settings), toy.parent)
    (every,) = quick_run(toy_config(toy, *settings, "loss_denominator=all"), toy.parent)
    if not steps:  # else dead rows stand in micro-batches between live ones, which rounds differently
        assert torch.equal(gradients[1], gradients[0] / 2)
    largest = float(gradients[0].abs().max())
    torch.testing.assert_close(gradients[1], gradients[0] / 2, rtol=0, atol=1e-6 * largest)
    assert largest > 0
    assert live["live_rows"] == every["live_rows"]
    assert live["zero_std_ratio"] == every["zero_std_ratio"] == 0.5


def assigned(config: TrainConfig, folder: Path, world: int) -> list[Tensor]:
    """Advantages, what may be trained, what carries a signal and what is selected, of all processes."""

    def work(run: Any) -> tuple[Tensor, ...]:
        loop, method = Loop(resolve(config, read_run_prompts(config.prompts)), run), CREDIT[config.credit.method]
        (kernel, schedule, steps), batch = sampler_at(loop, 0), loop.batch(0)
        scoring = loop.scorer.start(batch)
        with torch.no_grad():
            sampled = sample_paths(loop, batch, method, Paths(kernel=kernel, schedule=schedule, steps=steps), scoring)
        output = scoring.result()
        ends = all_ends(loop, batch, sampled, output)
        credit = credit_of(loop, sampled, output, kernel, schedule)
        of_parts, keep, signal = advantages(loop, method, batch.asked, sampled, credit, output, ends)[:3]
        return of_parts[0], keep, signal, best_samples(loop, sampled, ends)

    return [torch.cat(column) for column in zip(*on_threads(world, folder, work), strict=True)]


@pytest.mark.parametrize("credit", ["outcome", "tp_grpo"])
def test_two_processes_assign_what_one_does(toy: Path, credit: str) -> None:
    overrides = ("sampler.trained_fraction=0.67", "sampler.trained_steps=random", "best_of=2", "seed=1")
    config = toy_config(toy, f"credit.method={credit}", *overrides)
    (advantage, keep, signal, best), two = assigned(config, toy.parent, 1), assigned(config, toy.parent, 2)
    torch.testing.assert_close(two[0], advantage, rtol=0, atol=1e-4)  # in other batches, over a std of rewards
    assert torch.equal(two[2], signal)
    for alone, together in ((keep, two[1]), (best, two[3])):
        assert torch.equal(together, alone)
        assert not torch.equal(*alone.split(len(alone) // 2))  # the processes have not the same
