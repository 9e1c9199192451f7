"""Counter-based randomness: reproducible, unambiguous, independent, and without a trace on global state."""

from __future__ import annotations

import hashlib
import math
import random
from typing import Any

import pytest
import torch

from flowrl.runtime.randomness import counter_choice, counter_integers, counter_normal, counter_seed, sample_normals


def test_seeds_are_pinned() -> None:
    """Every process, platform and later version gives these numbers, or old runs could not be drawn again."""
    assert counter_seed(0) == 7552799593083971110
    assert counter_seed(1, "step", 2) == 4529497091574682245
    written = b"i" + (1).to_bytes(8, "little") + b"0"
    assert counter_seed(0) == int.from_bytes(hashlib.blake2b(written, digest_size=8).digest(), "little") // 2
    assert counter_integers(0, 1000, 3, "x") == counter_seed("integers", 3, "x") % 1000


def test_different_counters_give_different_seeds() -> None:
    tuples: list[tuple[int | str, ...]] = [
        (1, 23),
        (12, 3),
        (123,),
        ("1", 23),
        ("123",),
        (1, "23"),
        ("1", "23"),
        ("12", "3"),
        (-1,),
        ("-1",),
        (1, ""),
        ("", 1),
        (1,),
        ("1i",),
        ("i", 1),
        (0,),
        (0, 0),
    ]
    tuples += [(i, j, k) for i in range(20) for j in range(20) for k in range(20)]
    seeds = [counter_seed(*parts) for parts in tuples]
    assert len(set(seeds)) == len(tuples)
    assert all(0 <= seed < 2**63 for seed in seeds)
    ones = sum(bin(seed).count("1") for seed in seeds)
    bits = 63 * len(seeds)
    assert abs(ones - bits / 2) < 4 * math.sqrt(bits) / 2


@pytest.mark.parametrize("bad", [True, 1.0, None, b"1", torch.tensor(1)])
def test_refuses_parts_of_other_types(bad: Any) -> None:
    with pytest.raises(TypeError, match="int or str"):
        counter_seed(0, bad)
    with pytest.raises(ValueError, match="at least one"):
        counter_seed()


def test_global_generators_are_left_alone() -> None:
    before = torch.get_rng_state(), random.getstate()
    counter_normal((20,), 1)
    counter_integers(0, 10, 1)
    counter_choice(10, 5, 1)
    sample_normals((3,), [(1,), (2,)])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    torch.manual_seed(1)
    first = counter_normal((20,), 1)
    torch.manual_seed(2)
    assert torch.equal(counter_normal((20,), 1), first)


def test_normals_are_normal_and_independent() -> None:
    n = 200_000
    a, b = counter_normal((n,), 0, "step", 0), counter_normal((n,), 0, "step", 1)
    assert a.dtype == torch.float32
    for x in (a, b):
        assert abs(float(x.mean())) < 4 / math.sqrt(n)
        assert abs(float(x.var()) - 1) < 4 * math.sqrt(2 / n)
        assert abs(float(x.pow(4).mean()) - 3) < 4 * math.sqrt(96 / n)
    assert abs(float((a * b).mean())) < 4 / math.sqrt(n)
    # Across counters too: the first number of each of many streams.
    first = torch.stack([counter_normal((1,), 0, sample) for sample in range(20_000)])
    assert abs(float(first.mean())) < 4 / math.sqrt(20_000)
    assert abs(float(first.var()) - 1) < 4 * math.sqrt(2 / 20_000)


def test_samples_do_not_depend_on_their_batch() -> None:
    keys = [(0, "start", sample) for sample in range(4)]
    batch = sample_normals((2, 3), keys)
    assert batch.shape == (4, 2, 3)
    assert torch.equal(sample_normals((2, 3), keys[2:3])[0], batch[2])
    assert torch.equal(counter_normal((2, 3), *keys[1]), batch[1])
    assert torch.equal(sample_normals((2, 3), keys[::-1]), batch.flip(0))
    with pytest.raises(ValueError, match="one key per sample"):
        sample_normals((2,), [])


def test_integers_are_uniform() -> None:
    n, low, high = 20_000, -3, 4
    draws = torch.tensor([counter_integers(low, high, 0, i) for i in range(n)])
    counts = torch.bincount(draws - low, minlength=high - low).double()
    assert len(counts) == high - low
    chi_square = float(((counts - n / 7).square() / (n / 7)).sum())
    assert chi_square < 22.5  # 6 degrees of freedom, probability .001
    assert counter_integers(5, 6, "anything") == 5
    with pytest.raises(ValueError, match="holds no integer"):
        counter_integers(3, 3, 0)


def test_choice_is_a_fair_draw_without_replacement() -> None:
    n, trials = 4, 12_000
    orders: dict[tuple[int, ...], int] = {}
    for trial in range(trials):
        order = counter_choice(n, n, "trial", trial)
        assert sorted(order) == list(range(n))
        orders[order] = orders.get(order, 0) + 1
    assert len(orders) == 24
    chi_square = sum((count - trials / 24) ** 2 / (trials / 24) for count in orders.values())
    assert chi_square < 49.8  # 23 degrees of freedom, probability .001


def test_choice_prefix_and_bounds() -> None:
    many = counter_choice(10**9, 50, 7)
    assert len(set(many)) == 50
    assert counter_choice(10**9, 20, 7) == many[:20]
    assert counter_choice(5, 0, 7) == ()
    assert counter_choice(0, 0, 7) == ()
    for n, k in [(3, 4), (3, -1)]:
        with pytest.raises(ValueError, match="distinct"):
            counter_choice(n, k, 0)
