"""A run stops on a reward that says nothing, or that fails too often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_runs import metrics
from toy_pipeline import toy_in_place, write_toy

from flowrl.cli import main
from flowrl.runs.vital_signs import EQUAL_LIMIT
from flowrl.training.reward_watch import CONSTANT_LIMIT, WINDOW, RewardWatch

VARIED, CONSTANT = torch.tensor([0.0, 1.0, 1.0, 0.0]), torch.full((4,), 0.5)


def watch(max_invalid_ratio: float = 0.5) -> RewardWatch:
    return RewardWatch({"constant": 0, "failed": []}, max_invalid_ratio=max_invalid_ratio)


def complaints(watch: RewardWatch, *rewards: torch.Tensor) -> list[str]:
    return [watch.complaint(reward, i, Counter({"remote/timeout": 2})) for i, reward in enumerate(rewards)]


def test_one_value_for_everything_is_a_dead_reward_after_the_limit() -> None:
    *before, last = complaints(watch(), *[CONSTANT] * CONSTANT_LIMIT)
    assert before == [""] * (CONSTANT_LIMIT - 1)
    assert last.startswith(f"the reward was 0.5 for every image in {CONSTANT_LIMIT} iterations in a row")


def test_a_value_that_varies_again_starts_the_count_over() -> None:
    rewards = [CONSTANT] * (CONSTANT_LIMIT - 1) + [VARIED] + [CONSTANT] * (CONSTANT_LIMIT - 1)
    assert not any(complaints(watch(), *rewards))


def test_more_failures_than_allowed_stop_the_run() -> None:
    failing = VARIED.clone()
    failing[:2] = torch.nan
    *before, last = complaints(watch(0.1), *[VARIED] * 7, *[failing] * 3)
    assert not any(before)  # 4 of 40 images is the limit
    assert "2 of 4 images got no valid reward (6 of 40 in the last 10 iterations; max_invalid_ratio is 0.1" in last
    assert "remote/timeout 2" in last
    assert last.endswith("Fix the reward or its server")


def test_completions_are_told_apart_from_images_and_nan_by_its_name() -> None:
    """4 images of 2 prompts with 5 completions each: who reads "24 of 24 images" looks for them in vain."""
    nan = Counter({"mine/not_finite": 24, "remote/garbage": 2, "remote/timeout": 1})
    said = watch().complaint(torch.full((24,), torch.nan), 0, nan, "2 prompts x 2 images")
    assert "24 of 24 scored images (2 prompts x 2 images, and completions on their way) got no valid reward" in said
    assert "(24 of 24 in the last iteration;" in said
    assert (
        "mine/not_finite 24 (NaN or infinity), remote/garbage 2 (a reply of another form), remote/timeout 1. Fix"
        in said
    )


def test_an_iteration_without_any_reward_stops_the_run() -> None:
    (said,) = complaints(watch(1.0), torch.full((4,), torch.nan))
    assert "4 of 4 images got no valid reward" in said


# ---- groups that agree -----------------------------------------------------------------------------------------------

PLACE = torch.arange(16) // 8
GRADED, VERDICT = torch.tensor([12.0, 13.5])[PLACE], torch.tensor([0.0, 1.0])[PLACE]


def of_groups(watch: RewardWatch, *rewards: torch.Tensor, group: torch.Tensor = PLACE) -> list[str]:
    return [watch.complaint(reward, i, Counter(), "", (reward, group)) for i, reward in enumerate(rewards)]


def test_a_reward_of_the_prompt_alone_is_dead_after_the_limit() -> None:
    *before, last = of_groups(watch(), *[GRADED] * EQUAL_LIMIT)
    assert before == [""] * (EQUAL_LIMIT - 1)
    assert f"in all groups in {EQUAL_LIMIT} iterations in a row" in last
    assert "reads the images and not the prompt alone" in last


def test_it_is_not_where_images_are_compared_beyond_their_groups() -> None:
    assert not any(watch().complaint(GRADED, i, Counter()) for i in range(2 * WINDOW))


def test_verdicts_have_more_iterations_and_are_warned_of_before() -> None:
    watched = watch()
    assert not any(of_groups(watched, *[VERDICT] * (EQUAL_LIMIT - 2)))
    assert watched.warning() == ""
    assert not any(of_groups(watched, VERDICT))
    assert f"for {EQUAL_LIMIT - 1} iterations in a row, so nothing is learned" in watched.warning()
    *before, last = of_groups(watched, *[VERDICT] * (WINDOW - EQUAL_LIMIT + 1))
    assert not any(before)
    assert f"in {WINDOW} iterations in a row" in last


def test_a_group_that_differs_starts_the_count_over_and_one_alive_reward_is_enough() -> None:
    noise = torch.rand(16, generator=torch.Generator().manual_seed(0))
    alive = torch.where(PLACE == 1, GRADED + noise, GRADED)
    assert not any(of_groups(watch(), *[GRADED] * 3, alive, *[GRADED] * 3))
    assert not any(of_groups(watch(), *[GRADED + noise] * WINDOW))


def test_few_images_have_to_agree_for_longer_and_failed_ones_say_nothing() -> None:
    reward, group = torch.tensor([1.0, 1.0, 2.0, 2.0]), torch.tensor([0, 0, 1, 1])
    said = of_groups(watch(), *[reward] * 6, group=group)
    assert said.index(next(filter(None, said))) == 5
    failed = torch.tensor([1.0, torch.nan, 2.0, torch.nan])
    assert not any(of_groups(watch(), *[failed] * WINDOW, group=group))


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    for _ in toy_in_place(tmp_path):
        source = "def length(images, prompts, metadata):\n    return [float(len(p)) for p in prompts]\n"
        (tmp_path / "lengths.py").write_text(source)
        yield write_toy(tmp_path, rewards=[{"file": "lengths.py", "function": "length"}], num_iterations=8)


@pytest.mark.parametrize(
    "method",
    [
        (), ("adv_std=global",), ("credit.method=dense_grpo",),
        ("recipe=forward", "objective.name=nft", "sampler.kernel=ode"),
        ("recipe=preference", "objective.name=dpo", "sampler.kernel=ode"),
    ],
)  # fmt: skip
def test_a_training_on_the_length_of_prompts_stops(
    toy: Path, method: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(toy), "out=run", *method]) == 1
    assert "so nothing can be learned" in capsys.readouterr().err
    assert len(metrics(Path("run"))) == EQUAL_LIMIT - 1
    assert main(["train", "resume=run"]) == 1  # the count is in the checkpoint
    assert "so nothing can be learned" in capsys.readouterr().err


def test_a_virtual_member_of_every_group_tells_equal_rewards_apart(toy: Path) -> None:
    assert main(["train", str(toy), "out=run", "adv_virtual_max=100", "num_iterations=5"]) == 0
