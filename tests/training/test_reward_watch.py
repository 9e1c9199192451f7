"""A run stops on a reward that says nothing, or that fails too often."""

from __future__ import annotations

from collections import Counter

import torch

from flowrl.training.reward_watch import CONSTANT_LIMIT, RewardWatch

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
    nan = Counter({"mine/not_finite": 24})
    said = watch().complaint(torch.full((24,), torch.nan), 0, nan, "2 prompts x 2 images")
    assert "24 of 24 scored images (2 prompts x 2 images, and completions on their way) got no valid reward" in said
    assert "(24 of 24 in the last iteration;" in said
    assert "mine/not_finite 24 (NaN or infinity). Fix" in said


def test_an_iteration_without_any_reward_stops_the_run() -> None:
    (said,) = complaints(watch(1.0), torch.full((4,), torch.nan))
    assert "4 of 4 images got no valid reward" in said
