"""The kernel distance of feature sets against sums written out, its intervals, and the realism of drawn scenes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from flowrl.rewards.embedded.realism import scene_images, world_features, world_realism
from flowrl.rewards.references import WorldReferences
from flowrl.statistics.kernel_distance import kernel_interval
from flowrl.world.scene_prompts import train_records


def normals(n: int, shift: float = 0.0, seed: int = 0, d: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, d)) + shift


def distance(generated: np.ndarray, real: np.ndarray, labels: Sequence[Hashable] | None = None) -> float:
    """The distance alone; without labels every row is on its own."""
    return kernel_interval(generated, real, labels or range(len(real)), num_resamples=2).mean


def test_by_hand() -> None:
    """D = 1, generated {1, 2}, real {0, 1}: one pair within each, and between them those of different rows."""
    a, b = np.array([[1.0], [2.0]]), np.array([[0.0], [1.0]])
    e = [math.exp(-k / 2) for k in (0.0, 1.0, 4.0)]
    assert distance(a, b) == pytest.approx(e[1] + e[1] - 2 * (e[0] + e[2]) / 2, abs=1e-12)


def test_pairs_of_one_label_do_not_count() -> None:
    """Labels p, p, q: of each set two of three pairs, of the nine between four."""
    a, b = np.array([[1.0], [2.0], [3.0]]), np.array([[0.0], [1.0], [2.0]])
    e = [math.exp(-(k**2) / 2) for k in range(4)]
    within = (e[2] + e[1]) / 2
    between = (e[1] + e[0] + e[3] + e[2]) / 4
    assert distance(a, b, ["p", "p", "q"]) == pytest.approx(2 * within - 2 * between, abs=1e-12)


def test_unbiased_where_both_sets_are_alike_and_larger_the_further_apart() -> None:
    alike = [distance(normals(20, seed=2 * i), normals(20, seed=2 * i + 1)) for i in range(400)]
    error = np.std(alike) / 20
    assert abs(np.mean(alike)) < 3 * error
    assert min(alike) < 0 < max(alike)
    near, far = (distance(normals(200, s), normals(200, seed=1)) for s in (0.5, 1.0))
    assert 0.05 < near < far


def test_the_kernel_of_shifted_normals_in_closed_form() -> None:
    """E k over N(0,1) and N(s,1), D = 1: sqrt(1/3) exp(-s²/6) between, sqrt(1/3) within."""
    shift = 1.5
    expected = 2 * math.sqrt(1 / 3) * (1 - math.exp(-(shift**2) / 6))
    found = [distance(normals(100, shift, 2 * i, d=1), normals(100, seed=2 * i + 1, d=1)) for i in range(60)]
    assert abs(np.mean(found) - expected) < 4 * np.std(found) / math.sqrt(60)


def test_intervals_cover() -> None:
    """Of 60 draws with prompts of their own means, most intervals hold the true distance (95 % nominal)."""
    shift, hits = 1.5, 0
    for i in range(60):
        rng = np.random.default_rng(i)
        labels = np.repeat(np.arange(40), 2).tolist()
        own = np.repeat(rng.normal(size=(40, 1)) * 0.8, 2, axis=0)
        real, made = (own + 0.6 * rng.normal(size=(80, 1)) for _ in range(2))
        interval = kernel_interval(made + shift, real, labels, num_resamples=200, seed=i)
        assert interval.low <= interval.mean <= interval.high
        hits += interval.low <= 2 * math.sqrt(1 / 3) * (1 - math.exp(-(shift**2) / 6)) <= interval.high
    assert hits >= 50


def test_a_paired_change_is_surer_than_two_intervals() -> None:
    before, real, labels = normals(60, 1.0), normals(60, seed=1), range(60)
    after = before - 0.1
    change = kernel_interval(after, real, labels, before=before, num_resamples=300)
    first, second = (kernel_interval(x, real, labels, num_resamples=300) for x in (before, after))
    assert change.mean == pytest.approx(second.mean - first.mean, abs=1e-12)
    assert change.high < 0
    assert change.high - change.low < 0.6 * (first.high - first.low)
    assert second.high > first.low, "which overlap"
    assert kernel_interval(after, real, labels, before=before, num_resamples=300) == change, "the seed decides"


def test_errors() -> None:
    a, b, labels = normals(4), normals(4, seed=1), list("abcd")
    with pytest.raises(ValueError, match=r"one label per row and .* got the shape \[1, 4\] and 4 labels"):
        kernel_interval(a[:1], b, labels)
    with pytest.raises(ValueError, match=r"4 labels, 1 of them different"):
        kernel_interval(a, b, ["a"] * 4)
    with pytest.raises(ValueError, match=r"the same features, got the shapes \[4, 4\] and \[4, 3\]"):
        kernel_interval(a, b[:, :3], labels)
    with pytest.raises(ValueError, match="hold numbers that are not finite"):
        kernel_interval(a, b * np.nan, labels)
    with pytest.raises(ValueError, match="num_resamples must be at least 1, got 0"):
        kernel_interval(a, b, labels, num_resamples=0)
    with pytest.raises(ValueError, match="one label per row"):
        kernel_interval(a, b, labels, before=a[:3])
    with pytest.raises(ValueError, match="got 2 images and 3 records"):
        world_realism(torch.zeros(2, 3, 64, 64), train_records()[:3])


@pytest.mark.slow
def test_realism_of_scenes_and_of_what_is_none() -> None:
    """Other scenes lie near 0; blurred ones do not, and half of them blurred lie between."""
    records = train_records()[:96]
    scenes = scene_images(records, seed=1)
    blurred = F.avg_pool2d(scenes, 3, 1, 1, count_include_pad=False)
    mixed = torch.cat([scenes[:48], blurred[48:]])
    real, half, none = (world_realism(x, records, num_resamples=200) for x in (scenes, mixed, blurred))
    assert abs(real.mean) < 0.003
    assert real.high < half.low
    assert half.high < none.low
    assert none.mean > 0.03


def test_features_of_scenes_are_white_and_of_images_alone() -> None:
    records = train_records()
    scenes = scene_images(records, seed=2)
    features = world_features(scenes)
    assert features.shape == (576, 304)
    assert features.dtype == np.float64
    assert float(np.abs(features.mean(axis=0)).max()) < 0.3
    assert 0.4 < float((features**2).mean()) < 1.2
    np.testing.assert_allclose(world_features(scenes[5:7]), features[5:7], atol=1e-4)


def test_scenes_for_realism_are_none_that_a_discriminator_learns_from() -> None:
    records = train_records()[:4]
    references = WorldReferences(seed=0)
    learned = references.pick([], records, "learn", 0, 0)
    held_out = references.held_out([""] * 4, records)[1]
    judged = (scene_images(records).permute(0, 2, 3, 1) * 255).round().byte().numpy()
    for i in range(4):
        assert not np.array_equal(judged[i], learned[i])
        assert not np.array_equal(judged[i], held_out[i])
