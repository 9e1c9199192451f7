"""The kernel distance of feature sets against sums written out, its intervals, and the realism of drawn scenes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from flowrl.rewards.embedded.realism import scene_images, world_features, world_realism
from flowrl.rewards.references import WorldReferences
from flowrl.statistics.kernel_distance import Kernel, kernel_change, kernel_distance, kernel_interval
from flowrl.world.scene_prompts import train_records


def normals(n: int, shift: float = 0.0, seed: int = 0, d: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, d)) + shift


def test_by_hand() -> None:
    """D = 1, generated {1, 2}, real {0, 1}: the cubic kernel of 1·2, 0·1 and the four pairs between."""
    a, b = np.array([[1.0], [2.0]]), np.array([[0.0], [1.0]])
    between = (1 + 8 + 1 + 27) / 4
    assert kernel_distance(a, b) == pytest.approx(27 + 1 - 2 * between, abs=1e-12)
    e = [math.exp(-k / 2) for k in (0.0, 1.0, 4.0)]
    expected = e[1] + e[1] - 2 * (e[1] + e[0] + e[2] + e[1]) / 4
    assert kernel_distance(a, b, kernel="gaussian") == pytest.approx(expected, abs=1e-12)


def test_pairs_of_one_label_do_not_count() -> None:
    """Labels p, p, q: of each set two of three pairs, of the nine between four."""
    a, b = np.array([[1.0], [2.0], [3.0]]), np.array([[0.0], [1.0], [2.0]])
    labels = ["p", "p", "q"]
    within = (4**3 + 7**3) / 2
    real = (1 + 3**3) / 2
    between = (3**3 + 5**3 + 1 + 4**3) / 4
    found = kernel_distance(a, b, labels=labels, real_labels=labels)
    assert found == pytest.approx(within + real - 2 * between, abs=1e-12)


@pytest.mark.parametrize("kernel", ["cubic", "gaussian"])
def test_unbiased_where_both_sets_are_alike_and_larger_the_further_apart(kernel: Kernel) -> None:
    alike = [kernel_distance(normals(20, seed=2 * i), normals(20, seed=2 * i + 1), kernel=kernel) for i in range(400)]
    error = np.std(alike) / 20
    assert abs(np.mean(alike)) < 3 * error
    assert min(alike) < 0 < max(alike)
    near, far = (kernel_distance(normals(200, s), normals(200, seed=1), kernel=kernel) for s in (0.5, 1.0))
    assert 0.05 < near < far


def test_gaussian_kernel_of_shifted_normals_in_closed_form() -> None:
    """E k over N(0,1) and N(s,1), D = 1: sqrt(1/3) exp(-s²/6) between, sqrt(1/3) within."""
    shift = 1.5
    expected = 2 * math.sqrt(1 / 3) * (1 - math.exp(-(shift**2) / 6))
    found = [
        kernel_distance(normals(100, shift, 2 * i, d=1), normals(100, seed=2 * i + 1, d=1), kernel="gaussian")
        for i in range(60)
    ]
    assert abs(np.mean(found) - expected) < 4 * np.std(found) / math.sqrt(60)


@pytest.mark.parametrize("labelled", [False, True])
def test_intervals_cover(labelled: bool) -> None:
    """Of 60 draws with prompts of their own means, most intervals hold the true distance (95 % nominal)."""
    shift, hits = 1.5, 0
    for i in range(60):
        rng = np.random.default_rng(i)
        labels = np.repeat(np.arange(40), 2) if labelled else None
        own = np.repeat(rng.normal(size=(40, 1)) * 0.8, 2, axis=0) if labelled else rng.normal(size=(80, 1)) * 0.8
        real, made = (own + 0.6 * rng.normal(size=(80, 1)) for _ in range(2))
        rows = None if labels is None else labels.tolist()
        interval = kernel_interval(
            made + shift, real, kernel="gaussian", labels=rows, real_labels=rows, num_resamples=200, seed=i
        )
        assert interval.low <= interval.mean <= interval.high
        hits += interval.low <= 2 * math.sqrt(1 / 3) * (1 - math.exp(-(shift**2) / 6)) <= interval.high
    assert hits >= 50


def test_a_paired_change_is_surer_than_two_intervals() -> None:
    before, real = normals(60, 1.0), normals(60, seed=1)
    after = before - 0.1
    change = kernel_change(before, after, real, kernel="gaussian", num_resamples=300)
    first, second = (kernel_interval(x, real, kernel="gaussian", num_resamples=300) for x in (before, after))
    assert change.mean == pytest.approx(second.mean - first.mean, abs=1e-12)
    assert change.high < 0
    assert change.high - change.low < 0.6 * (first.high - first.low)
    assert second.high > first.low, "which overlap"
    assert kernel_change(before, after, real, kernel="gaussian", num_resamples=300) == change, "the seed decides"


def test_errors() -> None:
    a, b = normals(4), normals(4, seed=1)
    with pytest.raises(ValueError, match=r"generated must be at least two feature vectors \[N, D\], got .* \[1, 4\]"):
        kernel_distance(a[:1], b)
    with pytest.raises(ValueError, match="the same features, got 4 and 3"):
        kernel_distance(a, b[:, :3])
    with pytest.raises(ValueError, match="real holds numbers that are not finite"):
        kernel_distance(a, b * np.nan)
    with pytest.raises(ValueError, match=r"labels \(4\) and real_labels \(none\) must name"):
        kernel_distance(a, b, labels=list("abcd"))
    with pytest.raises(ValueError, match=r"the same two or more values, got 4 and 3, of which one side only has 'd'"):
        kernel_distance(a, b, labels=list("abcd"), real_labels=list("abcc"))
    with pytest.raises(ValueError, match="level must lie between 0 and 1, got 95"):
        kernel_interval(a, b, level=95)
    with pytest.raises(ValueError, match="num_resamples must be at least 1, got 0"):
        kernel_interval(a, b, num_resamples=0)
    with pytest.raises(ValueError, match="must pair"):
        kernel_change(a, a[:3], b)
    with pytest.raises(ValueError, match="got 2 images and 3 records"):
        world_realism(torch.zeros(2, 3, 64, 64), train_records()[:3])


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
